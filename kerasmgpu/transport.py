"""Settings of MPI and Horovod that suit training, where the user has made none.

They must stand in the environment before MPI and Horovod start, the same on all ranks.
`kerasmgpu run` sets those of MPI; `HorovodStrategy` sets Horovod's, and under a bare
`mpirun` also those of MPI that a process can still choose.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping

OPEN_MPI = {
    # A rank that spins while it waits takes the core from one that computes.
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # Open MPI 5's own choice for large messages is no ring: three times slower than
    # one between hosts. This one (5) sends segments of this many bytes, which stay in
    # the processor's cache; it is the plain ring for what is smaller.
    "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
    "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
    "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": str(1 << 20),
    # On one host, Open MPI's own choice stands: the kernel copies from process to
    # process (CMA). Shared memory, in pieces of 32 KB, took 1.2 to 1.9 times as
    # long for 4.7 MB, 1.2 to 4 times for 64 MB, and cost a small net 3 % of its speed.
}
INTEL_MPI = {
    "I_MPI_ADJUST_ALLREDUCE": "8",
    "I_MPI_THREAD_YIELD": "2",
    "I_MPI_PIN": "0",
}
GLOO = {
    # The driver's own rendezvous waits; one dead host must not take minutes.
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "30",
}
#: Horovod looks for gradients that are ready in cycles (ms), cheap ones on one host.
HOROVOD_ON_ONE_HOST = {"HOROVOD_CYCLE_TIME": "0.1"}
#: Without NCCL, tensors above this (bytes) are not copied together before sending.
HOROVOD_WITHOUT_NCCL = {"HOROVOD_FUSION_THRESHOLD": str(1 << 20)}


def let_computation_go_first(threads: Iterable[int]) -> None:
    """Makes threads of this process "batch" ones to the scheduler of the system.

    Such a thread gets its share of the processors, but does not stop another at the
    moment it wakes up. Horovod's thread wakes up every cycle; where it shares a core
    with the computation, the other ranks wait for what it interrupts.
    """
    for thread in threads:
        with contextlib.suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def threads_of_process() -> set[int]:
    """This process's threads, by the system's numbers."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def missing(wanted: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Those settings that the user has not made."""
    return {name: value for name, value in wanted.items() if name not in environ}


def is_on_one_host(size: int, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher says that all ranks are on this host."""
    for name in (
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        "MPI_LOCALNRANKS",
        "HOROVOD_LOCAL_SIZE",
    ):
        if environ.get(name, "").isdigit():
            return int(environ[name]) == size
    return False
