"""Faults over and over: kill, stop, unplug, interrupt; no hang and no orphan.

A few rounds in every run of the tests; 50 with `pytest -m soak` (`make soak`).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import (  # noqa: F401
    PROGRAMS,
    ROOT,
    Job,
    no_job_outlives_its_test,
    python,
    wait_for,
)

from kerasmgpu.perf.network import VirtualHosts, why_not

END_SECONDS = 10.0

FAULTS = (
    "kill a rank",
    "kill an agent",
    "kill the starter",
    "kill the launcher",
    "stop a rank, then Ctrl-C",
    "stop an agent's rank, then SIGTERM",
    "two ranks at once",
)


def one_fault(fault: str, chance: random.Random, program: list[str]) -> None:
    """Starts a job, does it harm at some moment, and looks how it ends."""
    job = Job(["-np", "3", "--", *program])
    try:
        wait_for(lambda: len(job.programs()) == 3)
        time.sleep(chance.uniform(0.0, 1.0))
        programs = job.programs()
        victim = programs[chance.randrange(3)]
        agent = victim.parent()
        if agent is None:
            raise AssertionError("the agent is gone")
        job.began = time.monotonic()
        expected: set[int] | None = None
        if fault == "kill a rank":
            victim.kill()
            expected = {137}
        elif fault == "kill an agent":
            agent.kill()
        elif fault == "kill the starter":
            (starter,) = psutil.Process(job.process.pid).children()
            starter.kill()
        elif fault == "kill the launcher":
            job.process.kill()
        elif fault == "stop a rank, then Ctrl-C":
            victim.suspend()
            job.signal(signal.SIGINT)
            expected = {130}
        elif fault == "stop an agent's rank, then SIGTERM":
            victim.suspend()
            job.signal(signal.SIGTERM)
            expected = {143}
        else:
            programs[0].kill()
            programs[2].terminate()
            expected = {137, 143}
        ended = job.finish(END_SECONDS)
        assert ended.code != 0, fault
        if expected is not None:
            assert ended.code in expected, (fault, ended)
        job.assert_nothing_left(END_SECONDS)
    finally:
        job.kill()


def rounds(number: int, seed: int) -> None:
    chance = random.Random(seed)
    for count in range(number):
        one_fault(FAULTS[count % len(FAULTS)], chance, python("time.sleep(60)"))


@pytest.mark.timeout(120)
def test_faults() -> None:
    rounds(len(FAULTS), seed=int(time.time()))


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_faults_50_times() -> None:
    rounds(50, seed=int(time.time()))


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_faults_while_reducing_50_times() -> None:
    """The same while Horovod reduces; ranks are killed in the middle of it."""
    chance = random.Random(int(time.time()))
    program = [sys.executable, str(PROGRAMS / "steps.py"), "none", "100000"]
    for _ in range(50):
        job = Job(["-np", "3", "--", *program])
        try:
            wait_for(lambda: len(job.programs()) == 3)  # noqa: B023
            time.sleep(chance.uniform(3.0, 9.0))
            programs = job.programs()
            victim = programs[chance.randrange(3)]
            stop = chance.random() < 0.4
            job.began = time.monotonic()
            if stop:
                victim.suspend()
                time.sleep(chance.uniform(0.0, 4.0))
                job.signal(signal.SIGTERM)
            else:
                victim.kill()
            ended = job.finish(END_SECONDS)
            assert ended.code in ({143, 1} if stop else {137})
            job.assert_nothing_left(END_SECONDS)
        finally:
            job.kill()


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_unplugged_50_times(tmp_path: Path) -> None:
    reason = why_not()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    chance = random.Random(int(time.time()))
    with VirtualHosts(tmp_path / "hosts", Path(sys.executable).parent) as hosts:
        for count in range(50):
            log = tmp_path / f"log{count}"
            job = hosts.popen(
                [
                    *(sys.executable, "-m", "kerasmgpu", "run"),
                    *("-H", "hosta:1,hostb:1,hostc:1", "--output-dir", str(log)),
                    *hosts.ssh_options,
                    *python("print('here', flush=True); time.sleep(90)"),
                ],
                cwd=ROOT,
                env={"PYTHONPATH": str(ROOT)},
            )
            try:
                wait_for(lambda: (log / "rank.2.out").exists(), 30)  # noqa: B023
                time.sleep(chance.uniform(0.0, 2.0))
                name = chance.choice(["hostb", "hostc"])
                hosts.unplug(name)
                began = time.monotonic()
                said, _ = job.communicate(timeout=30)
                assert job.returncode != 0
                assert f"on host {name} failed first" in said, said
                wait_for(lambda: not hosts.busy_pids(name), 30)  # noqa: B023
                assert time.monotonic() - began < 45
            finally:
                hosts.plug_in(name)
                job.kill()
