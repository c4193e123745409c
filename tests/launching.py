"""Helpers of the launcher's tests: start it, read it, and look for what it left."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[1]
PYTHON_BIN = str(Path(sys.executable).parent)
PROGRAMS = Path(__file__).parent / "programs"
#: What a program of `python` calls itself, for the system, once it runs.
READY = "ready"


@dataclasses.dataclass
class Ended:
    """A command that has ended: its exit code, what it printed, and for how long."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def seconds_after_failure(self) -> float:
        """From the first failure, as the launcher tells it, to the launcher's end."""
        told = re.search(r"failed first, ([\d.]+) s after the start", self.err)
        if told is None:
            raise AssertionError(f"no failure was told:\n{self.err}")
        return self.seconds - float(told[1])

    @property
    def last_lines(self) -> str:
        return "\n".join(self.err.splitlines()[-30:])


_unfinished: list[Job] = []


@pytest.fixture(autouse=True)
def no_job_outlives_its_test() -> Iterator[None]:
    """To be imported by test files: ends what a failed test has left running."""
    yield
    while _unfinished:
        job = _unfinished.pop()
        if job.process.poll() is None:
            job.kill()
            job.process.wait()


class Job:
    """`kerasmgpu run` as a process of its own, whose descendants can be found.

    Every process of the job carries a mark in its environment, by which those that
    were left behind are found wherever they are in the tree of processes.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        command: Sequence[str] = (sys.executable, "-m", "kerasmgpu", "run"),
        env: dict[str, str] | None = None,
        **kwargs: object,
    ) -> None:
        self.mark = uuid.uuid4().hex
        _unfinished.append(self)
        inherited = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMPI_COMM", "PMIX", "KERASMGPU_"))
        }
        environ = {
            **inherited,
            "PATH": f"{PYTHON_BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "KERASMGPU_TEST_MARK": self.mark,
            **(env or {}),
        }
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, *arguments],
            env=environ,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="backslashreplace",
            **{  # type: ignore[call-overload]
                "stdout": subprocess.PIPE,
                "stderr": subprocess.PIPE,
                "cwd": ROOT,
                # Tests that were started by `nohup` are not about that.
                "preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
                **kwargs,
            },
        )

    def finish(self, timeout_seconds: float = 60) -> Ended:
        """Waits for the end; ends the job and fails where it does not come."""
        try:
            out, err = self.process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            self.kill()
            out, err = self.process.communicate()
            raise AssertionError(
                f"no end within {timeout_seconds} s:\n{out}\n{err}"
            ) from None
        seconds = time.monotonic() - self.began
        return Ended(self.process.returncode, out, err, seconds)

    def signal(self, number: int) -> None:
        self.began = time.monotonic()
        self.process.send_signal(number)

    def kill(self) -> None:
        self.process.kill()
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Every living process of this job, the launcher too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
                if process.environ().get("KERASMGPU_TEST_MARK") == self.mark:
                    found.append(process)
        return found

    def programs(self) -> dict[int, psutil.Process]:
        """The ranks' programs, by rank: children of the agents."""
        found = {}
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                parent = process.parent()
                if parent is not None and "kerasmgpu.launch.agent" in parent.cmdline():
                    # Between fork and exec it still has the agent's variables.
                    rank = process.environ().get("KERASMGPU_RANK")
                    if rank is not None:
                        found[int(rank)] = process
        return found

    def ready(self) -> list[psutil.Process]:
        """Those of `programs` that run the code given to `python`.

        A signal that comes before, while Python starts, ends it with a code of its own.
        """
        found = []
        for process in self.programs().values():
            with contextlib.suppress(psutil.Error):
                if process.name() == READY:
                    found.append(process)
        return found

    def assert_nothing_left(self, seconds: float = 3.0) -> None:
        deadline = time.monotonic() + seconds
        while left := self.processes():
            if time.monotonic() > deadline:
                told = [(process.pid, process.cmdline()) for process in left]
                self.kill()
                raise AssertionError(f"left behind: {told}")
            time.sleep(0.05)


def wait_for(condition: Callable[[], object], seconds: float = 20) -> None:
    """Waits until a condition holds; fails where it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"it did not happen within {seconds} s")
        time.sleep(0.05)


def run(
    *arguments: str, timeout_seconds: float = 60, env: dict[str, str] | None = None
) -> Ended:
    """Runs `kerasmgpu run` to its end, and looks that nothing is left."""
    job = Job(arguments, env=env)
    ended = job.finish(timeout_seconds)
    job.assert_nothing_left()
    return ended


def python(code: str) -> list[str]:
    """A program: Python running this code, with `rank` known."""
    return [
        sys.executable,
        "-c",
        "import os, sys, time\n"
        f"open('/proc/self/comm', 'w').write('{READY}')\n"
        f"rank = int(os.environ['KERASMGPU_RANK'])\n{code}",
    ]


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
