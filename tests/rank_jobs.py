"""Runs marked tests on real ranks: the parent's half and the ranks' half.

The ranks talk to the parent, and wait for each other between tests, through files in
one temporary folder, so that none of it depends on what is tested.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest

FOLDER_VARIABLE = "KERASMGPU_TEST_FOLDER"
DEFAULT_TIMEOUT_SECONDS = 300
#: How long a rank that has finished a test waits for the others to finish it.
GRACE_SECONDS = 20
START_SECONDS = 120
#: Frames of stacks that tell nothing.
_OF_PYTEST = re.compile(r'File ".*/site-packages/(_pytest|pluggy)/')
#: Standard error, behind pytest's back.
STACKS = os.fdopen(os.dup(2), "w")


def on_a_rank() -> bool:
    return FOLDER_VARIABLE in os.environ


def size_of(item: pytest.Item) -> int:
    marker = item.get_closest_marker("world_size")
    return int(marker.args[0])


def timeout_of(item: pytest.Item) -> float:
    marker = item.get_closest_marker("world_size")
    return float(marker.kwargs.get("timeout", DEFAULT_TIMEOUT_SECONDS))


class Groups:
    """The collected tests by file and size."""

    def __init__(self) -> None:
        self.items: dict[tuple[str, int], list[pytest.Item]] = {}

    def add(self, item: pytest.Item) -> None:
        self.items.setdefault((str(item.path), size_of(item)), []).append(item)

    def of(self, item: pytest.Item) -> list[pytest.Item]:
        return self.items[(str(item.path), size_of(item))]


GROUPS = Groups()


class RankJobs:
    """What became of the tests on ranks."""

    def __init__(self) -> None:
        self.failures: dict[str, str | None] = {}

    # In the parent --------------------------------------------------------------------

    def failure_of(self, item: pytest.Item) -> str | None:
        if item.nodeid not in self.failures:
            remaining = GROUPS.of(item)
            start = remaining.index(item)
            self._run([i for i in remaining[start:] if i.nodeid not in self.failures])
        return self.failures[item.nodeid]

    def _run(self, items: list[pytest.Item]) -> None:
        """Runs a job; where it ends early, the rest is left for the next one."""
        size = size_of(items[0])
        with tempfile.TemporaryDirectory(
            prefix="kerasmgpu-test-", ignore_cleanup_errors=True
        ) as name:
            folder = pathlib.Path(name)
            code, output = self._launch(items, size, folder)
            for index, item in enumerate(items):
                notes = [_read(folder / f"{index}.{rank}.json") for rank in range(size)]
                done = [note for note in notes if note is not None]
                print(*(note["printed"] for note in done), sep="", end="")  # for -s
                failed = [note for note in done if note["outcome"] == "failed"]
                if len(done) == size and not failed:
                    self.failures[item.nodeid] = None
                    continue
                text = "\n".join(f"rank {n['rank']}:\n{n['text']}" for n in failed)
                missing = [r for r, note in enumerate(notes) if note is None]
                if missing:
                    lines = output.splitlines(keepends=True)
                    told = "".join(li for li in lines if not _OF_PYTEST.search(li))
                    text += (
                        f"\nrank(s) {missing} of {size} did not finish (exit code "
                        f"{code}). End of what the ranks printed:\n{told[-20000:]}"
                    )
                self.failures[item.nodeid] = text
                if missing:
                    return

    def _launch(
        self, items: list[pytest.Item], size: int, folder: pathlib.Path
    ) -> tuple[int, str]:
        mpirun = shutil.which("mpirun", path=_path())
        if mpirun is None:
            return 127, "mpirun was not found. Run `make test`, which installs it."
        arguments = folder / "arguments"
        arguments.write_text("\n".join(_address(item) for item in items))
        command = [mpirun]
        if os.geteuid() == 0:
            command.append("--allow-run-as-root")
        command += ["--oversubscribe", "--bind-to", "none", "--tag-output"]
        command += ["-np", str(size), sys.executable, str(_MAIN), str(arguments)]
        threads = str(max(1, (os.cpu_count() or 1) // size))
        environment = {
            **os.environ,
            "PATH": _path(),
            FOLDER_VARIABLE: str(folder),
            "OMPI_MCA_mpi_yield_when_idle": "1",
            # Jobs that share the default one remove each other's folders.
            "PRTE_MCA_prte_local_tmpdir_base": str(folder),
            "OMP_NUM_THREADS": threads,
            "TF_NUM_INTRAOP_THREADS": threads,
            "TF_NUM_INTEROP_THREADS": threads,
            "PYTEST_ADDOPTS": "",
        }
        limit = START_SECONDS + sum(timeout_of(item) + GRACE_SECONDS for item in items)
        log = folder / "output"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                start_new_session=True,
            )
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                pass
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process.returncode, log.read_text(errors="replace")

    # On a rank ------------------------------------------------------------------------

    def note_on_rank(self, item: pytest.Item, report: pytest.TestReport) -> None:
        rank, size = _place()
        folder = pathlib.Path(os.environ[FOLDER_VARIABLE])
        index = item.session.items.index(item)
        failed = report.outcome != "passed"  # a skip on ranks is a failure, too
        note = {
            "rank": rank,
            "outcome": "failed" if failed else "passed",
            "text": report.longreprtext if failed else "",
            "printed": report.capstdout,
        }
        path = folder / f"{index}.{rank}.json"
        if path.exists():
            return
        temporary = path.with_suffix(".part")
        temporary.write_text(json.dumps(note))
        os.replace(temporary, path)
        everyone = [folder / f"{index}.{r}.json" for r in range(size)]
        limit = time.monotonic() + (GRACE_SECONDS if failed else timeout_of(item))
        while not all(p.exists() for p in everyone):
            if time.monotonic() > limit:
                print(f"rank {rank}: others did not finish {item.nodeid}", flush=True)
                os._exit(3)
            time.sleep(0.002)

    @contextlib.contextmanager
    def watched_on_rank(self, item: pytest.Item) -> Iterator[None]:
        seconds = timeout_of(item)
        # All ranks print their stacks before one of them ends the job.
        faulthandler.dump_traceback_later(seconds, file=STACKS)
        killer = threading.Timer(seconds + 3, os._exit, (3,))
        killer.daemon = True
        killer.start()
        try:
            yield
        finally:
            killer.cancel()
            faulthandler.cancel_dump_traceback_later()


_ROOT = pathlib.Path(__file__).resolve().parent.parent
_MAIN = pathlib.Path(__file__).resolve().with_name("rank_main.py")


def _place() -> tuple[int, int]:
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    return int(os.environ[names[0]]), int(os.environ[names[1]])


def _path() -> str:
    """The environment's own bin first: there lies the mpirun Horovod was built for."""
    return os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")


def _address(item: pytest.Item) -> str:
    return f"{item.path}::{item.nodeid.split('::', 1)[1]}"


def _read(path: pathlib.Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None
