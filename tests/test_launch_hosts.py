"""What is told about hosts, without any: versions, problems, and what the plan says."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from kerasmgpu.errors import InvalidArgumentError, LaunchError
from kerasmgpu.launch.agent import LineReader
from kerasmgpu.launch.failure import first_failure, summary, version_difference
from kerasmgpu.launch.plan import make_plan
from kerasmgpu.launch.preflight import HostReport, probe_command, problems_of
from kerasmgpu.launch.rank import RankState, last_traceback
from kerasmgpu.launch.spec import Host, JobSpec

HOSTS = (Host("a", 1), Host("b", 1))


def facts(**versions: str | None) -> dict[str, object]:
    return {"versions": versions, "addresses": ["10.0.0.1"], "port": 1}


def test_different_versions_are_named_before_the_job() -> None:
    reports = [
        HostReport(HOSTS[0], facts=facts(Keras="3.15.1", TensorFlow="2.21.0")),
        HostReport(HOSTS[1], facts=facts(Keras="3.12.0", TensorFlow="2.21.0")),
    ]
    (problem,) = problems_of(reports)
    assert "versions of Keras: 3.15.1 on a; 3.12.0 on b" in problem
    reports[1].facts = facts(Keras=None, TensorFlow="2.21.0")
    assert "not installed on b" in problems_of(reports)[0]


def test_agents_compare_versions_too() -> None:
    # Inside a Slurm allocation there is no look at the hosts before.
    ranks = [RankState(0), RankState(1)]
    for rank, version in zip(ranks, ("3.15.1", "3.12.0"), strict=True):
        rank.host = "ab"[rank.rank]
        rank.versions = {"Python": "3.11", "Keras": version}
    told = version_difference(ranks)
    assert told is not None
    assert "versions of Keras: 3.15.1 on a; 3.12.0 on b" in told
    ranks[1].versions["Keras"] = "3.15.1"
    assert version_difference(ranks) is None


def test_hosts_that_do_not_reach_each_other_are_named() -> None:
    reports = [
        HostReport(HOSTS[0], facts=facts(Keras="3"), unreachable=["b"]),
        HostReport(HOSTS[1], problem="b: no answer within 10 s."),
    ]
    first, second = problems_of(reports)
    assert first == "b: no answer within 10 s."
    assert "a cannot reach b" in second
    assert "--network-interface" in second


def test_the_probe_is_quoted_for_the_other_sides_shell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/a folder/$(id)")
    spec = JobSpec(("true",), 2, HOSTS, ssh_port=2222, ssh_identity_file="/k")
    argv = probe_command(spec, HOSTS[1])
    assert argv[:4] == ["ssh", "-o", "BatchMode=yes", "-o"]
    assert argv[5:10] == ["-p", "2222", "-i", "/k", "b"]
    assert "'PYTHONPATH=/a folder/$(id)'" in argv
    assert not any("StrictHostKeyChecking" in word for word in argv)


def test_a_plan_for_other_hosts_keeps_secrets_at_home(tmp_path: Path) -> None:
    fake = tmp_path / "mpirun"
    fake.write_text('#!/bin/sh\necho "mpirun (Open MPI) 5.0.11"\n')
    fake.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "API_TOKEN": "secret",
        "NAMED": "n",
        "TF_X": "1",
        "HOME": "/home/me",
        "OMPI_COMM_WORLD_RANK": "3",
        "KERASMGPU_RANK": "3",
    }
    spec = JobSpec(("true",), 2, HOSTS, launcher="mpirun", env={"NAMED": "n"})
    # Beside this Python lies another mpirun, which goes first unless PATH has it too.
    environ["PATH"] = f"{tmp_path}:{Path(sys.executable).parent}:{environ['PATH']}"
    plan = make_plan(spec, environ)
    assert "API_TOKEN" not in plan.environ
    assert plan.environ["NAMED"] == "n"
    assert plan.environ["TF_X"] == "1"
    names = [plan.argv[i + 1] for i, word in enumerate(plan.argv) if word == "-x"]
    assert {"NAMED", "TF_X", "PATH", "KERASMGPU_TOKEN"} <= set(names)
    assert not {"API_TOKEN", "HOME"} & set(names)
    assert plan.local_environ is not None
    assert plan.local_environ["API_TOKEN"] == "secret"
    for place in (plan.environ, plan.local_environ):
        assert "OMPI_COMM_WORLD_RANK" not in place
        assert "KERASMGPU_RANK" not in place
    here = make_plan(JobSpec(("true",), 2, launcher="mpirun"), environ)
    assert here.local_environ is None
    assert here.environ["API_TOKEN"] == "secret"


def test_gloo_inside_mpi_is_refused() -> None:
    environ = {**os.environ, "HOROVOD_CPU_OPERATIONS": "gloo"}
    with pytest.raises(InvalidArgumentError, match="--gloo"):
        make_plan(JobSpec(("true",), 2, launcher="mpirun"), environ)


def test_srun_goes_where_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\nexit 0\n")
    srun.chmod(0o755)
    monkeypatch.setenv(
        "PATH", f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    )
    spec = JobSpec(("true",), 2, HOSTS, in_slurm=True)
    environ = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "4"}
    plan = make_plan(spec, environ)
    assert plan.argv[:4] == ("srun", "--ntasks", "2", "--mpi=pmix")
    assert plan.environ["SLURM_JOB_ID"] == "7"
    assert plan.environ["SRUN_CPUS_PER_TASK"] == "4"
    own = make_plan(spec, {**environ, "SLURM_MPI_TYPE": "cray_shasta"})
    assert not any(word.startswith("--mpi") for word in own.argv)
    srun.write_text("#!/bin/sh\necho cannot load PMIx >&2; exit 1\n")
    plan = make_plan(spec, environ)
    assert plan.argv[0].endswith("mpirun")
    assert any("cannot load PMIx" in warning for warning in plan.warnings)
    with pytest.raises(LaunchError, match="cannot load PMIx"):
        make_plan(JobSpec(("true",), 2, HOSTS, launcher="srun", in_slurm=True), environ)


def rank_state(number: int, at: float, code: int | None, **more: object) -> RankState:
    rank = RankState(number)
    rank.host = "h"
    rank.ended = code is not None
    rank.exit_code = code
    rank.ended_at = at
    if code:
        rank.failed_at = at
    for name, value in more.items():
        setattr(rank, name, value)
    return rank


def test_the_cause_is_told_from_its_consequences() -> None:
    consequence = rank_state(0, 1.0, 1, is_consequence=True)
    cause = rank_state(1, 1.2, -9)
    assert first_failure([consequence, cause]) is cause
    left = rank_state(2, 0.9, 0)
    assert first_failure([consequence, left]) is left
    assert left.shell_code == 1
    late = rank_state(3, 9.0, 0)
    assert first_failure([consequence, late]) is consequence
    assert first_failure([rank_state(0, 1.0, 0)]) is None


def test_who_waited_and_who_was_stopped_is_told() -> None:
    first = rank_state(0, 1.0, 3)
    waiting, stopped = rank_state(1, 1.0, None), rank_state(2, 1.1, 1)
    waiting.take_report(
        {"kind": "state", "waiting": True, "what": "step 4", "seconds": 2.0}
    )
    stopped.take_report(
        {"kind": "failed", "traceback": "T\nLost: step 4", "is_consequence": True}
    )
    told = summary(first, [first, waiting, stopped], 0.0).splitlines()
    assert "rank 0 of 3 on host h failed first, 1.0 s after the start" in told[0]
    assert told[1] == "kerasmgpu: rank 1 (h) was waiting in step 4, for 2.0 s"
    assert told[2] == "kerasmgpu: rank 2 (h) was stopped by that: Lost: step 4"


def test_the_last_words_are_at_most_30_lines() -> None:
    trace = "Traceback (most recent call last):\n" + "  File\n" * 90 + "KeyError: 1"
    first = rank_state(0, 1.0, 1, traceback=trace)
    others = [rank_state(n, 1.0, None) for n in range(1, 40)]
    for rank in others:
        rank.take_report(
            {"kind": "state", "waiting": True, "what": f"step {rank.rank % 9}"}
        )
    lines = summary(first, [first, *others], 0.0).splitlines()
    assert len(lines) <= 30
    assert "KeyError: 1" in "\n".join(lines)


def test_the_last_traceback_is_found() -> None:
    lines = [
        *("noise", "Traceback (most recent call last):", "  File x", "OldError: 1"),
        *("Traceback (most recent call last):", "  File y", "    code", "KeyError: 2"),
        "later words",
    ]
    assert last_traceback(lines).splitlines() == [*lines[4:8]]
    assert last_traceback(["nothing"]) == ""


def test_lines_that_are_redrawn_show_what_came_last() -> None:
    reader = LineReader()
    assert reader.feed(b"one\ntwo \xff\nthr") == ["one", "two \udcff"]
    assert reader.partial() == "thr"
    assert reader.feed(b"ee\n") == ["three"]
    for step in range(5000):
        assert reader.feed(b"\b" * 9 + b"\r" + b"step %d" % step) == []
        assert reader.partial() == f"step {step}"
    assert len(reader._rest) < 100
    assert reader.feed(b" of many\r") == []
    assert reader.partial() == "step 4999 of many"
    assert reader.feed(b"done\n") == ["done"]
    assert reader.feed(b"crlf\r\n") == ["crlf"]
    reader.feed(b"no end")
    assert reader.finish() == ["no end"]
