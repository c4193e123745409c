"""This machine's addresses."""

from __future__ import annotations

import socket


def own_addresses(interface: str | None = None) -> list[str]:
    """This machine's IPv4 addresses that other hosts may reach, loopback last."""
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    addresses = [
        address.address
        for name, listed in psutil.net_if_addrs().items()
        if name in up and (interface is None or name == interface)
        for address in listed
        if address.family == socket.AF_INET
    ]
    return sorted(addresses, key=lambda address: address.startswith("127."))
