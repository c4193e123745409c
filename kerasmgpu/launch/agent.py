"""The agent: the parent of one rank's program, on the rank's host.

The starter (`mpirun`, `srun`, `horovodrun`) starts an agent for each rank; the agent
connects to `kerasmgpu run`, gets the program from it, starts it, and hands on its
output, its reports and its end. It stays until it is dismissed, so that what the
starter makes of an exit never hides which rank failed first. It leaves no process
behind: where the launcher or the agent dies, the program is killed.

Standard library only; one thread, one selector.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib.metadata
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kerasmgpu.launch.wire import HIGH_WATER_BYTES, Connection, Message

#: Seconds without a word from the launcher after which an agent that has not yet
#: started its program gives up; later, as the launcher says.
LAUNCHER_SILENCE_SECONDS = 20.0
HEARTBEAT_SECONDS = 2.0
#: Between asking the program to end and killing it.
TERM_GRACE_SECONDS = 2.0
#: Output that is still to come after the program has ended is waited for this long.
DRAIN_SECONDS = 0.5
TAIL_LINES = 80

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

#: Variables of the launcher and its agents that are no business of the program.
_PRIVATE_VARIABLES = (
    "KERASMGPU_LAUNCHER",
    "KERASMGPU_TOKEN",
    "KERASMGPU_LOCAL_ENVIRONMENT",
)


def versions() -> dict[str, str | None]:
    """Versions that must be the same on all hosts, without importing anything."""
    result: dict[str, str | None] = {
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}"
    }
    for name, distributions in (
        ("kerasmgpu", ("kerasmgpu",)),
        ("Keras", ("keras",)),
        ("TensorFlow", ("tensorflow", "tensorflow-cpu", "tf-nightly")),
        ("Horovod", ("horovod",)),
    ):
        result[name] = None
        for distribution in distributions:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                result[name] = importlib.metadata.version(distribution)
                break
    return result


class LineReader:
    """Cuts a stream of bytes into whole lines.

    A line that is redrawn in place (a progress bar: carriage returns, backspaces) is
    reduced to what it shows last.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[str]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > 1 << 20:
            lines.append(self._rest)
            self._rest = b""
        elif b"\r" in self._rest:
            # Keep what is shown: a bar is redrawn thousands of times.
            ends_drawn = self._rest.endswith(b"\r")
            pieces = [p for p in self._rest.replace(b"\b", b"").split(b"\r") if p]
            self._rest = b"".join(pieces[-1:]) + (b"\r" if ends_drawn else b"")
        return [_shown(line) for line in lines]

    def partial(self) -> str:
        """What the unfinished line shows now."""
        return _shown(self._rest)

    def finish(self) -> list[str]:
        rest, self._rest = self._rest, b""
        return [_shown(rest)] if rest else []


def _shown(line: bytes) -> str:
    text = line.decode("utf-8", "surrogateescape")
    if "\r" in text or "\b" in text:
        pieces = [piece for piece in text.replace("\b", "").split("\r") if piece]
        text = pieces[-1] if pieces else ""
    return text


class Agent:
    """One rank's program and the conversation with the launcher about it."""

    def __init__(self, connection: Connection, rank: int) -> None:
        self._connection = connection
        self._rank = rank
        self._selector = selectors.DefaultSelector()
        self._process: subprocess.Popen[bytes] | None = None
        self._reports: Connection | None = None
        self._readers: dict[str, LineReader] = {}
        self._pipes: dict[str, Any] = {}
        self._paused = False
        self._tail: list[str] = []
        self._shown_partial = ""
        self._ended_at: float | None = None
        self._last_data = 0.0
        self._exit_sent = False
        self._by_starter = False
        self._kill_at: float | None = None
        self._heard_at = time.monotonic()
        self._sent_at = 0.0
        self._silence_seconds: float | None = LAUNCHER_SILENCE_SECONDS
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._result_path: str | None = None
        self._dismissed = False

    def run(self) -> int:
        """Serves until the launcher dismisses this agent or is gone."""
        wake_read, wake_write = os.pipe()
        os.set_blocking(wake_read, False)
        os.set_blocking(wake_write, False)
        signal.set_wakeup_fd(wake_write)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda *_: self._starter_ends_us())
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._selector.register(wake_read, selectors.EVENT_READ, "wake")
        self._selector.register(self._connection, selectors.EVENT_READ, "launcher")
        last_turn = time.monotonic()
        try:
            while not self._dismissed and not self._connection.closed:
                events = selectors.EVENT_READ
                if self._connection.num_unsent_bytes:
                    events |= selectors.EVENT_WRITE
                self._selector.modify(self._connection, events, "launcher")
                for key, mask in self._selector.select(0.1):
                    self._serve(key.data, mask, wake_read)
                now = time.monotonic()
                if now - last_turn > 5:  # This host or process was suspended.
                    self._heard_at = now
                last_turn = now
                self._tick(now)
            return 0 if self._dismissed else 1
        finally:
            self._kill_all()
            if self._folder is not None:
                self._folder.cleanup()

    def _serve(self, what: str, mask: int, wake_read: int) -> None:
        if what == "wake":
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 512)
        elif what == "launcher":
            if mask & selectors.EVENT_WRITE:
                self._connection.flush()
            if mask & selectors.EVENT_READ:
                self._heard_at = time.monotonic()
                for message in self._connection.receive():
                    self._obey(message)
        elif what == "reports":
            self._hand_on_reports()
        else:
            self._read_output(what)

    def _obey(self, message: Message) -> None:
        kind = message.get("type")
        if kind == "go":
            self._start(message)
        elif kind == "signal" and self._process is not None:
            self._signal(int(message["number"]))
            if message.get("kill_after_seconds") is not None:
                self._kill_at = time.monotonic() + message["kill_after_seconds"]
        elif kind == "ask" and self._reports is not None:
            self._reports.send({"kind": "ask"})
        elif kind == "bye":
            self._dismissed = True

    def _start(self, message: Message) -> None:
        self._silence_seconds = message["silence_seconds"]
        environ = _environment(message)
        ours, theirs = socket.socketpair()
        self._reports = Connection(ours)
        self._selector.register(self._reports, selectors.EVENT_READ, "reports")
        environ["KERASMGPU_REPORT_FD"] = str(theirs.fileno())
        os.set_inheritable(theirs.fileno(), True)
        if message.get("payload"):
            self._folder = tempfile.TemporaryDirectory(prefix="kerasmgpu-")
            payload = Path(self._folder.name, "function")
            payload.touch(mode=0o600)
            payload.write_bytes(base64.b64decode(message["payload"]))
            self._result_path = str(Path(self._folder.name, "result"))
            environ["KERASMGPU_FUNCTION"] = str(payload)
            environ["KERASMGPU_RESULT"] = self._result_path
        command = message["command"]
        try:
            self._process = subprocess.Popen(
                command,
                cwd=message["cwd"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                # MPI starters hand on open sockets (PMI_FD): leave them open.
                close_fds=False,
                preexec_fn=_prepare_child,
            )
        except (OSError, subprocess.SubprocessError) as error:
            self._tail = [f"{command[0]} cannot be started: {error}"]
            self._exit_sent = True
            self._ended_at = time.monotonic()
            code = 127 if isinstance(error, FileNotFoundError) else 126
            self._send({"type": "exit", "code": code, "tail": self._tail})
            return
        finally:
            theirs.close()
        self._send({"type": "started", "pid": self._process.pid})
        for name in ("stdout", "stderr"):
            pipe = getattr(self._process, name)
            os.set_blocking(pipe.fileno(), False)
            self._readers[name] = LineReader()
            self._pipes[name] = pipe
            self._selector.register(pipe, selectors.EVENT_READ, name)

    def _read_output(self, name: str) -> None:
        pipe = self._pipes.get(name)
        if pipe is None:
            return
        try:
            chunk = os.read(pipe.fileno(), 1 << 16)
        except BlockingIOError:
            return
        self._last_data = time.monotonic()
        reader = self._readers[name]
        lines = reader.feed(chunk) if chunk else reader.finish()
        if not chunk:
            self._selector.unregister(pipe)
            pipe.close()
            del self._pipes[name]
        self._hand_on_lines(name, lines)

    def _hand_on_lines(self, name: str, lines: list[str]) -> None:
        if not lines:
            return
        if name == "stderr":
            self._tail = (self._tail + lines)[-TAIL_LINES:]
        self._send({"type": "output", "stream": name, "lines": lines})

    def _hand_on_reports(self) -> None:
        if self._reports is None:
            return
        for report in self._reports.receive():
            self._send({"type": "report", "report": report})
        if self._reports.closed:
            self._selector.unregister(self._reports)
            self._reports.close()
            self._reports = None

    def _tick(self, now: float) -> None:
        if now - self._sent_at > HEARTBEAT_SECONDS:
            self._send({"type": "alive"})
        limit = self._silence_seconds
        if limit is not None and now - self._heard_at > limit:
            self._connection.closed = True
            return
        self._throttle()
        # Only rank 0 draws a progress bar.
        is_drawing = self._rank == 0 and "stdout" in self._pipes
        partial = self._readers["stdout"].partial() if is_drawing else ""
        if partial != self._shown_partial:
            self._shown_partial = partial
            self._send({"type": "partial", "text": partial[:500]})
        if self._kill_at is not None and now > self._kill_at:
            self._kill_at = None
            self._signal(signal.SIGKILL)
        process = self._process
        if process is None or self._exit_sent:
            return
        if self._ended_at is None and process.poll() is not None:
            self._ended_at = self._last_data = now
        if self._ended_at is not None:
            waited = now - max(self._last_data, self._ended_at)
            too_long = now - self._ended_at > 4 * DRAIN_SECONDS
            if not self._pipes or waited > DRAIN_SECONDS or too_long:
                self._report_exit(process.returncode)

    def _report_exit(self, code: int) -> None:
        for name in list(self._pipes):
            self._hand_on_lines(name, self._readers[name].finish())
        self._hand_on_reports()
        message = {
            "type": "exit",
            "code": code,
            "tail": self._tail,
            "by_starter": self._by_starter,
        }
        if self._result_path is not None and os.path.exists(self._result_path):
            result = Path(self._result_path).read_bytes()
            message["result"] = base64.b64encode(result).decode()
        self._exit_sent = True
        self._kill_all()
        self._send(message)

    def _throttle(self) -> None:
        """Stops reading the program's output while the launcher cannot take it."""
        full = self._connection.num_unsent_bytes > HIGH_WATER_BYTES
        if full != self._paused:
            self._paused = full
            for name, pipe in self._pipes.items():
                if full:
                    self._selector.unregister(pipe)
                else:
                    self._selector.register(pipe, selectors.EVENT_READ, name)

    def _send(self, message: Message) -> None:
        self._sent_at = time.monotonic()
        self._connection.send(message)

    def _signal(self, number: int) -> None:
        process = self._process
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            # The program is the leader of a group of its own.
            os.killpg(process.pid, number)
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                os.killpg(process.pid, signal.SIGCONT)

    def _starter_ends_us(self) -> None:
        """The starter wants this rank gone: another rank of its job has ended."""
        self._by_starter = self._by_starter or self._ended_at is None
        self._signal(signal.SIGTERM)
        self._kill_at = time.monotonic() + TERM_GRACE_SECONDS
        if self._process is None:
            self._dismissed = True

    def _kill_all(self) -> None:
        """Kills whatever the program has started, also in groups of its own."""
        self._signal(signal.SIGKILL)
        try:
            import psutil

            children = psutil.Process().children(recursive=True)
        except (ImportError, OSError):
            children = []
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        with contextlib.suppress(ChildProcessError):
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline and os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _prepare_child() -> None:
    """In the child, before the program: killed when the agent dies; a group of its own.

    But no session of its own: Linux schedules sessions as groups (`sched(7)`, "The
    autogroup feature"), between which `sched_yield`, by which ranks wait, does not give
    way. Ranks that share a core then waited tens of milliseconds for each other.
    """
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _environment(message: Message) -> dict[str, str]:
    """The program's environment.

    On the launcher's own machine the program inherits everything, from a file that
    only this user can read; elsewhere it has what was passed on.
    """
    environ = dict(os.environ)
    path = environ.get("KERASMGPU_LOCAL_ENVIRONMENT")
    if path and os.path.exists(path):
        local = json.loads(Path(path).read_text())
        if local["host"] == socket.gethostname():
            environ = {**local["environ"], **environ}
    for name in _PRIVATE_VARIABLES:
        environ.pop(name, None)
    threads = str(max(1, len(os.sched_getaffinity(0)) // message["local_size"]))
    for name in (
        "OMP_NUM_THREADS",
        "TF_NUM_INTRAOP_THREADS",
        "TF_NUM_INTEROP_THREADS",
    ):
        environ.setdefault(name, threads)
    environ.setdefault("PYTHONUNBUFFERED", "1")
    # N ranks need not say N times how TensorFlow was compiled.
    environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    environ.update(message["env"])
    environ["KERASMGPU_RANK"] = str(message["rank"])
    environ["KERASMGPU_SIZE"] = str(message["size"])
    return environ


def connect(addresses: str, timeout_seconds: float) -> socket.socket:
    """Connects to the launcher at the first of `host,host:port` that answers."""
    hosts, _, port = addresses.rpartition(":")
    deadline = time.monotonic() + timeout_seconds
    problem: OSError | None = None
    while time.monotonic() < deadline:
        for host in hosts.split(","):
            try:
                sock = socket.create_connection((host, int(port)), timeout=3)
            except OSError as error:
                problem = error
                continue
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
        time.sleep(0.2)
    raise ConnectionError(
        f"the launcher cannot be reached from {socket.gethostname()} at {hosts}, "
        f"port {port}: {problem}. Name the network with --network-interface, and let "
        "the hosts' firewalls pass."
    )


def main(argv: list[str]) -> int:
    """Runs the agent; `argv` names the variable that carries the rank."""
    variable = argv[0]
    rank = os.environ.get(variable, "")
    if not rank.isdigit():
        print(f"kerasmgpu: {variable} is not set by the starter.", file=sys.stderr)
        return 1
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        sock = connect(os.environ["KERASMGPU_LAUNCHER"], timeout_seconds=15)
    except ConnectionError as error:
        print(f"kerasmgpu: rank {rank}: {error}", file=sys.stderr)
        return 1
    connection = Connection(sock)
    connection.send(
        {
            "type": "hello",
            "token": os.environ["KERASMGPU_TOKEN"],
            "rank": int(rank),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "versions": versions(),
        }
    )
    return Agent(connection, int(rank)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
