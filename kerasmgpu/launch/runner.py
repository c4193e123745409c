"""Runs a job: starts it, prints it, watches it, and ends it whole.

One thread and one selector serve the agents; a second thread only tells them that the
launcher lives while its output is blocked (a pager).
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hmac
import json
import os
import secrets
import selectors
import shlex
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

from kerasmgpu.launch import failure
from kerasmgpu.launch.addresses import own_addresses
from kerasmgpu.launch.output import Output
from kerasmgpu.launch.plan import Plan
from kerasmgpu.launch.rank import RankState
from kerasmgpu.launch.signals import GRACE_SECONDS, noted_signals
from kerasmgpu.launch.spec import JobSpec
from kerasmgpu.launch.starter import Starter
from kerasmgpu.launch.wire import Connection, Message

#: After the first failure, for the others to say what they were waiting in.
GATHER_SECONDS = 1.0
#: Between SIGTERM and SIGKILL for the other ranks of a failed job.
FAILED_GRACE_SECONDS = 2.0
#: Without a word from an agent for so long, its host is taken for unreachable.
SILENCE_SECONDS = 14.0
#: On one machine, once one rank has started the others must follow within this.
STRAGGLER_SECONDS = 6.0
#: An agent introduces itself in one line.
MAX_GREETING_BYTES = 1 << 16
#: A rank that has left with 0 is waited for by another for so long: a failure.
LEFT_BEHIND_SECONDS = 5.0


@dataclasses.dataclass
class Outcome:
    """How a job ended.

    Attributes:
        exit_code: 0, the first failing rank's exit code, or 128 + its signal.
        ranks: all ranks, by number.
        first: the rank that failed first, or None.
        message: the last words about it, or "".
        stop_signal: the signal that ended the job, or None.
    """

    exit_code: int
    ranks: list[RankState]
    first: RankState | None = None
    message: str = ""
    stop_signal: int | None = None


class Runner:
    """One job.

    Args:
        spec: the job.
        plan: its command.
        output: where its lines go.
        payload: a pickled function for the ranks, for `kerasmgpu.run`.
    """

    def __init__(
        self, spec: JobSpec, plan: Plan, output: Output, payload: bytes | None = None
    ) -> None:
        self._spec = spec
        self._plan = plan
        self._output = output
        self._payload = payload
        self._token = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._ranks = [RankState(rank) for rank in range(spec.num_ranks)]
        self._strangers: set[Connection] = set()
        self._starter: Starter | None = None
        self._signals: list[int] = []
        self._started_at = time.monotonic()
        self._gone = False
        self._problem: str | None = None
        self._failed_at: float | None = None
        self._ending_at: float | None = None
        self._stop_signal: int | None = None

    def run(self) -> Outcome:
        """Runs the job to its end; leaves no process behind."""
        listener = self._listen()
        alive = threading.Event()
        pulse = threading.Thread(target=self._pulse, args=(alive,), daemon=True)
        with contextlib.ExitStack() as stack:
            stack.callback(self._selector.close)
            stack.callback(listener.close)
            self._signals = stack.enter_context(noted_signals(self._selector))
            environ = {**self._plan.environ, **self._addresses(listener)}
            environ.update(stack.enter_context(self._own_folder()))
            stack.callback(self._end_everything)
            say = self._output.say if self._spec.verbose else None
            if say is not None:
                say(f"kerasmgpu: {shlex.join(self._plan.argv)}")
            self._starter = Starter(self._plan.argv, environ, self._selector, say)
            pulse.start()
            stack.callback(alive.set)
            try:
                self._serve()
            except KeyboardInterrupt:  # In a notebook, or off the main thread.
                self._signals.append(signal.SIGINT)
                self._serve()
        return self._conclude()

    def _listen(self) -> socket.socket:
        address = "127.0.0.1" if self._spec.is_local else ""
        listener = socket.create_server((address, 0), backlog=4096)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)
        return listener

    def _addresses(self, listener: socket.socket) -> dict[str, str]:
        port = listener.getsockname()[1]
        if self._spec.is_local:
            hosts = ["127.0.0.1"]
        else:
            hosts = own_addresses(self._spec.network_interface)
        return {
            "KERASMGPU_LAUNCHER": f"{','.join(hosts)}:{port}",
            "KERASMGPU_TOKEN": self._token,
        }

    @contextlib.contextmanager
    def _own_folder(self) -> Iterator[dict[str, str]]:
        # Made by mkdtemp and mkstemp: for this user's eyes only.
        with tempfile.TemporaryDirectory(
            prefix="kerasmgpu-", ignore_cleanup_errors=True
        ) as folder:
            # Jobs that share Open MPI's folder on this host now and then fail to start:
            # one that ends removes what another has just made.
            environ = {"PRTE_MCA_prte_local_tmpdir_base": folder}
            if self._plan.local_environ is not None:
                content = {
                    "host": socket.gethostname(),
                    "environ": dict(self._plan.local_environ),
                }
                descriptor, path = tempfile.mkstemp(dir=folder)
                with open(descriptor, "w") as file:
                    json.dump(content, file)
                environ["KERASMGPU_LOCAL_ENVIRONMENT"] = path
            yield environ

    def _serve(self) -> None:
        last_turn = time.monotonic()
        while not self._over():
            self._serve_all(0.1)
            now = time.monotonic()
            if now - last_turn > 2:  # Blocked by a pager, or suspended.
                for rank in self._ranks:
                    rank.heard_at = now
            last_turn = now
            self._tick(now)

    def _serve_all(self, seconds: float) -> None:
        for key, _ in self._selector.select(seconds):
            self._serve_one(key.data)

    def _over(self) -> bool:
        if self._ending_at is not None and self._gone:
            return True
        return all(rank.ended for rank in self._ranks)

    def _serve_one(self, data: Any) -> None:
        if isinstance(data, socket.socket):
            with contextlib.suppress(OSError):
                sock, _ = data.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = Connection(sock)
                self._strangers.add(connection)
                self._selector.register(connection, selectors.EVENT_READ, connection)
        elif isinstance(data, Connection):
            for message in data.receive():
                self._hear(data, message)
            if data in self._strangers and data.num_unread_bytes > MAX_GREETING_BYTES:
                data.closed = True  # Whoever this is, it is no agent.
            if data.closed:
                self._lose(data)
        elif isinstance(data, int):
            with contextlib.suppress(BlockingIOError):
                os.read(data, 512)
        elif self._starter is not None:
            self._starter.read(data)

    def _hear(self, connection: Connection, message: Message) -> None:
        rank = next((r for r in self._ranks if r.connection is connection), None)
        if rank is None:
            self._greet(connection, message)
            return
        rank.heard_at = time.monotonic()
        kind = message.get("type")
        if kind == "output":
            self._output.lines(rank.rank, message["stream"], message["lines"])
        elif kind == "partial":
            if rank.rank == 0:
                self._output.partial(0, message["text"])
        elif kind == "started":
            rank.program_pid = message["pid"]
        elif kind == "report":
            rank.take_report(message["report"])
            if message["report"].get("kind") == "failed":
                self._note_failure()
        elif kind == "exit":
            rank.take_exit(message)
            if self._payload is not None and not rank.exit_code and not rank.result:
                rank.why = "it ended without returning a result (sys.exit, os._exit?)"
            if rank.failed:
                self._note_failure()

    def _greet(self, connection: Connection, message: Message) -> None:
        token = str(message.get("token", ""))
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            self._lose(connection)
            return
        number = message.get("rank")
        if not isinstance(number, int) or not 0 <= number < len(self._ranks):
            self._fail(f"a process came as rank {number} of {len(self._ranks)}")
            return
        rank = self._ranks[number]
        if rank.connection is not None:
            self._fail(
                f"two processes came as rank {number}: {self._plan.title} started "
                "processes that each believe they are alone"
            )
            return
        self._strangers.discard(connection)
        rank.join(connection, message)
        if all(rank.connection is not None for rank in self._ranks):
            self._go()

    def _go(self) -> None:
        if problem := failure.version_difference(self._ranks):
            self._fail(problem)
            return
        payload = None
        if self._payload is not None:
            payload = base64.b64encode(self._payload).decode()
        for rank in self._ranks:
            peers = sum(other.host == rank.host for other in self._ranks)
            message: Message = {
                "type": "go",
                "command": list(self._spec.command),
                "cwd": os.getcwd(),
                "env": dict(self._spec.env),
                "rank": rank.rank,
                "size": len(self._ranks),
                "local_size": peers,
                "payload": payload,
                # Here an agent sees the launcher's end at once; a launcher that is
                # only suspended (Ctrl-Z) must not cost the job.
                "silence_seconds": None if self._spec.is_local else SILENCE_SECONDS,
            }
            rank.send(message)
            rank.going = True

    def _lose(self, connection: Connection) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
        self._strangers.discard(connection)
        for rank in self._ranks:
            if rank.connection is connection and not rank.ended:
                rank.lost("its agent was killed or its host was cut off")
                self._note_failure()

    def _note_failure(self) -> None:
        if self._failed_at is None and self._stop_signal is None:
            self._failed_at = time.monotonic()
            for rank in self._ranks:
                rank.send({"type": "ask"})

    def _fail(self, problem: str) -> None:
        """Ends a job that failed, but not by a rank."""
        if self._problem is None and self._failed_at is None:
            self._problem = problem
            self._failed_at = time.monotonic() - GATHER_SECONDS

    def _tick(self, now: float) -> None:
        self._take_signals(now)
        for rank in self._ranks:
            rank.flush()
        if self._failed_at is None and self._ending_at is None:
            self._watch(now)
        if (
            self._failed_at is not None
            and self._ending_at is None
            and now - self._failed_at > GATHER_SECONDS
        ):
            self._end(signal.SIGTERM, FAILED_GRACE_SECONDS)
        if self._ending_at is not None and now > self._ending_at:
            self._gone = True

    def _take_signals(self, now: float) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if self._stop_signal is not None:
                # A second Ctrl-C: at once. A closed terminal may say so twice, to the
                # session's leader and to its foreground group.
                if number != signal.SIGHUP:
                    self._end(signal.SIGKILL, 0.0)
                continue
            self._stop_signal = number
            name = signal.Signals(number).name
            self._output.say(f"kerasmgpu: {name}: ending the job")
            self._end(number, GRACE_SECONDS[signal.Signals(number)])

    def _end(self, number: int, grace_seconds: float) -> None:
        """Asks all ranks to end, and has them killed after a grace."""
        self._ending_at = time.monotonic() + grace_seconds + 2.0
        for rank in self._ranks:
            if not rank.ended:
                rank.told_to_end = True
                rank.send(
                    {
                        "type": "signal",
                        "number": int(number),
                        "kill_after_seconds": grace_seconds,
                    }
                )
        if not any(rank.going for rank in self._ranks):
            self._ending_at = time.monotonic()

    def _watch(self, now: float) -> None:
        missing = [rank.rank for rank in self._ranks if rank.connection is None]
        code = None if self._starter is None else self._starter.exit_code
        if code is not None:
            self._starter_ended(now, missing, code)
        elif missing:
            self._watch_start(now, missing)
        for rank in self._ranks:
            if rank.going and not rank.ended and now - rank.heard_at > SILENCE_SECONDS:
                rank.lost(f"no sign of life for {SILENCE_SECONDS:.0f} s")
                self._note_failure()
        self._watch_left_behind(now)

    def _watch_start(self, now: float, missing: list[int]) -> None:
        limit = self._spec.start_timeout_seconds
        waited = now - self._started_at
        joined = [rank for rank in self._ranks if rank.connection is not None]
        if limit is None:
            limit = 30.0 if self._spec.is_local else 120.0
            if joined and self._spec.is_local:
                first = min(rank.joined_at for rank in joined)
                limit = min(limit, first - self._started_at + STRAGGLER_SECONDS)
        if waited > limit:
            there = ", ".join(f"{rank.rank} on {rank.host}" for rank in joined)
            self._fail(
                f"rank {_numbers(missing)} of {len(self._ranks)} did not start within "
                f"{waited:.0f} s (started: {there or 'none'}); see --start-timeout "
                "and --verbose"
            )

    def _starter_ended(self, now: float, missing: list[int], code: int) -> None:
        if missing:
            self._fail(
                f"{self._plan.title} ended with exit code {code} before rank "
                f"{_numbers(missing)} of {len(self._ranks)} had started"
            )
            return
        running = [rank for rank in self._ranks if not rank.ended]
        silent = [rank for rank in running if now - rank.heard_at > 4]
        if silent:
            for rank in silent:
                rank.lost(f"no sign of life for {now - rank.heard_at:.0f} s")
            self._note_failure()
        elif self._spec.is_local and not any(rank.exit_code for rank in self._ranks):
            # Elsewhere, agents report their programs' ends soon or fall silent.
            self._fail(f"{self._plan.title} ended with exit code {code}")

    def _watch_left_behind(self, now: float) -> None:
        """A rank left with 0, and another waits for it in a collective."""
        left = [rank for rank in self._ranks if rank.ended and rank.exit_code == 0]
        if not left:
            return
        first = min(left, key=lambda rank: rank.ended_at)
        waiting = [
            rank
            for rank in self._ranks
            if not rank.ended
            and rank.leaving_at is None  # its last state tells nothing any more
            and rank.state is not None
            and rank.state.waiting
            and now - max(rank.waiting_since, first.ended_at) > LEFT_BEHIND_SECONDS
        ]
        if waiting:
            first.left_early = True
            self._note_failure()

    def _pulse(self, stop: threading.Event) -> None:
        while not stop.wait(2.0):
            for rank in self._ranks:
                rank.send({"type": "alive"})

    def _end_everything(self) -> None:
        """Dismisses the agents, then makes sure that no process of ours is left."""
        for rank in self._ranks:
            rank.send({"type": "bye"})
        if self._starter is not None:
            self._starter.end(5.0 if self._ending_at is None else 1.5, self._serve_all)
        own_host = socket.gethostname()
        for rank in self._ranks:
            if rank.host == own_host:
                rank.kill_locally()
            if rank.connection is not None:
                rank.connection.close()
        for connection in self._strangers:
            connection.close()

    def _conclude(self) -> Outcome:
        if self._problem is not None:
            message = f"kerasmgpu: {self._problem}"
            if self._starter and not any(rank.going for rank in self._ranks):
                message = "\n".join([*self._starter.last_lines, message])
            return Outcome(1, self._ranks, message=message)
        if self._stop_signal is not None:
            code = 128 + self._stop_signal
            codes = {rank.exit_code for rank in self._ranks}
            if len(codes) == 1 and None not in codes:
                code = self._ranks[0].shell_code
            return Outcome(code, self._ranks, stop_signal=self._stop_signal)
        first = failure.first_failure(self._ranks)
        if first is None:
            message = "" if self._payload else failure.unused(self._spec, self._ranks)
            return Outcome(0, self._ranks, message=message)
        message = failure.summary(first, self._ranks, self._started_at)
        return Outcome(first.shell_code or 1, self._ranks, first, message)


def _numbers(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
