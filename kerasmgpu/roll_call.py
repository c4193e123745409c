"""The roll call: who waits, on whom, and what the missing rank is doing.

Every rank has one daemon thread. Rank 0's listens; the others' connect to it. A rank
whose own wait lasts too long asks rank 0, which asks every rank, and prints what came
back. All of it runs beside training: a rank that is stuck in Python still answers,
with its stack; a stopped process does not, and that is said.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from kerasmgpu.topology import Topology, hostname

#: What this rank does: (waits for others, in what, since when).
state: tuple[bool, str, float] = (False, "", time.monotonic())

_ANSWER_SECONDS = 2.0
_MAX_STACK_LINES = 24

_member: Member | None = None


def start(
    topology: Topology,
    stall_timeout_seconds: float,
    exchange: Callable[[Any], list[Any]] | None,
    launcher_fd: int | None,
) -> None:
    """Starts this rank's thread. Must be called on every rank.

    Args:
        topology: this rank's place in the job.
        stall_timeout_seconds: how long to wait in silence.
        exchange: gathers an object of every rank; None does without other ranks.
        launcher_fd: socket to this rank's agent under `kerasmgpu run`, or None.
    """
    global _member
    listener = None
    offer = None
    if topology.rank == 0 and exchange is not None:
        with contextlib.suppress(OSError):
            local_only = topology.num_nodes == 1
            listener = socket.create_server(
                ("127.0.0.1" if local_only else "", 0), backlog=1024
            )
            offer = {
                "addresses": ["127.0.0.1"] if local_only else _own_addresses(),
                "port": listener.getsockname()[1],
                "token": secrets.token_hex(16),
            }
    hosts = [hostname()] * topology.size
    if exchange is not None:
        answers = exchange((hostname(), offer))
        hosts = [host for host, _ in answers]
        offer = answers[0][1]
    _member = Member(topology, stall_timeout_seconds, hosts, offer, listener)
    if launcher_fd is not None:
        _member.attach_launcher(launcher_fd)
    threading.Thread(
        target=_member.run, name="kerasmgpu-roll-call", daemon=True
    ).start()


def leave(why: str) -> None:
    """Tells the other ranks that this one leaves, as far as that is possible."""
    member = _member
    if member is not None:
        member.leave(why)


def who_left() -> str:
    """The first rank that is known to have left the job, in words, or ""."""
    member = _member
    return "" if member is None else member.who_left()


class _Peer:
    """A socket of JSON lines, read by the thread, written by any."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(1.0)
        self.sock = sock
        self.rank: int | None = None
        self.closed = False
        self._rest = b""
        self._lock = threading.Lock()

    def fileno(self) -> int:
        return self.sock.fileno()

    def send(self, message: dict[str, Any]) -> None:
        try:
            with self._lock:
                self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.closed = True

    def receive(self) -> list[dict[str, Any]]:
        try:
            chunk = self.sock.recv(1 << 16)
        except OSError:
            chunk = b""
        if not chunk:
            self.closed = True
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        messages = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    messages.append(message)
        return messages


class Member:
    """This rank in the roll call; `run` is its thread."""

    def __init__(
        self,
        topology: Topology,
        stall_timeout_seconds: float,
        hosts: list[str],
        offer: dict[str, Any] | None,
        listener: socket.socket | None,
    ) -> None:
        self._topology = topology
        self._timeout_seconds = stall_timeout_seconds
        self._hosts = hosts
        self._offer = offer
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._hub: _Peer | None = None
        self._launcher: _Peer | None = None
        self._peers: dict[int, _Peer] = {}
        self._pid = os.getpid()
        self._main_thread = threading.main_thread().ident
        self._left: dict[int, str] = {}
        self._answers: dict[int, dict[str, Any]] = {}
        self._answered_at: dict[int, float] = {}
        self._asked_by: set[int] = set()
        self._asked_at: float | None = None
        self._stalled_in: tuple[bool, str, float] | None = None
        self._next_report_seconds = 0.0
        self._own_question_at: float | None = None
        self._told_launcher: tuple[bool, str, float] | None = None

    def attach_launcher(self, descriptor: int) -> None:
        with contextlib.suppress(OSError):
            # A copy: the descriptor itself also serves `report`.
            self._launcher = _Peer(socket.socket(fileno=os.dup(descriptor)))
            self._selector.register(
                self._launcher, selectors.EVENT_READ, self._launcher
            )

    def run(self) -> None:
        """Serves until the process ends. Never raises into anything."""
        try:
            if self._listener is not None:
                self._selector.register(
                    self._listener, selectors.EVENT_READ, self._listener
                )
            elif self._offer is not None:
                self._join()
            while True:
                for key, _ in self._selector.select(0.25):
                    self._serve(key.data)
                self._tick(time.monotonic())
        except Exception as error:
            print(f"kerasmgpu: the roll call ended: {error!r}", file=sys.stderr)

    def leave(self, why: str) -> None:
        if os.getpid() != self._pid:
            return
        message = {"kind": "left", "rank": self._topology.rank, "why": why}
        for peer in (self._hub, *list(self._peers.values())):
            if peer is not None and not peer.closed:
                peer.send(message)

    def who_left(self) -> str:
        for rank, why in self._left.items():
            return f"rank {rank} on host {self._hosts[rank]} has left the job ({why})"
        return ""

    def _join(self) -> None:
        offer = self._offer or {}
        for address in offer.get("addresses", []):
            with contextlib.suppress(OSError):
                sock = socket.create_connection((address, offer["port"]), timeout=5)
                hub = self._hub = _Peer(sock)
                self._selector.register(hub, selectors.EVENT_READ, hub)
                rank = self._topology.rank
                hub.send({"rank": rank, "token": offer["token"]})
                return

    def _serve(self, source: Any) -> None:
        if isinstance(source, socket.socket):
            with contextlib.suppress(OSError):
                sock, _ = source.accept()
                peer = _Peer(sock)
                self._selector.register(peer, selectors.EVENT_READ, peer)
            return
        speaker: _Peer = source
        for message in speaker.receive():
            if speaker is self._hub:
                self._hear_hub(message)
            elif speaker is not self._launcher:
                self._hear_peer(speaker, message)
            elif message.get("kind") == "ask":
                speaker.send({"kind": "state", **self._own_state()})
        if source.closed:
            self._selector.unregister(source)
            source.sock.close()
            if source is self._hub:
                self._left.setdefault(0, "its connection was closed")
            elif source.rank is not None:
                self._note_left(source.rank, "its connection was closed")

    def _hear_peer(self, peer: _Peer, message: dict[str, Any]) -> None:
        """On rank 0: what another rank says."""
        if peer.rank is None:
            token = str((self._offer or {}).get("token", ""))
            rank = message.get("rank")
            if not hmac.compare_digest(str(message.get("token")), token):
                peer.closed = True
            elif isinstance(rank, int) and 0 < rank < self._topology.size:
                peer.rank = rank
                self._peers[rank] = peer
                self._answered_at[rank] = time.monotonic()
            return
        kind = message.get("kind")
        if kind == "left":
            self._note_left(peer.rank, str(message.get("why")))
        elif kind == "answer":
            self._answers[peer.rank] = message
            self._answered_at[peer.rank] = time.monotonic()
        elif kind == "who":
            self._asked_by.add(peer.rank)
            self._ask_all()

    def _note_left(self, rank: int, why: str) -> None:
        if rank in self._left:
            return
        self._left[rank] = why
        for other, peer in self._peers.items():
            if other != rank and not peer.closed:
                peer.send({"kind": "left", "rank": rank, "why": why})

    def _hear_hub(self, message: dict[str, Any]) -> None:
        """On the others: what rank 0 says."""
        kind = message.get("kind")
        if kind == "ask" and self._hub is not None:
            self._hub.send({"kind": "answer", **self._own_state()})
        elif kind == "left":
            self._left.setdefault(int(message["rank"]), str(message["why"]))
        elif kind == "roll":
            self._own_question_at = None
            self._print_roll(message["answers"])

    def _own_state(self) -> dict[str, Any]:
        is_waiting, what, since = state
        return {
            "waiting": is_waiting,
            "what": what,
            "seconds": time.monotonic() - since,
            "stack": self._stack(),
        }

    def _stack(self) -> str:
        frame = sys._current_frames().get(self._main_thread or 0)
        if frame is None:
            return ""
        lines = "".join(traceback.format_stack(frame)).rstrip().split("\n")
        return "\n".join(lines[-_MAX_STACK_LINES:])

    def _ask_all(self) -> None:
        if self._asked_at is not None:
            return
        self._asked_at = time.monotonic()
        self._answers = {}
        for peer in self._peers.values():
            if not peer.closed:
                peer.send({"kind": "ask"})

    def _tick(self, now: float) -> None:
        if self._asked_at is not None:
            complete = len(self._answers) >= self._topology.size - 1 - len(self._left)
            if complete or now - self._asked_at > _ANSWER_SECONDS:
                self._close_roll(now)
        self._tell_launcher_state()
        is_waiting, what, since = current = state
        if not is_waiting:
            self._stalled_in = None
            return
        if current is not self._stalled_in:
            self._stalled_in = current
            self._next_report_seconds = self._timeout_seconds
            self._own_question_at = None
        if now - since > self._next_report_seconds:
            self._next_report_seconds *= 2
            self._question(now)
        asked = self._own_question_at
        if asked is not None and now - asked > 2 * _ANSWER_SECONDS:
            self._own_question_at = None
            self._print(
                what, since, [f"rank 0 on host {self._hosts[0]} does not answer"]
            )

    def _question(self, now: float) -> None:
        if self._topology.rank == 0:
            if self._listener is not None:
                self._asked_by.add(0)
                self._ask_all()
        elif self._hub is not None and not self._hub.closed:
            self._own_question_at = now
            self._hub.send({"kind": "who"})
        else:
            _, what, since = state
            reason = self.who_left() or f"rank 0 on host {self._hosts[0]} has left"
            self._print(what, since, [reason])

    def _close_roll(self, now: float) -> None:
        """On rank 0: hands the answers to those who asked."""
        self._asked_at = None
        answers: dict[str, Any] = {"0": self._own_state()}
        for rank in range(1, self._topology.size):
            if rank in self._left:
                answers[str(rank)] = {"left": self._left[rank]}
            elif rank in self._answers:
                answers[str(rank)] = self._answers[rank]
            else:
                silent = now - self._answered_at.get(rank, now)
                answers[str(rank)] = {"silent_seconds": silent}
        asked_by, self._asked_by = self._asked_by, set()
        for rank in asked_by:
            if rank == 0:
                self._print_roll(answers)
            elif not self._peers[rank].closed:
                self._peers[rank].send({"kind": "roll", "answers": answers})

    def _print_roll(self, answers: dict[str, dict[str, Any]]) -> None:
        is_waiting, what, since = state
        if not is_waiting:
            return
        missing = []
        for number, answer in sorted(answers.items(), key=lambda item: int(item[0])):
            rank = int(number)
            name = f"rank {rank} on host {self._hosts[rank]}"
            if "left" in answer:
                missing.append(f"{name}, which has left the job: {answer['left']}")
            elif "silent_seconds" in answer:
                missing.append(
                    f"{name}, which does not answer (last heard "
                    f"{answer['silent_seconds']:.0f} s ago; stopped, or cut off?)"
                )
            elif not answer["waiting"] or answer["what"] != what:
                verb = "waits in" if answer["waiting"] else "is in"
                doing = answer["what"] or "the program's own code"
                missing.append(
                    f"{name}, which {verb} {doing} since {answer['seconds']:.0f} s; "
                    f"its stack:\n{answer['stack']}"
                )
        if not missing:
            missing = ["nobody: all ranks answer and are in it too (a slow step?)"]
        self._print(what, since, missing)

    def _print(self, what: str, since: float, missing: list[str]) -> None:
        rank, size = self._topology.rank, self._topology.size
        seconds = time.monotonic() - since
        shown = missing[:8] + (["…"] if len(missing) > 8 else [])
        print(
            f"kerasmgpu: rank {rank} of {size} on host {self._hosts[rank]} has waited "
            f"{seconds:.0f} s in {what}, on:\n  " + "\n  ".join(shown),
            file=sys.stderr,
            flush=True,
        )

    def _tell_launcher_state(self) -> None:
        """Hands a changed state to the agent: at most one in a quarter second."""
        if self._launcher is None or self._launcher.closed:
            return
        current = state
        if current is not self._told_launcher:
            self._told_launcher = current
            is_waiting, what, since = current
            seconds = time.monotonic() - since
            self._launcher.send(
                {
                    "kind": "state",
                    "waiting": is_waiting,
                    "what": what,
                    "seconds": seconds,
                }
            )


def _own_addresses() -> list[str]:
    """Addresses of this host that others may reach, the most likely first."""
    addresses = []
    with contextlib.suppress(ImportError, OSError):
        import psutil

        for listed in psutil.net_if_addrs().values():
            for address in listed:
                if address.family == socket.AF_INET:
                    addresses.append(address.address)
    if not addresses:
        with contextlib.suppress(OSError):
            addresses.append(socket.gethostbyname(socket.gethostname()))
    return sorted(set(addresses), key=lambda address: address.startswith("127."))
