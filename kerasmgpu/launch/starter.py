"""The process below the launcher that starts the agents: `mpirun`, `srun`, …"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from kerasmgpu.errors import LaunchError

MAX_KEPT_LINES = 60


class Starter:
    """A running starter; what it prints is kept, and handed on when asked for.

    Args:
        argv: its command.
        environ: its environment.
        selector: where its pipes are registered, with the pipe as data.
        show: is given its lines, or None to keep them to itself.
    """

    def __init__(
        self,
        argv: Sequence[str],
        environ: Mapping[str, str],
        selector: selectors.BaseSelector,
        show: Callable[[str], None] | None,
    ) -> None:
        self._selector = selector
        self._show = show
        self._lines: list[str] = []
        self._rest: dict[int, bytes] = {}
        try:
            self._process = subprocess.Popen(
                argv,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # Ctrl-C on the terminal is the launcher's to hand on.
                start_new_session=True,
            )
        except OSError as error:
            raise LaunchError(f"{argv[0]} cannot be run: {error}.") from None
        for pipe in self._pipes():
            os.set_blocking(pipe.fileno(), False)
            selector.register(pipe, selectors.EVENT_READ, pipe)

    @property
    def exit_code(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self._process.poll()

    @property
    def last_lines(self) -> list[str]:
        return self._lines[-20:]

    def read(self, pipe: IO[bytes]) -> None:
        """Takes what a pipe of it has."""
        try:
            chunk = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        if not chunk:
            self._selector.unregister(pipe)
        *lines, rest = (self._rest.get(pipe.fileno(), b"") + chunk).split(b"\n")
        if not chunk and rest:
            lines.append(rest)
            rest = b""
        self._rest[pipe.fileno()] = rest
        shown = [line.decode(errors="replace").rstrip() for line in lines]
        self._lines = (self._lines + shown)[-MAX_KEPT_LINES:]
        if shown and self._show is not None:
            self._show("\n".join(shown))

    def end(self, wait_seconds: float, serve: Callable[[float], None]) -> None:
        """Waits for its end, then ends it and all of its group.

        Args:
            wait_seconds: how long it may take by itself.
            serve: serves all sockets and pipes once, for so many seconds: the agents
                are still to be heard, and full pipes would block the starter.
        """
        if not self._wait(wait_seconds, serve):
            for number, seconds in ((signal.SIGTERM, 1.5), (signal.SIGKILL, 5.0)):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, number)
                if self._wait(seconds, serve):
                    break
        for pipe in self._pipes():
            pipe.close()

    def _wait(self, seconds: float, serve: Callable[[float], None]) -> bool:
        deadline = time.monotonic() + seconds
        while self._process.poll() is None:
            if time.monotonic() > deadline:
                return False
            serve(0.05)
        return True

    def _pipes(self) -> list[IO[bytes]]:
        pipes = (self._process.stdout, self._process.stderr)
        return [pipe for pipe in pipes if pipe is not None]
