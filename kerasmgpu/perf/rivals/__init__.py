"""Other ways to train the workloads on ranks, for `kerasmgpu bench --beside`.

Each is a program that writes what it measured, in the form of `perf.measure`. Like
there, a step's time runs from the end of the step before it within one epoch of
`BATCHES_PER_EPOCH`, and a warm-up is left out.
"""
