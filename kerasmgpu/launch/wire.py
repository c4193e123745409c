"""JSON lines over a non-blocking socket, between the launcher and its agents."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]

#: Above this many unsent bytes a sender should stop making more.
HIGH_WATER_BYTES = 1 << 22


class Connection:
    """One end of a conversation; the caller's selector says when to read and write.

    Args:
        sock: a connected socket; made non-blocking here.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.closed = False
        self._incoming = bytearray()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        return self.sock.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        return len(self._outgoing)

    @property
    def num_unread_bytes(self) -> int:
        """Bytes of a line that has not arrived whole."""
        return len(self._incoming)

    def send(self, message: Message) -> None:
        """Queues a message and sends what the socket takes now."""
        self._outgoing += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes now."""
        while self._outgoing and not self.closed:
            try:
                sent = self.sock.send(self._outgoing[: 1 << 20])
            except BlockingIOError:
                return
            except OSError:
                self.closed = True
                return
            del self._outgoing[:sent]

    def receive(self) -> list[Message]:
        """The messages that have arrived whole; sets `closed` at the end.

        A line that is no JSON object is dropped: anyone can connect to a port.
        """
        try:
            while chunk := self.sock.recv(1 << 20):
                self._incoming += chunk
                if len(chunk) < 1 << 16:
                    break
            else:
                self.closed = True
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def close(self) -> None:
        self.closed = True
        self.sock.close()
