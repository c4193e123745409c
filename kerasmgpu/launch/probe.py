"""What a host says before a job: run there by `kerasmgpu.launch.preflight`.

A JSON line each way: asked for an interface, it tells its versions, interfaces and
addresses and a port; given the others' ports, it tells which it cannot reach.
"""

from __future__ import annotations

import concurrent.futures
import json
import socket
import sys
from typing import Any

from kerasmgpu.launch.addresses import own_addresses
from kerasmgpu.launch.agent import versions

ANSWER_MARK = "kerasmgpu-probe "
CONNECT_SECONDS = 3.0


def main() -> int:
    """Answers both questions, then waits to be ended."""
    question = json.loads(sys.stdin.readline())
    interfaces = [name for _, name in socket.if_nameindex()]
    interface = question["interface"]
    with socket.create_server(("", 0), backlog=1024) as server:
        _say(
            {
                "hostname": socket.gethostname(),
                "versions": versions(),
                "interfaces": interfaces,
                "addresses": own_addresses(
                    interface if interface in interfaces else None
                ),
                "port": server.getsockname()[1],
            }
        )
        line = sys.stdin.readline()
        if not line:
            return 0
        others = json.loads(line)["others"]
        with concurrent.futures.ThreadPoolExecutor(32) as pool:
            reached = list(pool.map(_reaches, others))
        _say(
            {
                "unreachable": [
                    other["name"]
                    for other, is_reached in zip(others, reached, strict=True)
                    if not is_reached
                ]
            }
        )
        sys.stdin.read()  # The others may still be trying our port.
    return 0


def _reaches(other: dict[str, Any]) -> bool:
    for address in other["addresses"]:
        if address.startswith("127."):
            continue
        try:
            with socket.create_connection(
                (address, other["port"]), timeout=CONNECT_SECONDS
            ):
                return True
        except OSError:
            continue
    return False


def _say(message: dict[str, Any]) -> None:
    print(ANSWER_MARK + json.dumps(message), flush=True)


if __name__ == "__main__":
    sys.exit(main())
