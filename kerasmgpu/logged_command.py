"""Commands whose output goes to a log, and what it means when they fail."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kerasmgpu.errors import BuildError

# Text in a failed command's log -> what it means and what to do.
_CAUSES = (
    (
        r"No space left on device",
        "the disk is full; free some space, or name a larger temporary folder with "
        "TMPDIR=DIR",
    ),
    (
        r"fatal error: Killed signal|cc1plus.*Killed|virtual memory exhausted",
        "the compiler ran out of memory; run again with CMAKE_BUILD_PARALLEL_LEVEL=1",
    ),
    (
        r"No matching distribution found|Could not find a version|"
        r"Connection (?:refused|reset)|Temporary failure in name resolution",
        "pip could not get a package; check the network and pip's index settings",
    ),
    (
        r"Could NOT find MPI|MPI_CXX_FOUND",
        "the MPI named cannot be compiled against; leave --mpi out, or install its "
        "development files",
    ),
    (
        r"Could NOT find (?:CUDAToolkit|NCCL)",
        "the CUDA toolkit or NCCL is incomplete (headers or libraries are missing); "
        "set CUDA_HOME to a complete toolkit",
    ),
    (
        r"CMAKE_CXX_COMPILER|CMake was unable to find a build program",
        "CMake found no working C++ compiler; on Debian run: apt-get install g++",
    ),
)


def run_logged(
    command: list[str],
    variables: dict[str, str],
    log: Path,
    watch: Callable[[str], None],
    timeout_seconds: float = 3600,
) -> str:
    """Run a command, its output going to a log.

    Args:
        command: The program and its arguments.
        variables: Its environment variables, all of them.
        log: File that the command and its output are appended to.
        watch: Called with the output so far, five times a second.
        timeout_seconds: The command, and all it started, is ended after so long.

    Returns:
        The command's output.

    Raises:
        BuildError: It failed or took too long; names the cause if it is a known one.
    """
    with log.open("ab") as output:
        output.write(f"$ {' '.join(command)}\n".encode())
        output.flush()
        start = output.tell()
        process = subprocess.Popen(
            command,
            env=variables,
            cwd=tempfile.gettempdir(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    deadline = time.monotonic() + timeout_seconds
    with _terminated_at_exit(process):
        while process.poll() is None and time.monotonic() < deadline:
            watch(_read_from(log, start))
            time.sleep(0.2)
        timed_out = process.poll() is None
    text = _read_from(log, start)
    if timed_out or process.returncode != 0:
        end = (
            f"did not end within {timeout_seconds:.0f} s"
            if timed_out
            else f"ended with code {process.returncode}"
        )
        cause = next((mend for sign, mend in _CAUSES if re.search(sign, text)), None)
        if cause is None:
            lines = text.strip().splitlines()[-15:]
            cause = "its last lines:\n" + "\n".join(lines)
        raise BuildError(
            f"`{Path(command[0]).name}` {end}: {cause}\nthe whole log: {log}"
        )
    return text


@contextmanager
def _terminated_at_exit(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends a process and all it started, however the block is left."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _read_from(log: Path, start: int) -> str:
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
