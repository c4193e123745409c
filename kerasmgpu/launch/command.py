"""From a job to the argument list that starts it: pure functions, no shell.

What each MPI needs was tried out; the reasons stand beside the flags.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from kerasmgpu import transport
from kerasmgpu.launch.flavour import Flavour
from kerasmgpu.launch.spec import JobSpec

#: Variables that go to other hosts; all others stay at home unless named by --env.
EXPORTED_NAMES = frozenset(
    {"PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "VIRTUAL_ENV"}
)
EXPORTED_PREFIXES = (
    "KERAS_",
    "KERASMGPU_",
    "TF_",
    "XLA_",
    "HOROVOD_",
    "NCCL_",
    "GLOO_",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "CUDA_",
    "NVIDIA_",
    "PYTHONUNBUFFERED",
    "PYTHONHASHSEED",
    "OMPI_MCA_",
    "PRTE_MCA_",
    "PMIX_MCA_",
    "MPICH_",
    "MPIR_CVAR_",
    "I_MPI_",
    "FI_",
    "UCX_",
    "HYDRA_",
)

#: Where each starter tells a process its rank.
RANK_VARIABLES = {
    "openmpi": "OMPI_COMM_WORLD_RANK",
    "mpich": "PMI_RANK",
    "intel": "PMI_RANK",
    "srun": "SLURM_PROCID",
    "gloo": "HOROVOD_RANK",
}


def is_exported(name: str) -> bool:
    """Whether a variable may go to other hosts."""
    return name in EXPORTED_NAMES or name.startswith(EXPORTED_PREFIXES)


def exported(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that go to other hosts."""
    return {name: value for name, value in environ.items() if is_exported(name)}


def default_environment(
    flavour: Flavour | None, environ: Mapping[str, str]
) -> dict[str, str]:
    """Good settings for this MPI that the user has not made.

    Args:
        flavour: the MPI, or None for Gloo.
        environ: the user's variables, which win.
    """
    if flavour is None:
        wanted = transport.GLOO
    else:
        families = {"openmpi": transport.OPEN_MPI, "intel": transport.INTEL_MPI}
        wanted = families.get(flavour.family, {})
    return transport.missing(wanted, environ)


def agent_command(family: str, python: str = sys.executable) -> list[str]:
    """What the starter starts on every host: the parent of a rank's program."""
    return [python, "-m", "kerasmgpu.launch.agent", RANK_VARIABLES[family]]


def mpirun_command(
    spec: JobSpec,
    flavour: Flavour,
    *,
    exported_names: Iterable[str] = (),
    as_root: bool = False,
    python: str = sys.executable,
) -> list[str]:
    """The `mpirun` command of a job.

    Args:
        spec: the job.
        flavour: the MPI that `mpirun` belongs to.
        exported_names: variables to pass on to other hosts.
        as_root: whether the user is root, whom Open MPI refuses unless told.
        python: the Python that runs the agents, on every host.
    """
    program = agent_command(flavour.family, python)
    if flavour.family == "openmpi":
        return [
            flavour.path,
            *_openmpi_options(spec, flavour, exported_names, as_root, python),
            *program,
        ]
    argv = [flavour.path, "-n", str(spec.num_ranks)]
    if spec.hosts and not spec.is_local:
        argv += ["-hosts", ",".join(f"{h.name}:{h.slots}" for h in spec.hosts)]
        argv += ["-launcher", "ssh"]
    if flavour.family == "mpich":
        argv += ["-bind-to", "none"]
    if spec.network_interface:
        argv += ["-iface", spec.network_interface]
    return argv + program


def horovodrun_command(
    spec: JobSpec,
    flavour: Flavour | None,
    *,
    python: str = sys.executable,
) -> list[str]:
    """The `horovodrun` command of a job, over Gloo or over MPI."""
    argv = [python, "-m", "horovod.runner.launch", "-np", str(spec.num_ranks)]
    hosts = spec.hosts
    if hosts and spec.is_local:
        argv += ["-H", f"localhost:{spec.num_ranks}"]
    elif hosts:
        argv += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    # Its own list of ssh checks in ~/.horovod goes stale; we have just looked.
    argv.append("--disable-cache")
    if spec.start_timeout_seconds is not None:
        argv += ["--start-timeout", str(round(spec.start_timeout_seconds))]
    if spec.network_interface:
        argv += ["--network-interfaces", spec.network_interface]
    if spec.ssh_port is not None:
        argv += ["--ssh-port", str(spec.ssh_port)]
    if spec.ssh_identity_file is not None:
        argv += ["--ssh-identity-file", spec.ssh_identity_file]
    if spec.verbose:
        argv.append("--verbose")
    if spec.gloo or flavour is None:
        return [*argv, "--gloo", *agent_command("gloo", python)]
    argv.append("--mpi")
    if flavour.family == "openmpi":
        # Without it Horovod passes flags that Open MPI 5 no longer knows.
        argv.append("--binding-args=--bind-to none --map-by slot")
    return [*argv, *agent_command(flavour.family, python)]


def srun_command(
    spec: JobSpec, *, mpi: str | None = "pmix", python: str = sys.executable
) -> list[str]:
    """The `srun` command of a job inside a Slurm allocation.

    Args:
        spec: the job.
        mpi: value of `--mpi`, or None to leave Slurm's own choice.
        python: the Python that runs the agents, on every host.
    """
    argv = ["srun", "--ntasks", str(spec.num_ranks)]
    if mpi is not None:
        argv.append(f"--mpi={mpi}")
    argv += ["--cpu-bind=none", "--kill-on-bad-exit=1", "--export=ALL", "--overlap"]
    if spec.hosts and not spec.in_slurm:
        argv.append("--nodelist=" + ",".join(host.name for host in spec.hosts))
    return argv + agent_command("srun", python)


def _openmpi_options(
    spec: JobSpec,
    flavour: Flavour,
    exported_names: Iterable[str],
    as_root: bool,
    python: str,
) -> list[str]:
    argv = ["--np", str(spec.num_ranks)]
    if as_root:
        argv.append("--allow-run-as-root")
    argv += ["--bind-to", "none"]
    if not spec.hosts or spec.is_local:
        return argv + ["--host", f"localhost:{spec.num_ranks}", "--map-by", "slot"]
    argv += ["--host", ",".join(f"{host.name}:{host.slots}" for host in spec.hosts)]
    argv += ["--map-by", "slot"]
    prefix = Path(flavour.path).parent.parent
    if prefix != Path("/usr"):
        # The other hosts' shells need not know where this Open MPI lies.
        argv += ["--prefix", str(prefix)]
    daemon = "--prtemca" if flavour.major >= 5 else "--mca"
    ssh = ssh_arguments(spec)
    if ssh:
        name = "plm_ssh_args" if flavour.major >= 5 else "plm_rsh_args"
        argv += [daemon, name, " ".join(ssh)]
    if flavour.major >= 5:
        # By default nobody notices a host that is unplugged.
        argv += ["--prtemca", "oob_tcp_keepalive_time", "3"]
        argv += ["--prtemca", "oob_tcp_keepalive_intvl", "2"]
        argv += ["--prtemca", "oob_tcp_keepalive_probes", "3"]
    if spec.network_interface:
        interface = spec.network_interface
        argv += ["--mca", "btl_tcp_if_include", interface]
        name = "prte_if_include" if flavour.major >= 5 else "oob_tcp_if_include"
        argv += [daemon, name, interface]
    for variable in sorted(exported_names):
        argv += ["-x", variable]
    return argv


def ssh_arguments(spec: JobSpec) -> list[str]:
    """The user's ssh options, as arguments of ssh."""
    arguments = []
    if spec.ssh_port is not None:
        arguments += ["-p", str(spec.ssh_port)]
    if spec.ssh_identity_file is not None:
        arguments += ["-i", spec.ssh_identity_file]
    return arguments
