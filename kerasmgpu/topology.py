"""Who am I: this process's place in the job, from the launcher's environment.

Reads environment variables only; neither TensorFlow nor Horovod is imported.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import mmap
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from kerasmgpu.errors import InvalidArgumentError, LaunchError

#: Variables that carry a launcher's job size, in the order in which they are trusted,
#: with the launcher that sets them.
SIZE_VARIABLES: dict[str, str] = {
    "KERASMGPU_SIZE": "kerasmgpu run",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "MPICH's or Intel MPI's mpirun",
    "HOROVOD_SIZE": "horovodrun --gloo",
}

RANK_VARIABLES: tuple[str, ...] = (
    "KERASMGPU_RANK",
    "OMPI_COMM_WORLD_RANK",
    "PMI_RANK",
    "HOROVOD_RANK",
    "PMIX_RANK",
)


@dataclasses.dataclass(frozen=True)
class Topology:
    """One process's place in a job.

    Attributes:
        rank: this process, 0 to `size` - 1.
        size: processes in the job.
        local_rank: this process among those on its host, 0 to `local_size` - 1.
        local_size: processes on this host.
        node_rank: this host among the hosts, 0 to `num_nodes` - 1.
        num_nodes: hosts in the job.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1

    def __post_init__(self) -> None:
        for number, limit in (
            ("rank", "size"),
            ("local_rank", "local_size"),
            ("node_rank", "num_nodes"),
        ):
            value, bound = getattr(self, number), getattr(self, limit)
            if bound < 1 or not 0 <= value < bound:
                raise InvalidArgumentError(
                    f"Expected 0 <= {number} < {limit}. "
                    f"Received: {number}={value}, {limit}={bound}."
                )

    @property
    def is_rank_zero(self) -> bool:
        return self.rank == 0


def hostname() -> str:
    """This host's name, as MPI sees it."""
    return socket.gethostname()


def launched_size(environ: Mapping[str, str] = os.environ) -> tuple[int, str] | None:
    """The job size that a launcher promised this process.

    Returns:
        `(size, variable)`, or None where no launcher's variable is set.

    Raises:
        LaunchError: a launcher's variable is not a positive number, or two launchers
            that are both in charge name different sizes.
    """
    for variable in SIZE_VARIABLES:
        text = environ.get(variable)
        if text is None:
            continue
        if not text.isdigit() or int(text) < 1:
            raise LaunchError(
                f"Expected a positive whole number in the environment variable "
                f"{variable} (set by {SIZE_VARIABLES[variable]}). "
                f"Received: {text!r}. Unset it, or start the job with `kerasmgpu run`."
            )
        return int(text), variable
    return None


def launched_rank(environ: Mapping[str, str] = os.environ) -> int:
    """The rank a launcher gave this process; 0 where none did. For messages only."""
    for variable in RANK_VARIABLES:
        text = environ.get(variable, "")
        if text.isdigit():
            return int(text)
    return 0


def slurm_step_size(environ: Mapping[str, str] = os.environ) -> int | None:
    """Tasks of the Slurm step this process belongs to, or None outside one.

    A hint only: in a batch script that runs `python` without `srun` the variables are
    set as well, and one process is then meant.
    """
    text = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS")
    if text is None or not text.isdigit() or "SLURM_PROCID" not in environ:
        return None
    return int(text)


def horovod_mpi_family() -> str | None:
    """The MPI that the installed Horovod was built for, without importing it.

    Returns:
        "Open MPI" or "MPICH" (whose library Intel MPI shares); None where Horovod is
        not installed or was built without MPI.
    """
    spec = importlib.util.find_spec("horovod")
    if spec is None or spec.origin is None:
        return None
    for library in sorted(Path(spec.origin).parent.glob("tensorflow/mpi_lib*.so")):
        with (
            open(library, "rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            if content.find(b"libmpi.so.40") >= 0:
                return "Open MPI"
            if content.find(b"libmpi.so.12") >= 0:
                return "MPICH"
    return None


def check_size(actual: int, environ: Mapping[str, str] = os.environ) -> None:
    """Refuses a job whose launcher started more processes than joined it.

    A program started by another MPI's `mpirun` than the one Horovod was built for runs
    as N independent jobs of size 1, which would be N separate trainings.

    Args:
        actual: the size Horovod reports.

    Raises:
        LaunchError: a launcher promised another size.
    """
    promised = launched_size(environ)
    if promised is not None and promised[0] != actual:
        size, variable = promised
        started_by = environ.get("KERASMGPU_MPI") or SIZE_VARIABLES[variable]
        built_for = horovod_mpi_family() or "no MPI"
        raise LaunchError(
            f"{started_by} started {size} processes "
            f"({variable}={size}), but Horovod, built for {built_for}, joined a job "
            f"of {actual}: each process would train alone. As a rule the `mpirun` "
            "that started the job belongs to another MPI than the one Horovod was "
            "built for. Start the job with "
            "`kerasmgpu run`, or rebuild Horovod with "
            "`kerasmgpu install-horovod --mpi DIR`."
        )
