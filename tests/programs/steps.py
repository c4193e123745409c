"""Ranks that reduce, step by step, until one of them does as it was told.

    python steps.py WHAT [STEPS]

WHAT happens on rank 1 at step 5: none, raise, exit0, exit3, leave (os._exit(0)), kill,
stop, sleep. Uses what the core uses of `kerasmgpu.report`.
"""

import os
import signal
import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf

from kerasmgpu import report
from kerasmgpu.topology import Topology


def misbehave(what: str) -> None:
    if what == "raise":
        raise ValueError("no such luck")
    if what == "exit0":
        sys.exit(0)
    if what == "exit3":
        sys.exit(3)
    if what == "leave":
        os._exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "sleep":
        report.working("loading data")
        time.sleep(6)


def main() -> None:
    what = sys.argv[1]
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    hvd.init()
    report.install_failure_hooks()
    topology = Topology(
        hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), 0, 1
    )
    report.start(topology, 2.0, hvd.allgather_object)
    report.used("steps")
    for step in range(steps):
        if step == 5 and hvd.rank() == 1:
            misbehave(what)
        report.waiting(f"step {step}")
        hvd.allreduce(tf.ones(10), name=f"step.{step}")
        report.working()
    print(f"rank {hvd.rank()} of {hvd.size()} is done", flush=True)


if __name__ == "__main__":
    main()
