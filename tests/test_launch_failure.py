"""Ranks that reduce with Horovod, and fail: under the launcher and without it."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from launching import (  # noqa: F401
    PROGRAMS,
    PYTHON_BIN,
    Ended,
    Job,
    no_job_outlives_its_test,
    run,
    wait_for,
)

pytestmark = pytest.mark.timeout(180)

STEPS = str(PROGRAMS / "steps.py")
MPIRUN = [
    *(f"{PYTHON_BIN}/mpirun", "--allow-run-as-root", "--oversubscribe"),
    *("--bind-to", "none", "--mca", "mpi_yield_when_idle", "1"),
]


def steps(what: str, *options: str) -> Ended:
    return run(
        *options, "-np", "2", "--", sys.executable, STEPS, what, timeout_seconds=90
    )


def bare_mpirun(what: str) -> Ended:
    job = Job(["-np", "2", sys.executable, STEPS, what], command=MPIRUN)
    ended = job.finish(90)
    job.assert_nothing_left()
    return ended


@pytest.mark.parametrize("options", [[], ["--gloo"]], ids=["mpirun", "gloo"])
def test_exception(options: list[str]) -> None:
    ended = steps("raise", *options)
    assert ended.code == 1
    assert ended.seconds_after_failure < 10
    last = ended.last_lines
    assert "ValueError: no such luck" in last
    assert "steps.py" in last
    assert "rank 1 of 2 on host" in last
    assert "failed first" in last
    assert "rank 0" in last.splitlines()[-1]
    assert "waiting in step 5" in last.splitlines()[-1]


@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("exit0", 1, "left with exit code 0 while other ranks still waited"),
        ("exit3", 3, "left with exit code 3 while other ranks still waited"),
        ("leave", 1, "left with exit code 0 while other ranks still waited"),
        ("kill", 137, "killed by SIGKILL"),
    ],
)
def test_leaving_in_the_middle(what: str, code: int, told: str) -> None:
    ended = steps(what)
    assert ended.code == code, ended.err
    assert ended.seconds_after_failure < 10
    assert f"rank 1 of 2 on host {_host()} failed first" in ended.last_lines
    assert told in ended.last_lines


def test_exit_0_over_gloo() -> None:
    ended = steps("exit0", "--gloo")
    assert ended.code == 1
    assert f"rank 1 of 2 on host {_host()} failed first" in ended.last_lines


def test_a_stuck_rank_is_named_with_its_stack() -> None:
    ended = steps("sleep")
    assert ended.code == 0
    assert "[0] rank 0 of 2 is done" in ended.out
    told = ended.err[ended.err.index("has waited") :]
    assert "in step 5, on:" in told
    assert f"rank 1 on host {_host()}, which is in loading data since" in told
    assert "time.sleep(6)" in told
    # At doubling intervals, not every second.
    assert ended.err.count("has waited") <= 2


def test_a_stopped_rank_is_named_and_can_be_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = Job(
        ["-np", "2", "--output-dir", str(log), sys.executable, STEPS, "stop"],
    )
    err = log / "rank.0.err"
    try:
        wait_for(lambda: err.exists() and "does not answer" in err.read_text(), 60)
        assert f"rank 1 on host {_host()}, which does not answer" in err.read_text()
        job.signal(signal.SIGTERM)
        ended = job.finish(10)
    finally:
        job.kill()
    assert ended.code == 143
    job.assert_nothing_left()


def test_exception_under_bare_mpirun() -> None:
    ended = bare_mpirun("raise")
    assert ended.code != 0
    assert ended.seconds < 40
    last = "\n".join((ended.out + ended.err).splitlines()[-30:])
    assert f"kerasmgpu: rank 1 of 2 on host {_host()} failed: ValueError" in last
    assert "Traceback (most recent call last)" in last


def test_exit_0_under_bare_mpirun() -> None:
    ended = bare_mpirun("exit0")
    assert ended.code != 0
    last = "\n".join((ended.out + ended.err).splitlines()[-30:])
    assert f"rank 1 on host {_host()} has left the job" in last
    assert "with code 0" in last
    assert "while in step 5" in last


def test_horovodrun_typed_by_hand_works() -> None:
    job = Job(
        ["-np", "2", "--gloo", sys.executable, STEPS, "none"],
        command=[f"{PYTHON_BIN}/horovodrun"],
    )
    ended = job.finish(90)
    assert ended.code == 0
    assert "rank 1 of 2 is done" in ended.out


def test_horovodrun_over_openmpi5_by_option() -> None:
    ended = steps("none", "--launcher", "horovodrun")
    assert ended.code == 0, ended.err
    assert "[1] rank 1 of 2 is done" in ended.out


def _host() -> str:
    import socket

    return socket.gethostname()
