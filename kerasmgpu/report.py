"""What a rank says about itself: what it waits in, and how it failed.

The core calls, in this order:

- `install_failure_hooks()`: an uncaught exception prints rank, host and traceback,
  and ends the process at once, so that nothing at exit can wait for other ranks.
- `start(topology, stall_timeout_seconds, exchange)`: once, when Horovod runs. Starts
  the roll call (`kerasmgpu.roll_call`): a rank that waits for others longer than
  `stall_timeout_seconds` says on whom and in what.
- `waiting(what)` and `working(what)`: right before and after a blocking collective or
  step. One tuple is stored; nothing else happens.
- `used(what)`: this rank wrapped a model or called a collective.

All are cheap, and do nothing at size 1 or before `start`. Nothing here raises into
training or keeps a process alive. Standard library only.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from kerasmgpu import roll_call
from kerasmgpu.errors import CollectiveError
from kerasmgpu.topology import Topology, hostname, launched_rank, launched_size

#: Seconds that leaving the job (Horovod's shutdown) may take at exit.
EXIT_TIMEOUT_SECONDS = 8.0
#: A rank that fails only because another has left speaks after that one.
CONSEQUENCE_DELAY_SECONDS = 1.5

_CONSEQUENCE_TEXTS = (
    "Horovod has been shut down",
    "HorovodInternalError",
    "Connection closed by peer",
    "Connection reset by peer",
)

_topology: Topology | None = None
_used = False
_hooks_pid: int | None = None
_exit_code: int | None = None
_previous_hook = sys.excepthook


def waiting(what: str) -> None:
    """Says that this rank is about to wait for the others in `what`."""
    roll_call.state = (True, what, time.monotonic())


def working(what: str = "") -> None:
    """Says that this rank works by itself again."""
    roll_call.state = (False, what, time.monotonic())


def used(what: str) -> None:
    """Says that this rank takes part: it wrapped a model or called a collective."""
    global _used
    if not _used:
        _used = True
        _tell_launcher({"kind": "used", "what": what})


def start(
    topology: Topology,
    stall_timeout_seconds: float,
    exchange: Callable[[Any], list[Any]] | None = None,
) -> None:
    """Starts the roll call. Must be called on every rank; once is enough.

    Args:
        topology: this rank's place in the job.
        stall_timeout_seconds: how long to wait for other ranks in silence.
        exchange: gathers a small object of every rank, in the order of ranks. None
            does without a roll call.
    """
    global _topology
    if topology.size == 1 or _topology is not None:
        return
    _topology = topology
    # Registered after Horovod's own, so it runs before: what follows may hang.
    atexit.register(_at_exit)
    roll_call.start(topology, stall_timeout_seconds, exchange, _launcher_fd())


def install_failure_hooks() -> None:
    """Makes an uncaught exception end this process at once, and be heard.

    Does nothing in a process that belongs to no job of several ranks. A hook that was
    installed before keeps printing the traceback.
    """
    global _hooks_pid, _previous_hook
    if _hooks_pid == os.getpid():
        return
    _hooks_pid = os.getpid()
    _previous_hook = sys.excepthook
    sys.excepthook = _on_uncaught
    # `sys.exit` only raises SystemExit, whose code nobody can ask for at exit.
    sys.exit = _noting_exit(sys.exit)


def _noting_exit(original: Callable[..., Any]) -> Callable[..., Any]:
    def exit(status: Any = None, /) -> Any:
        global _exit_code
        if threading.current_thread() is threading.main_thread():
            _exit_code = status if isinstance(status, int) else int(status is not None)
        return original(status)

    return exit


def is_consequence(error: BaseException) -> bool:
    """Whether an exception only says that another rank has left the job."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, CollectiveError):
            return True
        if type(seen).__name__ == "HorovodInternalError":
            return True
        if any(text in str(seen) for text in _CONSEQUENCE_TEXTS):
            return True
        seen = seen.__cause__
    return False


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if _hooks_pid != os.getpid() or not _is_in_job():
        _previous_hook(kind, error, trace)
        return
    code = 130 if issubclass(kind, KeyboardInterrupt) else 1
    # Whatever goes wrong in telling, the process ends.
    try:
        _tell_failure(kind, error, trace)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
    finally:
        os._exit(code)


def _tell_failure(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    rank, size = _place()
    me = f"rank {rank} of {size} on host {hostname()}"
    secondary = is_consequence(error) or issubclass(kind, KeyboardInterrupt)
    lines = traceback.format_exception(kind, error, trace)
    has_launcher = _tell_launcher(
        {
            "kind": "failed",
            "traceback": "".join(lines),
            "is_consequence": secondary,
            "what": roll_call.state[1],
        }
    )
    if issubclass(kind, KeyboardInterrupt):
        print(f"kerasmgpu: {me} was interrupted", file=sys.stderr)
        return
    if not secondary:
        roll_call.leave(f"failed with {kind.__name__}")
        _previous_hook(kind, error, trace)
        print(f"kerasmgpu: {me} failed: {lines[-1].strip()}", file=sys.stderr)
        if len("".join(lines).splitlines()) > 20 and not has_launcher:
            # The launcher below adds lines of its own; keep the cause in sight.
            print("".join(lines[-6:]).rstrip(), file=sys.stderr)
        return
    time.sleep(CONSEQUENCE_DELAY_SECONDS)
    _, what, _ = roll_call.state
    gone = roll_call.who_left()
    reason = gone or "another rank has left the job"
    inside = f", while in {what}" if what else ""
    text = f"kerasmgpu: {me} stopped: {reason}{inside} ({kind.__name__})"
    print(text if gone else f"{text}: {str(error)[:300]}", file=sys.stderr)


def _at_exit() -> None:
    """Says what should be said at exit, and bounds what comes after."""
    if _topology is None or _hooks_pid not in (None, os.getpid()):
        return
    if not _used and not _tell_launcher({"kind": "unused"}) and _topology.rank == 0:
        print(
            f"kerasmgpu: WARNING: {_topology.size} ranks ran, but no model was wrapped "
            "and no collective was called: each rank worked alone. Call "
            "`model = strategy.wrap(model)`.",
            file=sys.stderr,
            flush=True,
        )
    code = _exit_code
    if code:
        rank, size = _place()
        print(
            f"kerasmgpu: rank {rank} of {size} on host {hostname()} leaves the job "
            f"with exit code {code}",
            file=sys.stderr,
            flush=True,
        )
    _tell_launcher({"kind": "leaving", "code": code})
    roll_call.leave(f"its program ended{'' if code is None else f' with code {code}'}")
    _leave_horovod()


def _leave_horovod() -> None:
    """Horovod's shutdown, which waits for the others, bounded.

    Horovod would do the same at this place: its handler was registered just before
    this module's, and finds nothing left to do. Handlers of others have all the time
    they want.
    """
    # Looked up, not imported: where it is not loaded there is nothing to leave.
    horovod = sys.modules.get("horovod.tensorflow")
    if horovod is None:
        return
    leaving = threading.Thread(target=horovod.shutdown, daemon=True)
    leaving.start()
    leaving.join(EXIT_TIMEOUT_SECONDS)
    if not leaving.is_alive():
        return
    rank, size = _place()
    print(
        f"kerasmgpu: rank {rank} of {size} on host {hostname()} could not leave the "
        f"job in {EXIT_TIMEOUT_SECONDS:.0f} s: another rank does not answer.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_exit_code or 1)


def _place() -> tuple[int, int]:
    if _topology is not None:
        return _topology.rank, _topology.size
    promised = launched_size()
    return launched_rank(), promised[0] if promised else 1


def _is_in_job() -> bool:
    try:
        return _place()[1] > 1
    except Exception:  # A launcher's variable that makes no sense is told elsewhere.
        return False


def _launcher_fd() -> int | None:
    text = os.environ.get("KERASMGPU_REPORT_FD", "")
    return int(text) if text.isdigit() else None


def _tell_launcher(report: dict[str, Any]) -> bool:
    """Hands a report to this rank's agent; False where there is none."""
    descriptor = _launcher_fd()
    if descriptor is None:
        return False
    try:
        data = json.dumps(report).encode() + b"\n"
        while data:
            data = data[os.write(descriptor, data) :]
    except OSError:
        return False
    return True
