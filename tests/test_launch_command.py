"""The argument list for every starter: golden, and without a shell."""

from __future__ import annotations

import pytest

from kerasmgpu.errors import LaunchError
from kerasmgpu.launch import command as commands
from kerasmgpu.launch.flavour import Flavour, parse_version
from kerasmgpu.launch.spec import Host, JobSpec

HOSTS = (Host("a", 4), Host("b", 2))
PROGRAM = ("python", "train.py")
AGENT = ["py", "-m", "kerasmgpu.launch.agent"]
OPENMPI5 = Flavour("openmpi", "5.0.11", "/opt/ompi/bin/mpirun")
OPENMPI4 = Flavour("openmpi", "4.1.4", "/usr/bin/mpirun")
MPICH = Flavour("mpich", "5.0.2", "/opt/mpich/bin/mpirun")
INTEL = Flavour("intel", "2021.13", "/opt/intel/bin/mpirun")


def several(**changes: object) -> JobSpec:
    options: dict[str, object] = {
        "command": PROGRAM,
        "num_ranks": 6,
        "hosts": HOSTS,
        "network_interface": "eth0",
        "ssh_port": 2222,
        "ssh_identity_file": "/keys/id",
        **changes,
    }
    return JobSpec(**options)  # type: ignore[arg-type]


def test_openmpi5_here() -> None:
    spec = JobSpec(PROGRAM, 4)
    assert commands.mpirun_command(spec, OPENMPI5, python="py") == [
        *("/opt/ompi/bin/mpirun", "--np", "4", "--bind-to", "none"),
        *("--host", "localhost:4", "--map-by", "slot"),
        *AGENT,
        "OMPI_COMM_WORLD_RANK",
    ]
    assert "--allow-run-as-root" in commands.mpirun_command(
        spec, OPENMPI5, as_root=True
    )


def test_openmpi5_on_several_hosts() -> None:
    argv = commands.mpirun_command(
        several(), OPENMPI5, exported_names={"PATH", "TF_X"}, python="py"
    )
    assert argv == [
        *("/opt/ompi/bin/mpirun", "--np", "6", "--bind-to", "none"),
        *("--host", "a:4,b:2", "--map-by", "slot", "--prefix", "/opt/ompi"),
        *("--prtemca", "plm_ssh_args", "-p 2222 -i /keys/id"),
        *("--prtemca", "oob_tcp_keepalive_time", "3"),
        *("--prtemca", "oob_tcp_keepalive_intvl", "2"),
        *("--prtemca", "oob_tcp_keepalive_probes", "3"),
        *("--mca", "btl_tcp_if_include", "eth0"),
        *("--prtemca", "prte_if_include", "eth0"),
        *("-x", "PATH", "-x", "TF_X"),
        *AGENT,
        "OMPI_COMM_WORLD_RANK",
    ]


def test_openmpi4_on_several_hosts() -> None:
    argv = commands.mpirun_command(
        several(), OPENMPI4, exported_names={"PATH"}, python="py"
    )
    assert argv == [
        *("/usr/bin/mpirun", "--np", "6", "--bind-to", "none"),
        *("--host", "a:4,b:2", "--map-by", "slot"),
        *("--mca", "plm_rsh_args", "-p 2222 -i /keys/id"),
        *("--mca", "btl_tcp_if_include", "eth0"),
        *("--mca", "oob_tcp_if_include", "eth0"),
        *("-x", "PATH"),
        *AGENT,
        "OMPI_COMM_WORLD_RANK",
    ]


def test_mpich() -> None:
    here = commands.mpirun_command(JobSpec(PROGRAM, 2), MPICH, python="py")
    start = ["/opt/mpich/bin/mpirun", "-n", "2", "-bind-to", "none"]
    assert here == [*start, *AGENT, "PMI_RANK"]
    assert commands.mpirun_command(several(), MPICH, python="py") == [
        *("/opt/mpich/bin/mpirun", "-n", "6", "-hosts", "a:4,b:2"),
        *("-launcher", "ssh", "-bind-to", "none", "-iface", "eth0"),
        *AGENT,
        "PMI_RANK",
    ]


def test_intel() -> None:
    assert commands.mpirun_command(several(), INTEL, python="py") == [
        *("/opt/intel/bin/mpirun", "-n", "6", "-hosts", "a:4,b:2"),
        *("-launcher", "ssh", "-iface", "eth0"),
        *AGENT,
        "PMI_RANK",
    ]


def test_srun() -> None:
    spec = JobSpec(PROGRAM, 8, HOSTS, in_slurm=True)
    assert commands.srun_command(spec, python="py") == [
        *("srun", "--ntasks", "8", "--mpi=pmix", "--cpu-bind=none"),
        *("--kill-on-bad-exit=1", "--export=ALL", "--overlap"),
        *AGENT,
        "SLURM_PROCID",
    ]
    own = JobSpec(PROGRAM, 6, HOSTS)
    argv = commands.srun_command(own, mpi=None, python="py")
    assert "--nodelist=a,b" in argv
    assert not any(word.startswith("--mpi") for word in argv)


def test_gloo() -> None:
    argv = commands.horovodrun_command(
        several(gloo=True, start_timeout_seconds=45.0), None, python="py"
    )
    assert argv == [
        *("py", "-m", "horovod.runner.launch", "-np", "6", "-H", "a:4,b:2"),
        *("--disable-cache", "--start-timeout", "45"),
        *("--network-interfaces", "eth0", "--ssh-port", "2222"),
        *("--ssh-identity-file", "/keys/id", "--gloo"),
        *AGENT,
        "HOROVOD_RANK",
    ]


def test_horovodrun_over_openmpi5_gets_its_binding() -> None:
    argv = commands.horovodrun_command(JobSpec(PROGRAM, 2), OPENMPI5, python="py")
    assert argv == [
        *("py", "-m", "horovod.runner.launch", "-np", "2", "--disable-cache"),
        *("--mpi", "--binding-args=--bind-to none --map-by slot"),
        *AGENT,
        "OMPI_COMM_WORLD_RANK",
    ]


def test_ring_and_yield_unless_the_user_says_otherwise() -> None:
    settings = commands.default_environment(OPENMPI5, {})
    assert settings == {
        "OMPI_MCA_coll_tuned_use_dynamic_rules": "1",
        "OMPI_MCA_coll_tuned_allreduce_algorithm": "5",
        "OMPI_MCA_coll_tuned_allreduce_algorithm_segmentsize": "1048576",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    own = {"OMPI_MCA_mpi_yield_when_idle": "0"}
    assert "OMPI_MCA_mpi_yield_when_idle" not in commands.default_environment(
        OPENMPI5, own
    )
    assert commands.default_environment(INTEL, {})["I_MPI_ADJUST_ALLREDUCE"] == "8"
    assert commands.default_environment(MPICH, {}) == {}


@pytest.mark.parametrize("name", ["PATH", "TF_X", "HOROVOD_Y", "NCCL_DEBUG", "OMP_A"])
def test_what_a_job_needs_travels(name: str) -> None:
    assert commands.is_exported(name)


@pytest.mark.parametrize(
    "name", ["AWS_SECRET_ACCESS_KEY", "API_TOKEN", "HOME", "SSH_AUTH_SOCK", "TFX", "X"]
)
def test_nothing_else_travels(name: str) -> None:
    assert not commands.is_exported(name)


@pytest.mark.parametrize(
    ("text", "family", "version"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", "openmpi", "5.0.11"),
        ("mpirun (Open MPI) 4.1.4\n", "openmpi", "4.1.4"),
        ("HYDRA build details:\n    Version:       5.0.2\n", "mpich", "5.0.2"),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.13 Build 20240701",
            "intel",
            "2021.13",
        ),
    ],
)
def test_flavours_are_told_apart(text: str, family: str, version: str) -> None:
    flavour = parse_version(text)
    assert (flavour.family, flavour.version) == (family, version)


def test_an_unknown_mpirun_is_refused() -> None:
    with pytest.raises(LaunchError, match="LAM 7"):
        parse_version("LAM 7.1")
