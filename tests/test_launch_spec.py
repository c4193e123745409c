"""What to run where: what is understood, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kerasmgpu.errors import InvalidArgumentError
from kerasmgpu.launch import spec as specs
from kerasmgpu.launch.spec import Host


def test_hosts_are_read() -> None:
    assert specs.parse_hosts("a:4, b.example.org:2,c") == (
        Host("a", 4),
        Host("b.example.org", 2),
        Host("c", 1),
    )


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expected a host name"),
        ("a,,b", "Expected a host name"),
        ("a:0", "at least 1 for host a"),
        ("a:-1", "at least 1 for host a"),
        ("a:two", "'two'"),
        ("a:", "at least 1 for host a"),
        ("a:1,b:1,a:2", "Host a is named twice"),
        ("a;rm -rf", "Expected a host name"),
        ("-oProxyCommand=x:1", "Expected a host name"),
    ],
)
def test_bad_hosts_are_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        specs.parse_hosts(text)


def test_hostfile_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# the big ones\na slots=4\nb slots = 2  # GPU\n\nc:3\nd\n")
    assert specs.parse_hostfile(str(path)) == (
        Host("a", 4),
        Host("b", 2),
        Host("c", 3),
        Host("d", 1),
    )


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("a slots=4\nb slos=4\n", "line 2: 'b slos=4'"),
        ("a slots=4\n\nb slots=x\n", "line 3"),
        ("a slots=0\n", "line 1"),
        ("a\na\n", "Host a is named twice in .*line 2"),
        ("# nobody\n", "at least one host"),
    ],
)
def test_hostfile_typos_are_named_by_line(
    tmp_path: Path, content: str, told: str
) -> None:
    path = tmp_path / "hosts"
    path.write_text(content)
    with pytest.raises(InvalidArgumentError, match=told):
        specs.parse_hostfile(str(path))


def test_missing_hostfile_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="nowhere"):
        specs.parse_hostfile(str(tmp_path / "nowhere"))


def test_slurm_allocation_gives_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text("#!/bin/sh\necho n1; echo n2; echo n3\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    environ = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-3]",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
    }
    expected = (Host("n1", 4), Host("n2", 4), Host("n3", 3))
    assert specs.slurm_hosts(environ) == expected
    assert specs.slurm_hosts({}) is None
    environ["SLURM_TASKS_PER_NODE"] = "4"
    with pytest.raises(InvalidArgumentError, match="counts 1 nodes"):
        specs.slurm_hosts(environ)


def test_env_is_read() -> None:
    environ = {"HERE": "x y"}
    read = specs.parse_env(["HERE", "A=b=c", "EMPTY="], environ)
    assert read == {"HERE": "x y", "A": "b=c", "EMPTY": ""}
    with pytest.raises(InvalidArgumentError, match="not set here"):
        specs.parse_env(["GONE"], environ)
    with pytest.raises(InvalidArgumentError, match="NAME=VALUE"):
        specs.parse_env(["1A=b"], environ)


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ([], "Expected a program"),
        (["no-such-program"], "'no-such-program'"),
        (["python", "missing.py"], r"'missing\.py' does not exist"),
        (["python", "-u", "-W", "ignore", "missing.py"], "does not exist"),
        (["./plain.py"], "Write `python ./plain.py`"),
    ],
)
def test_programs_that_cannot_run_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], told: str
) -> None:
    (tmp_path / "plain.py").write_text("print(1)")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgumentError, match=told):
        specs.check_command(command)


@pytest.mark.parametrize(
    "command",
    [
        ["python", "-m", "module", "not-a-file.py"],
        ["python", "-c", "print(1)", "not-a-file.py"],
        ["python", "-uc", "print(1)"],
        ["python", "-"],
        ["hostname"],
    ],
)
def test_programs_without_a_script_pass(command: list[str]) -> None:
    assert specs.check_command(command) == tuple(command)


def test_number_of_ranks() -> None:
    hosts = (Host("a", 4), Host("b", 2))
    assert specs.choose_num_ranks(None, hosts, {}) == 6
    assert specs.choose_num_ranks(5, hosts, {}) == 5
    assert specs.choose_num_ranks(3, (), {}) == 3
    gpus = {"CUDA_VISIBLE_DEVICES": "0,2,3"}
    assert specs.choose_num_ranks(None, (), gpus) == 3
    with pytest.raises(InvalidArgumentError, match=r"at most 6 ranks.*a:4, b:2"):
        specs.choose_num_ranks(7, hosts, {})
    with pytest.raises(InvalidArgumentError, match="at least 1"):
        specs.choose_num_ranks(0, (), {})
    with pytest.raises(InvalidArgumentError, match="Expected -np"):
        specs.choose_num_ranks(None, (), {"CUDA_VISIBLE_DEVICES": ""})
