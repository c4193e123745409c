"""Jobs on several hosts, for real: network namespaces with sshd (`perf.network`)."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kerasmgpu.perf.network import NAMES, VirtualHosts, why_not

ROOT = Path(__file__).parents[2]
TRAIN = str(Path(__file__).with_name("train.py"))
PYTHON_BIN = Path(sys.executable).parent

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualHosts]:
    reason = why_not()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"jobs on several hosts must be tested in CI: {reason}")
        pytest.skip(f"this machine cannot make hosts: {reason}")
    with VirtualHosts(tmp_path_factory.mktemp("hosts") / "set-up", PYTHON_BIN) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_left(hosts: VirtualHosts) -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        left = {name: hosts.busy_pids(name) for name in NAMES}
        if not any(left.values()):
            return
        time.sleep(0.1)
    commands = [
        Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        for pids in left.values()
        for pid in pids
    ]
    pytest.fail(f"processes were left behind: {left} {commands}")


@pytest.fixture(scope="module")
def one_process_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights") / "one.npz"
    subprocess.run(
        [sys.executable, TRAIN, str(path)], check=True, timeout=120, cwd=ROOT
    )
    return path


def launch(
    hosts: VirtualHosts, names: str, options: list[str], program: list[str], **env: str
) -> subprocess.Popen[str]:
    return hosts.popen(
        [
            *(sys.executable, "-m", "kerasmgpu", "run", "-H", names),
            *hosts.ssh_options,
            *options,
            "--",
            *program,
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), **env},
    )


def finish(process: subprocess.Popen[str], timeout_seconds: float) -> str:
    try:
        said, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)
        process.kill()
        said, _ = process.communicate()
        pytest.fail(f"no end within {timeout_seconds} s:\n{said}")
    return said


@pytest.mark.parametrize("names", ["hosta:1,hostb:1", "hosta:1,hostb:1,hostc:1"])
@pytest.mark.parametrize("options", [[], ["--gloo"]], ids=["mpirun", "gloo"])
def test_weights_equal_one_process(
    hosts: VirtualHosts,
    one_process_weights: Path,
    tmp_path: Path,
    names: str,
    options: list[str],
) -> None:
    path = tmp_path / "weights.npz"
    job = launch(
        hosts,
        names,
        ["--network-interface", "eth0", *options],
        ["python", TRAIN, str(path)],
    )
    said = finish(job, 120)
    assert job.returncode == 0, said
    num_hosts = names.count(",") + 1
    assert said.count(f"size={num_hosts} nodes={num_hosts}") == num_hosts, said
    with np.load(one_process_weights) as one, np.load(path) as several:
        assert sorted(one.files) == sorted(several.files)
        for name in one.files:
            np.testing.assert_allclose(several[name], one[name], rtol=1e-4, atol=1e-6)


def test_the_mnist_example(hosts: VirtualHosts) -> None:
    job = launch(
        hosts,
        "hosta:1,hostb:1,hostc:1",
        ["--network-interface", "eth0"],
        ["python", "examples/mnist.py", "--epochs", "1", "--limit", "600"],
    )
    said = finish(job, 150)
    assert job.returncode == 0, said
    assert re.search(r"\[0\] test accuracy .* ranks: 3", said), said


@pytest.mark.parametrize("options", [[], ["--gloo"]], ids=["mpirun", "gloo"])
def test_unplugged_host_ends_the_job(
    hosts: VirtualHosts, tmp_path: Path, options: list[str]
) -> None:
    log = tmp_path / "log"
    job = launch(
        hosts,
        "hosta:1,hostb:1",
        ["--network-interface", "eth0", "--output-dir", str(log), *options],
        ["python", TRAIN, str(tmp_path / "w.npz"), "0.05"],
    )
    try:
        wait_for_training(job, log)
        hosts.unplug("hostb")
        unplugged_at = time.monotonic()
        said = finish(job, 60)
        seconds = time.monotonic() - unplugged_at
    finally:
        hosts.plug_in("hostb")
        job.kill()
    assert seconds < 30, said
    assert job.returncode != 0
    last = "\n".join(said.splitlines()[-10:])
    assert re.search(
        r"rank 1 of 2 on host hostb failed first.*no sign of life", last
    ), said
    # The agent on the unplugged host gives up by itself.
    deadline = time.monotonic() + 25
    while hosts.busy_pids("hostb") and time.monotonic() < deadline:
        time.sleep(0.2)


def wait_for_training(job: subprocess.Popen[str], log: Path) -> None:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and job.poll() is None:
        with contextlib.suppress(OSError):
            if "training" in (log / "rank.0.out").read_text():
                time.sleep(3)
                return
        time.sleep(0.1)
    said = finish(job, 5)
    pytest.fail(f"the job did not get to training:\n{said}")


@pytest.mark.parametrize("options", [[], ["--gloo"]], ids=["mpirun", "gloo"])
def test_only_named_variables_travel(hosts: VirtualHosts, options: list[str]) -> None:
    show = (
        "import os, socket; print(socket.gethostname(), os.environ.get('API_TOKEN'),"
        "os.environ.get('NAMED'), os.environ.get('GIVEN'), os.environ.get('TF_MINE'),"
        "'KERASMGPU_TOKEN' in os.environ)"
    )
    job = launch(
        hosts,
        "hosta:1,hostb:1",
        [
            *("--env", "NAMED", "--env", "GIVEN=a b;c"),
            *("--network-interface", "eth0", *options),
        ],
        ["python", "-c", show],
        API_TOKEN="secret",
        NAMED="told",
        TF_MINE="1",
    )
    said = finish(job, 60)
    assert job.returncode == 0, said
    assert "hosta secret told a b;c 1 False" in said
    assert "hostb None told a b;c 1 False" in said


def test_first_failure_is_told_with_its_host(hosts: VirtualHosts) -> None:
    program = (
        "import os, time\n"
        "if os.environ['KERASMGPU_RANK'] == '1': raise ValueError('no such luck')\n"
        "time.sleep(60)"
    )
    job = launch(hosts, "hosta:1,hostb:2", [], ["python", "-c", program])
    said = finish(job, 40)
    assert job.returncode == 1
    last = "\n".join(said.splitlines()[-30:])
    assert "rank 1 of 3 on host hostb failed first" in last, said
    assert "ValueError: no such luck" in last


def test_preflight_names_every_bad_host(hosts: VirtualHosts) -> None:
    began = time.monotonic()
    job = launch(hosts, "hosta:1,hostb:1,nohost:1", [], ["python", "-c", "print(1)"])
    said = finish(job, 40)
    assert job.returncode == 2
    assert "nohost: the name does not resolve" in said
    assert "hostb" not in said
    hosts.unplug("hostc")
    try:
        job = launch(hosts, "hosta:1,hostc:1", [], ["python", "-c", "print(1)"])
        said = finish(job, 40)
    finally:
        hosts.plug_in("hostc")
    assert job.returncode == 2
    assert re.search(r"hostc: (ssh does not work|no answer within)", said), said
    assert time.monotonic() - began < 35


def test_preflight_names_a_missing_interface(hosts: VirtualHosts) -> None:
    job = launch(
        hosts,
        "hosta:1,hostb:1",
        ["--network-interface", "eth7"],
        ["python", "-c", "print(1)"],
    )
    said = finish(job, 40)
    assert job.returncode == 2
    assert "no network interface 'eth7'" in said


def test_preflight_wants_ssh_without_a_prompt(
    hosts: VirtualHosts, tmp_path: Path
) -> None:
    key = tmp_path / "other_key"
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True
    )
    job = launch(
        hosts,
        "hosta:1,hostb:1",
        ["--ssh-identity-file", str(key)],
        ["python", "-c", "print(1)"],
    )
    said = finish(job, 40)
    assert job.returncode == 2
    assert "hostb: ssh does not work without a prompt" in said, said


def test_doctor_looks_at_the_hosts(hosts: VirtualHosts) -> None:
    doctor = hosts.popen(
        [
            *(sys.executable, "-m", "kerasmgpu", "doctor"),
            *("-H", "hosta:1,hostb:1,nohost:1", *hosts.ssh_options),
        ],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    said = finish(doctor, 120)
    assert doctor.returncode == 1, said
    assert re.search(r"nohost.*failed|failed.*nohost", said), said
