"""What the launcher knows about one rank."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import os
import re
import signal
import threading
import time
from typing import Any

from kerasmgpu.launch.wire import Connection, Message

#: What Horovod and this package say on ranks that fail because another one did.
_CONSEQUENCE = re.compile(
    r"Horovod has been shut down|HorovodInternalError|CollectiveError"
)


@dataclasses.dataclass(frozen=True)
class State:
    """What a rank was doing when it last said so."""

    waiting: bool
    what: str
    seconds: float
    stack: str = ""


class RankState:
    """One rank, from its agent's greeting to its end.

    Attributes:
        rank: its number.
        host: its host's name; "" before it has started.
        exit_code: as `subprocess` gives it (negative for a signal), or None.
        why: in words, where the program's end was not seen.
        traceback: the last Python traceback it printed or handed over.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.host = ""
        self.versions: dict[str, str | None] = {}
        self.connection: Connection | None = None
        self.agent_pid: int | None = None
        self.program_pid: int | None = None
        self.joined_at = 0.0
        self.heard_at = 0.0
        self.going = False
        self.ended = False
        self.ended_at = 0.0
        self.exit_code: int | None = None
        self.why: str | None = None
        self.tail: list[str] = []
        self.traceback = ""
        self.failed_at: float | None = None
        self.is_consequence = False
        self.left_early = False
        self.leaving_at: float | None = None
        self.leaving_code: int | None = None
        self.told_to_end = False
        self.used = False
        self.state: State | None = None
        self.waiting_since = 0.0
        self.result: bytes | None = None
        self._lock = threading.Lock()

    def join(self, connection: Connection, hello: Message) -> None:
        self.connection = connection
        self.host = str(hello["host"])
        self.agent_pid = int(hello["pid"])
        self.versions = dict(hello["versions"])
        self.joined_at = self.heard_at = time.monotonic()

    def send(self, message: Message) -> None:
        if self.connection is not None and not self.connection.closed:
            with self._lock:
                self.connection.send(message)

    def flush(self) -> None:
        """Sends on what the socket did not take before."""
        if self.connection is not None:
            with self._lock:
                self.connection.flush()

    @property
    def failed(self) -> bool:
        return self.why is not None or bool(self.exit_code) or self.left_early

    @property
    def left_with(self) -> int:
        """The exit code a rank meant to leave with; 0 where it was ended instead."""
        return self.leaving_code or max(self.exit_code or 0, 0)

    @property
    def shell_code(self) -> int:
        """The exit code as a shell would give it."""
        if self.left_early:
            return self.left_with or 1
        if self.exit_code is None:
            return 1
        if self.exit_code < 0:
            return 128 - self.exit_code
        return self.exit_code or int(self.why is not None)

    def take_report(self, report: dict[str, Any]) -> None:
        kind = report.get("kind")
        if kind == "failed":
            self.traceback = str(report.get("traceback", ""))
            self.is_consequence = bool(report.get("is_consequence"))
            self.failed_at = time.monotonic()
        elif kind == "used":
            self.used = True
        elif kind == "leaving":
            self.leaving_at = time.monotonic()
            self.leaving_code = report.get("code")
        elif kind == "state":
            state = State(
                bool(report.get("waiting")),
                str(report.get("what", "")),
                float(report.get("seconds", 0.0)),
                str(report.get("stack", "")),
            )
            self.state = state
            self.waiting_since = time.monotonic() - state.seconds

    def take_exit(self, message: Message) -> None:
        self.ended = True
        self.ended_at = time.monotonic()
        self.exit_code = int(message["code"])
        if self.told_to_end and self.failed_at is not None and self.exit_code < 0:
            self.exit_code = 1  # It had failed before it was ended.
        self.tail = [str(line) for line in message.get("tail", [])]
        if message.get("result"):
            self.result = base64.b64decode(message["result"])
        if self.exit_code:
            if self.failed_at is None:
                self.failed_at = self.ended_at
            if not self.traceback:
                self.traceback = last_traceback(self.tail)
                last_line = self.traceback.rstrip().rpartition("\n")[2]
                self.is_consequence = bool(_CONSEQUENCE.search(last_line))
            if message.get("by_starter") or self.told_to_end:
                self.is_consequence = True

    def lost(self, why: str) -> None:
        """The agent is silent or gone; the program's end was not seen."""
        self.ended = True
        self.ended_at = time.monotonic()
        if self.failed_at is None:
            self.failed_at = self.ended_at
        self.why = why

    def kill_locally(self) -> None:
        """Kills what may be left of this rank on this machine."""
        if self.why is None and self.ended:
            return
        if self.program_pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.program_pid, signal.SIGKILL)
        if self.agent_pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.agent_pid, signal.SIGKILL)


def last_traceback(lines: list[str]) -> str:
    """The last Python traceback among printed lines, or ""."""
    starts = [
        number
        for number, line in enumerate(lines)
        if "Traceback (most recent call last)" in line
    ]
    if not starts:
        return ""
    end = starts[-1] + 1
    while end < len(lines) and (not lines[end].strip() or lines[end][0] in " \t"):
        end += 1
    return "\n".join(lines[starts[-1] : end + 1])
