"""Routes: the address of this host on its route to another, and whether an address is a loopback."""

from __future__ import annotations

import ipaddress
import socket


def source_address(target: str) -> str:
    """The address of this host on its route to another; "" if there is none, or a link-local one. Sends nothing."""
    try:
        [found, *_] = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def is_loopback(address: str) -> bool:
    """Whether only this host can reach an address; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
