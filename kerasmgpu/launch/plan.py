"""From a job and this machine to what is started: which starter, which variables."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Mapping

from kerasmgpu.errors import InvalidArgumentError, LaunchError
from kerasmgpu.launch import command as commands
from kerasmgpu.launch import flavour as flavours
from kerasmgpu.launch.spec import JobSpec
from kerasmgpu.topology import horovod_mpi_family

#: A job inside a job: the outer one's variables would confuse the inner one's MPI.
_OUTER_JOB_PREFIXES = (
    "OMPI_COMM_WORLD_",
    "PMIX_",
    "PRTE_",
    "PMI_",
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "KERASMGPU_RANK",
    "KERASMGPU_SIZE",
    "KERASMGPU_LAUNCHER",
    "KERASMGPU_TOKEN",
    "KERASMGPU_REPORT_FD",
    "KERASMGPU_LOCAL_ENVIRONMENT",
)
_KEPT_PREFIXES = ("PMIX_MCA_", "PRTE_MCA_")


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the runner starts.

    Attributes:
        argv: the starter's command.
        environ: the starter's environment.
        local_environ: this machine's whole environment, where the starter must not
            have it because it would pass it on; else None.
        title: the starter, as told to the user.
        warnings: what the user should know before the job starts.
    """

    argv: tuple[str, ...]
    environ: Mapping[str, str]
    local_environ: Mapping[str, str] | None
    title: str
    warnings: tuple[str, ...] = ()


def make_plan(spec: JobSpec, environ: Mapping[str, str] = os.environ) -> Plan:
    """Chooses the starter and makes its command.

    Raises:
        LaunchError: the starter is missing or of no known MPI.
        InvalidArgumentError: the options exclude each other.
    """
    user = {name: value for name, value in environ.items() if not _is_outer(name)}
    launcher = _choose_launcher(spec)
    warnings = list(_warnings(spec))
    slurm_mpi: str | None = None
    if launcher == "srun":
        try:
            slurm_mpi = _slurm_mpi(user)
        except LaunchError as error:
            if spec.launcher == "srun":
                raise
            launcher = "mpirun"
            warnings.append(f"{error} Going on with mpirun.")
    mpi: flavours.Flavour | None = None
    if launcher == "srun":
        argv = commands.srun_command(spec, mpi=slurm_mpi)
        title = "srun"
        # The library that srun's ranks load is the one Horovod was built for.
        family = "mpich" if horovod_mpi_family() == "MPICH" else "openmpi"
        mpi = flavours.Flavour(family, "", "srun")
        defaults = commands.default_environment(mpi, user)
    elif spec.gloo:
        argv = commands.horovodrun_command(spec, None)
        title = "horovodrun over Gloo"
        defaults = commands.default_environment(None, user)
    else:
        mpi = flavours.detect(user)
        title = f"{mpi.title} ({mpi.path})"
        defaults = commands.default_environment(mpi, user)
        if problem := flavours.mismatch(mpi):
            warnings.append(problem)
        if launcher == "horovodrun":
            argv = commands.horovodrun_command(spec, mpi)
            title = f"horovodrun over {title}"
        else:
            argv = []
    if mpi is not None:
        defaults["KERASMGPU_MPI"] = mpi.title
        if user.get("HOROVOD_CPU_OPERATIONS", "").lower() == "gloo":
            raise InvalidArgumentError(
                "HOROVOD_CPU_OPERATIONS=gloo is set, and ranks started by MPI crash "
                "with it (signal 11). Unset it, or start the job with --gloo."
            )
    settings = {**user, **defaults, **spec.env, **_starter_settings(spec, mpi)}
    # MPICH, srun and horovodrun pass on all they have, horovodrun even as arguments
    # that everyone on the machine can read.
    withhold = not spec.is_local or launcher == "horovodrun" or launcher == "srun"
    passed = {
        name: value
        for name, value in settings.items()
        if commands.is_exported(name) or name in spec.env
    }
    starter = {**passed, **_own_needs(user)} if withhold else settings
    if launcher == "mpirun" and mpi is not None:
        names = {*passed, "KERASMGPU_LAUNCHER", "KERASMGPU_TOKEN"}
        argv = commands.mpirun_command(
            spec, mpi, exported_names=names, as_root=os.geteuid() == 0
        )
    return Plan(
        tuple(argv), starter, settings if withhold else None, title, tuple(warnings)
    )


def _choose_launcher(spec: JobSpec) -> str:
    if spec.gloo:
        if spec.launcher not in {"auto", "horovodrun"}:
            raise InvalidArgumentError(
                "--gloo is started by horovodrun. "
                f"Received: --launcher {spec.launcher}."
            )
        return "horovodrun"
    if spec.launcher == "auto":
        return "srun" if spec.in_slurm and shutil.which("srun") else "mpirun"
    if spec.launcher == "srun" and shutil.which("srun") is None:
        raise LaunchError("srun was not found in PATH. Use --launcher mpirun.")
    return spec.launcher


def _warnings(spec: JobSpec) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    if not spec.hosts and spec.num_ranks > cores:
        return [
            f"{spec.num_ranks} ranks share {cores} cores: expect no speed-up beyond "
            f"-np {cores}."
        ]
    return []


def _slurm_mpi(environ: Mapping[str, str]) -> str | None:
    """The value for srun's --mpi; the user's and the cluster's own choice wins.

    Raises:
        LaunchError: Slurm here cannot tell MPI's processes of each other.
    """
    if "SLURM_MPI_TYPE" in environ:
        return None
    types = ("pmi2", "pmix") if horovod_mpi_family() == "MPICH" else ("pmix",)
    said = ""
    for name in types:
        # `srun --mpi=list` also names what cannot be loaded: try it.
        trial = ["srun", "--ntasks=1", "--overlap", f"--mpi={name}", "true"]
        try:
            result = subprocess.run(trial, capture_output=True, text=True, timeout=30)
        except (OSError, subprocess.TimeoutExpired) as error:
            said = str(error)
            continue
        if result.returncode == 0:
            return name
        said = result.stderr.strip()
    raise LaunchError(
        f"srun does not work with --mpi={' or '.join(types)} here "
        f"({said.splitlines()[0] if said else 'no answer'}). Set SLURM_MPI_TYPE to "
        "what this cluster has, or use --launcher mpirun."
    )


def _starter_settings(spec: JobSpec, mpi: flavours.Flavour | None) -> dict[str, str]:
    settings = {}
    if spec.network_interface:
        settings["NCCL_SOCKET_IFNAME"] = spec.network_interface
    if mpi is not None and mpi.family in {"mpich", "intel"}:
        arguments = commands.ssh_arguments(spec)
        if arguments:
            settings["HYDRA_LAUNCHER_EXTRA_ARGS"] = " ".join(arguments)
    return settings


def _own_needs(environ: Mapping[str, str]) -> dict[str, str]:
    """What the starter itself needs on this machine: ssh's agent, Slurm, folders."""
    names = ("HOME", "USER", "LOGNAME", "SHELL", "TMPDIR", "SSH_AUTH_SOCK", "TERM")
    needs = {
        name: value
        for name, value in environ.items()
        if name in names or name.startswith(("SLURM_", "SRUN_"))
    }
    if "SLURM_CPUS_PER_TASK" in environ:
        # Since Slurm 22.05 srun no longer takes it from the allocation.
        needs.setdefault("SRUN_CPUS_PER_TASK", environ["SLURM_CPUS_PER_TASK"])
    return needs


def _is_outer(name: str) -> bool:
    return name.startswith(_OUTER_JOB_PREFIXES) and not name.startswith(_KEPT_PREFIXES)
