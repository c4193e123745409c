"""What to run where: the validated description of a job."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from kerasmgpu.errors import InvalidArgumentError

LAUNCHERS = ("auto", "mpirun", "horovodrun", "srun")

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HOSTFILE_LINE = re.compile(r"(\S+?)(?:\s+slots\s*=\s*(\S+)|:(\S+))?")


@dataclasses.dataclass(frozen=True)
class Host:
    """A host and the number of ranks it may take."""

    name: str
    slots: int

    @property
    def is_local(self) -> bool:
        own = socket.gethostname()
        return self.name in {"localhost", "127.0.0.1", own, own.split(".")[0]}


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A job, checked: everything the command is made from.

    Attributes:
        command: the program and its arguments.
        num_ranks: ranks to start.
        hosts: the hosts to start them on; empty for this machine.
        launcher: "mpirun", "horovodrun" or "srun"; "auto" to choose.
        gloo: exchange over Horovod's Gloo instead of MPI.
        network_interface: the interface to exchange over, or None for any.
        ssh_port: port of the hosts' ssh, or None for ssh's own choice.
        ssh_identity_file: ssh key, or None for ssh's own choice.
        env: variables to set for every rank, on every host.
        start_timeout_seconds: how long ranks may take to start; None for 30 s on
            this machine and 120 s on several.
        output_dir: folder for a file a rank, or None.
        verbose: show the command and what the launcher below prints.
        in_slurm: the hosts are those of a Slurm allocation.
    """

    command: tuple[str, ...]
    num_ranks: int
    hosts: tuple[Host, ...] = ()
    launcher: str = "auto"
    gloo: bool = False
    network_interface: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    start_timeout_seconds: float | None = None
    output_dir: str | None = None
    verbose: bool = False
    in_slurm: bool = False

    @property
    def is_local(self) -> bool:
        """Whether every rank runs on this machine."""
        return all(host.is_local for host in self.hosts)


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Reads `-H a:4,b:4`; a host without a number has one slot."""
    hosts = []
    for item in text.split(","):
        name, colon, slots = item.strip().partition(":")
        hosts.append(_host(name, slots if colon else "1", f"-H {text}"))
    _refuse_duplicates(hosts, f"-H {text}")
    return tuple(hosts)


def parse_hostfile(path: str) -> tuple[Host, ...]:
    """Reads a host file: a line `name slots=4`, `name:4` or `name`; `#` comments."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"Expected a readable host file. Received: --hostfile {path} ({error})."
        ) from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        where = f"{path}, line {number}: {line!r}"
        match = _HOSTFILE_LINE.fullmatch(line)
        if match is None:
            raise InvalidArgumentError(
                f"Expected a line like `name slots=4` in the host file. "
                f"Received: {where}."
            )
        name, slots, short = match.groups()
        hosts.append(_host(name, slots or short or "1", where))
        _refuse_duplicates(hosts, where)
    if not hosts:
        raise InvalidArgumentError(
            f"Expected at least one host in the host file. Received: {path}, "
            "in which there is none. Add a line like `name slots=4`."
        )
    return tuple(hosts)


def slurm_hosts(environ: Mapping[str, str]) -> tuple[Host, ...] | None:
    """The hosts and task counts of the Slurm allocation, or None outside one.

    `SLURM_TASKS_PER_NODE` looks like `4(x2),3`. Host lists like `n[1-3]` are expanded
    by Slurm's own `scontrol`.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not environ.get("SLURM_JOB_ID") or not nodes:
        return None
    names = [nodes]
    if "[" in nodes or "," in nodes:
        if shutil.which("scontrol") is None:
            raise InvalidArgumentError(
                f"Expected Slurm's `scontrol` in PATH, to expand "
                f"SLURM_JOB_NODELIST={nodes}. Name the hosts with -H instead."
            )
        result = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=30,
        )
        names = result.stdout.split()
        if result.returncode or not names:
            raise InvalidArgumentError(
                f"`scontrol show hostnames {nodes}` failed: {result.stderr.strip()}. "
                "Name the hosts with -H instead."
            )
    counts: list[int] = []
    tasks = environ.get("SLURM_TASKS_PER_NODE", "1")
    for item in tasks.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise InvalidArgumentError(
                f"Expected SLURM_TASKS_PER_NODE like `4(x2),3`. Received: {tasks!r}."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != len(names):
        raise InvalidArgumentError(
            f"SLURM_TASKS_PER_NODE={tasks} counts {len(counts)} nodes, "
            f"SLURM_JOB_NODELIST={nodes} names {len(names)}. Name the hosts with -H."
        )
    return tuple(Host(name, slots) for name, slots in zip(names, counts, strict=True))


def parse_env(items: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Reads `--env NAME=VALUE` and `--env NAME` (this process's value)."""
    result = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not _VARIABLE.fullmatch(name):
            raise InvalidArgumentError(
                f"Expected --env NAME or --env NAME=VALUE. Received: --env {item}."
            )
        if not equals:
            if name not in environ:
                raise InvalidArgumentError(
                    f"--env {name} passes on a variable that is not set here. "
                    f"Set it, or write --env {name}=VALUE."
                )
            value = environ[name]
        result[name] = value
    return result


def check_command(command: Sequence[str]) -> tuple[str, ...]:
    """The program and arguments; refuses what cannot be found on this machine."""
    if not command:
        raise InvalidArgumentError(
            "Expected a program to run. Received: none. "
            "For example: kerasmgpu run -np 2 -- python train.py"
        )
    program = command[0]
    if shutil.which(program) is None:
        if program.endswith(".py") and os.path.exists(program):
            raise InvalidArgumentError(
                f"{program} is not executable. Write `python {program}`."
            )
        raise InvalidArgumentError(
            f"Expected a program in PATH or the path of one. "
            f"Received: {program!r}, which does not exist or is not executable."
        )
    if re.fullmatch(r"python[0-9.]*", os.path.basename(program)):
        script = _python_script(command)
        if script is not None and not os.path.exists(script):
            raise InvalidArgumentError(
                f"The script {script!r} does not exist (in {os.getcwd()})."
            )
    return tuple(command)


def count_gpus(environ: Mapping[str, str]) -> int:
    """The NVIDIA GPUs that a process here may use; 0 where there is no driver."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [item for item in visible.split(",") if item.strip()]
        return 0 if "-1" in listed or not listed else len(listed)
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        result = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in result.stdout.splitlines())


def choose_num_ranks(
    requested: int | None,
    hosts: Sequence[Host],
    environ: Mapping[str, str],
) -> int:
    """The number of ranks: what was asked, else all slots, else the GPUs here."""
    slots = sum(host.slots for host in hosts)
    if requested is None:
        if hosts:
            return slots
        gpus = count_gpus(environ)
        if not gpus:
            raise InvalidArgumentError(
                "Expected -np, the number of ranks: no GPU was found whose number "
                f"could be taken (this machine has {os.cpu_count()} cores). "
                "For example: kerasmgpu run -np 2 -- python train.py"
            )
        return gpus
    if requested < 1:
        raise InvalidArgumentError(
            f"Expected -np of at least 1. Received: {requested}."
        )
    if hosts and requested > slots:
        raise InvalidArgumentError(
            f"Expected at most {slots} ranks, the slots of "
            f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)}. "
            f"Received: -np {requested}. Give the hosts more slots, or lower -np."
        )
    return requested


def _python_script(command: Sequence[str]) -> str | None:
    """The script in `python [options] script …`, or None (`-m`, `-c`, `-`)."""
    arguments = iter(command[1:])
    for argument in arguments:
        if argument in {"-W", "-X"}:
            next(arguments, None)
        elif argument.startswith("-"):
            if argument in {"-", "--version", "--help"}:
                return None
            if not argument.startswith("--") and set(argument) & set("mchVW"):
                return None
        else:
            return argument
    return None


def _host(name: str, slots: str, where: str) -> Host:
    if not _HOST_NAME.fullmatch(name):
        raise InvalidArgumentError(
            f"Expected a host name. Received: {name!r} in {where}. "
            "Hosts are given as NAME:SLOTS, separated by commas, or a line each "
            "`NAME slots=SLOTS` in a host file."
        )
    if not slots.isdigit() or int(slots) < 1:
        raise InvalidArgumentError(
            f"Expected a number of slots of at least 1 for host {name}. "
            f"Received: {slots!r} in {where}."
        )
    return Host(name, int(slots))


def _refuse_duplicates(hosts: Sequence[Host], where: str) -> None:
    names = [host.name for host in hosts]
    for name in names:
        if names.count(name) > 1:
            raise InvalidArgumentError(
                f"Host {name} is named twice in {where}. "
                "Name it once, with all its slots."
            )
