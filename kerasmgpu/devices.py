"""This rank's devices: its GPU or GPUs, its share of the CPU's cores and threads.

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
from kerasmgpu.collectives import topology as current_topology
from kerasmgpu.errors import InvalidArgumentError, KerasMGPUError, LaunchError
from kerasmgpu.topology import Topology
from kerasmgpu.transport import threads_of_process

#: Parameters of glibc's `mallopt` (malloc.h). A trim threshold of -1 means never.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


#: What the first strategy of this process has chosen; None before.
_devices_per_rank: int | None = None


def choose_devices(
    topology: Topology, memory_growth: bool, devices_per_rank: int
) -> tuple[str | None, KerasMGPUError | None]:
    """Makes this rank's devices its own: its GPUs, or parts of the CPU; its threads.

    Must run before TensorFlow starts, and so before the first collective;
    `agree_on_devices` comes after that.

    Args:
        memory_growth: take GPU memory as it is needed instead of all of it.
        devices_per_rank: how many there are to be.

    Returns:
        The name of the first GPU, or None, and the error that this rank met, or None.
    """
    gpu: str | None = None
    try:
        _check_same_as_before(topology, devices_per_rank)
        gpu = pin_gpu(topology, memory_growth, devices_per_rank)
        share_cpu_threads(topology)
        if gpu is None:
            divide_cpu(topology, devices_per_rank)
    except (InvalidArgumentError, LaunchError) as error:
        return gpu, error
    return gpu, None


def agree_on_devices(
    topology: Topology, devices_per_rank: int, failure: KerasMGPUError | None
) -> None:
    """Goes on where all ranks have their devices. Must be called on every rank.

    Raises:
        InvalidArgumentError: the ranks, or an earlier strategy, ask for other numbers.
        LaunchError: there are too few GPUs, or TensorFlow had started already. The same
            error on every rank.
    """
    global _devices_per_rank
    if topology.size > 1:
        told = None if failure is None else (type(failure), str(failure))
        everyone = all_gather_object((devices_per_rank, told))
        numbers = [number for number, _ in everyone]
        if len(set(numbers)) > 1:
            raise InvalidArgumentError(
                f"Rank {topology.rank} of {topology.size}: expected the same "
                f"devices_per_rank on every rank. Received, by rank: {numbers}."
            )
        for _, one in everyone:
            if one is not None:
                kind, message = one
                raise kind(message) from failure
    if failure is not None:
        raise failure
    _devices_per_rank = devices_per_rank


def _check_same_as_before(topology: Topology, devices_per_rank: int) -> None:
    if _devices_per_rank not in (None, devices_per_rank):
        raise InvalidArgumentError(
            f"Rank {topology.rank} of {topology.size}: expected "
            f"devices_per_rank={_devices_per_rank}, as of the first HorovodStrategy of "
            "this process, because devices are chosen once. Received: "
            f"devices_per_rank={devices_per_rank}. Give all strategies the same number."
        )


def device_name(index: int) -> str | None:
    """TensorFlow's name of this rank's device, or None where it is the only one.

    Raises:
        InvalidArgumentError: there is no such device.
    """
    count = _devices_per_rank or 1
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < count:
        raise InvalidArgumentError(
            f"Rank {_rank_text()}: expected the index of a device of this rank, of "
            f"which there are {count} (0 to {count - 1}). Received: {index!r}. Ask for "
            "more with HorovodStrategy(devices_per_rank=...), before the model is made."
        )
    if count == 1:
        return None
    kind = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    return f"/device:{kind}:{index}"


def several_devices() -> bool:
    """Whether this rank owns more than one device."""
    return (_devices_per_rank or 1) > 1


def divide_cpu(topology: Topology, parts: int) -> None:
    """Makes the CPU several devices, which compute at the same time.

    Does nothing for one part. They share the cores and the memory, but each has a
    thread to start operations.

    Raises:
        LaunchError: it is divided into another number already, or TensorFlow runs.
    """
    if parts == 1:
        return
    cpu = tf.config.list_physical_devices("CPU")[0]
    done = tf.config.get_logical_device_configuration(cpu)
    if done is not None and len(done) == parts:
        return
    try:
        if done is not None and len(done) > 1:
            raise RuntimeError(f"The CPU is divided into {len(done)} already")
        one = tf.config.LogicalDeviceConfiguration()
        tf.config.set_logical_device_configuration(cpu, [one] * parts)
        _start_operations_on(parts)
    except RuntimeError as error:
        raise LaunchError(
            f"Rank {topology.rank} of {topology.size}: TensorFlow's devices were "
            f"chosen before kerasmgpu could make {parts} of the CPU. Create "
            f"HorovodStrategy(devices_per_rank={parts}) first, before any tensor or "
            f"model. (TensorFlow said: {error})"
        ) from error


def _start_operations_on(threads: int) -> None:
    """Makes TensorFlow run at least so many operations at a time."""
    set_to = tf.config.threading.get_inter_op_parallelism_threads()
    variable = int(os.environ.get("TF_NUM_INTEROP_THREADS") or 0)
    if (set_to or variable or len(os.sched_getaffinity(0))) < threads:
        tf.config.threading.set_inter_op_parallelism_threads(threads)


def pin_gpu(
    topology: Topology, memory_growth: bool, devices_per_rank: int = 1
) -> str | None:
    """Makes this rank's GPUs visible to it: those numbered by its local rank.

    Does nothing without a GPU. Must run before TensorFlow uses a GPU.

    Args:
        memory_growth: take GPU memory as it is needed instead of all of it.
        devices_per_rank: GPUs of a rank; rank r of the host has those from r times
            this number on.

    Returns:
        The first GPU's name, or None.

    Raises:
        LaunchError: fewer GPUs than the ranks on this host need, or TensorFlow already
            uses other GPUs.
    """
    if devices_per_rank > 1:
        return _pin_gpus(topology, memory_growth, devices_per_rank)
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


def _pin_gpus(topology: Topology, memory_growth: bool, count: int) -> str | None:
    gpus = tf.config.list_physical_devices("GPU")
    if not gpus:
        return None
    first = topology.local_rank * count
    if len(gpus) == count and _gpus_assigned_by_launcher():
        first = 0
    elif len(gpus) < topology.local_size * count:
        raise LaunchError(
            f"Rank {topology.rank} of {topology.size}: expected {count} GPUs for each "
            f"of the {topology.local_size} rank(s) on this host "
            f"(devices_per_rank={count}). Received: {len(gpus)} GPU(s). Start fewer "
            "ranks here, or ask for fewer devices a rank."
        )
    mine = gpus[first : first + count]
    try:
        tf.config.set_visible_devices(mine, "GPU")
        for gpu in mine if memory_growth else []:
            tf.config.experimental.set_memory_growth(gpu, True)
    except RuntimeError as error:
        raise LaunchError(
            f"Rank {topology.rank} of {topology.size}: TensorFlow used its GPUs "
            f"before kerasmgpu could choose this rank's {count}. Create "
            "HorovodStrategy() first, before any tensor or model. (TensorFlow said: "
            f"{error})"
        ) from error
    return mine[0].name


def _rank_text() -> str:
    place = current_topology()
    return f"{place.rank} of {place.size}"


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
