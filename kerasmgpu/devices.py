"""This rank's devices: its GPU, its share of the CPU's cores and threads.

The GPU paths are tested by their logic only; they have not run on a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from kerasmgpu.collectives import all_gather_object
from kerasmgpu.errors import LaunchError
from kerasmgpu.topology import Topology
from kerasmgpu.transport import threads_of_process

#: Parameters of glibc's `mallopt` (malloc.h). A trim threshold of -1 means never.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def pin_gpu(topology: Topology, memory_growth: bool) -> str | None:
    """Makes one GPU visible to this rank: the one numbered by its local rank.

    Does nothing without a GPU. Must run before TensorFlow uses a GPU.

    Args:
        memory_growth: take GPU memory as it is needed instead of all of it.

    Returns:
        The GPU's name, or None.

    Raises:
        LaunchError: fewer GPUs than ranks on this host, or TensorFlow already uses
            other GPUs.
    """
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    if topology.size == 1 or (len(gpus) == 1 and _gpus_assigned_by_launcher()):
        mine, visible = gpus[0], gpus
    elif topology.local_size > len(gpus):
        raise LaunchError(
            f"Rank {topology.rank} of {topology.size}: expected a GPU for each of the "
            f"{topology.local_size} ranks on this host. Received: {len(gpus)} GPU(s). "
            "Start at most that many ranks here, or set CUDA_VISIBLE_DEVICES='' to "
            "train on the CPU."
        )
    else:
        mine = gpus[topology.local_rank]
        visible = [mine]
    try:
        if topology.size > 1:
            tf.config.set_visible_devices(visible, "GPU")
        for gpu in visible if memory_growth else []:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        if topology.size == 1:
            return mine.name
        raise LaunchError(
            f"Rank {topology.rank} of {topology.size}: TensorFlow used its GPUs "
            "before kerasmgpu could choose this rank's. Create HorovodStrategy() "
            f"first, before any tensor or model. (TensorFlow said: {error})"
        ) from error
    return mine.name


def _gpus_assigned_by_launcher() -> bool:
    """Whether somebody has already given each rank a GPU of its own."""
    return bool(os.environ.get("CUDA_VISIBLE_DEVICES", ""))


def share_cpu_threads(topology: Topology, cores: int | None = None) -> int | None:
    """Gives TensorFlow this rank's share of the host's cores.

    N ranks with a thread a core each would fight for the cores. What the user has set,
    by TF_NUM_INTRAOP_THREADS or through TensorFlow, stays; so does everything where one
    rank has the host for itself. Too late once TensorFlow runs: then nothing changes.

    Args:
        cores: the cores that may be used; asked from the system by default.

    Returns:
        The threads set, or None where nothing was changed.
    """
    if topology.local_size == 1 or "TF_NUM_INTRAOP_THREADS" in os.environ:
        return None
    if tf.config.threading.get_intra_op_parallelism_threads() != 0:
        return None
    cores = cores or len(os.sched_getaffinity(0))
    bound = cores < (os.cpu_count() or 1)  # each rank was given cores of its own
    threads = cores if bound else max(1, cores // topology.local_size)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads)
        tf.config.threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        return None
    return threads


def keep_to_own_cores(topology: Topology, has_gpu: bool) -> list[int] | None:
    """Keeps this rank to cores of its own: its share of those its host's ranks have.

    A rank's threads wait for it to finish a step; where the system lets two ranks share
    a core for a moment, while another is idle, both are late, and with them all others.
    Nothing changes on a host where a launcher has given the ranks different cores,
    where there are fewer cores than ranks, where a rank has a GPU, and where
    KERASMGPU_PIN_CORES=0. Must be called on every rank.

    Returns:
        The cores, or None where nothing was changed.
    """
    if topology.size == 1:
        return None
    allowed = os.sched_getaffinity(0)
    wanted = os.environ.get("KERASMGPU_PIN_CORES", "1") != "0" and not has_gpu
    mine = (topology.node_rank, sorted(allowed), wanted)
    everyone = all_gather_object(mine)
    if any(other != mine for other in everyone if other[0] == mine[0]) or not wanted:
        return None
    cores = share_of_cores(
        sorted(allowed, key=_place), topology.local_rank, topology.local_size
    )
    if cores is None or len(cores) == len(allowed):
        return None
    for thread in threads_of_process():  # Horovod's own runs already
        with contextlib.suppress(OSError):  # it has ended, or it is not allowed
            os.sched_setaffinity(thread, cores)
    return cores


def keep_freed_memory(topology: Topology, has_gpu: bool) -> bool:
    """Lets this rank's process keep large blocks of memory that were freed.

    As a rule glibc gives blocks above 32 MB back to the system at once, and each new
    one is paid for by page faults: half the time of an all-reduce of 64 MB. Nothing
    changes on one rank, where the rank has a GPU, where the user has set MALLOC_* or
    GLIBC_TUNABLES, where KERASMGPU_KEEP_MEMORY=0, or without glibc.

    Returns:
        Whether it was set.
    """
    chosen = any(n.startswith(("MALLOC_", "GLIBC_TUNABLES")) for n in os.environ)
    wanted = os.environ.get("KERASMGPU_KEEP_MEMORY", "1") != "0" and not chosen
    if topology.size == 1 or has_gpu or not wanted or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, -1))


def share_of_cores(
    cores: Sequence[int], local_rank: int, local_size: int
) -> list[int] | None:
    """A rank's share of its host's cores, or None where there are too few."""
    if len(cores) < local_size:
        return None
    low = len(cores) * local_rank // local_size
    high = len(cores) * (local_rank + 1) // local_size
    return list(cores[low:high])


def _place(core: int) -> tuple[int, int, int]:
    """Sorts cores so that those of one socket, and of one physical core, are near."""
    folder = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
    try:
        package = int((folder / "physical_package_id").read_text())
        return package, int((folder / "core_id").read_text()), core
    except (OSError, ValueError):
        return 0, core, core
