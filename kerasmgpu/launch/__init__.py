"""Starting a job: what to run where, the command that does it, and its processes."""
