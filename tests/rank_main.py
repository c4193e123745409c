"""What each rank of a test job runs: the given tests, in the given order.

rank_main.py FILE      (FILE has one test address a line)
"""

from __future__ import annotations

import faulthandler
import pathlib
import signal
import sys

import pytest
import rank_jobs


def main() -> int:
    # When mpirun ends the job because of one rank, the others show where they were.
    faulthandler.register(
        signal.SIGTERM, rank_jobs.STACKS, all_threads=True, chain=True
    )
    addresses = pathlib.Path(sys.argv[1]).read_text().splitlines()
    # What a rank that hangs has printed, Horovod too, is to be seen.
    options = ["-q", "-p", "no:cacheprovider", "--capture=tee-sys"]
    return pytest.main([*options, *addresses])


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # A failed test is in the notes; a non-zero exit would end the other ranks.
    sys.exit(0 if code in (0, 1) else int(code))
