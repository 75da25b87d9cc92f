"""Routes: the address of this host on its route to another, and whether an address is a loopback."""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

_HOST: Final = re.compile(r"(?:\[([^\]]*)\]|([^:]*))(?::([0-9]{1,5}))?")


def source_address(target: str) -> str:
    """The address of this host on its route to another; "" if there is none, or a link-local one. Sends nothing."""
    try:
        [found, *_] = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def host_and_port(header: str) -> tuple[str, str]:
    """The host and port in a Host header; empty if they are not there, or it is malformed."""
    found = _HOST.fullmatch(header)
    return (found[1] or found[2] or "", found[3] or "") if found else ("", "")


def names_loopback(host: str) -> bool:
    """Whether a host is ``localhost`` or a loopback address: no page from elsewhere can have such a name."""
    return host.lower() == "localhost" or is_loopback(host)


def is_loopback(address: str) -> bool:
    """Whether only this host can reach an address; False for a name."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
