"""Addresses between nodes: the one that a node announces to its peers, and whether rank 0 can be reached at its own."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import psutil

from redelastic.redis.routes import is_loopback, source_address

# Where torch's gloo and RPC listen. Without these variables they use what the hostname resolves to: on Debian, and on a
# host without a name service, that is a loopback, which no peer can reach.
INTERFACE_VARIABLES: Final = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
LOOPBACK: Final = "127.0.0.1"
LOOKUP_TIMEOUT: Final = 2.0  # in seconds
RETRY_PAUSE: Final = 0.5  # in seconds
MAX_LISTED: Final = 16

_FAR_AWAY: Final = ("192.0.2.1", "2001:db8::1")  # reserved for documentation: no host has them
_IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class LocalAddress:
    """The address at which peers reach this node.

    Attributes:
        host: an address, or the name that was given.
        source: how it was found, for people.
        interface: the one with this address, if gloo needs to be given it; empty if gloo finds it by itself.
    """

    host: str
    source: str
    interface: str = ""

    def __str__(self) -> str:
        return f"{self.host} ({self.source})"

    def export_interface(self) -> None:
        """Set gloo's interface in this process' environment, which workers inherit; what the user set stays."""
        for variable in INTERFACE_VARIABLES if self.interface else ():
            if not set_by_user(variable):
                os.environ[variable] = _exported[variable] = self.interface


_exported: dict[str, str] = {}  # variables that this process has set itself


def set_by_user(variable: str) -> str:
    """The value of an environment variable; "" if it is unset, or redelastic set it."""
    value = os.environ.get(variable, "")
    return "" if value == _exported.get(variable) else value


def find_address(local_addr: str | None, towards_redis: str | None) -> LocalAddress:
    """Find the address of this host to announce to its peers.

    It is the given one; else the address on the route to Redis, which peers use too. If Redis is on a loopback (it may
    be a proxy), it is what the hostname resolves to, or the address on the default route, or a loopback. A name is only
    announced if it was given: peers may not know others.

    NCCL keeps its own choice: it never chooses a loopback, and an interface that it would not choose may be slow.

    Args:
        local_addr: an address, a name or an interface of this host. A name is announced as it is.
        towards_redis: as :meth:`Connection.local_address` returns it.

    Raises:
        ValueError: ``local_addr`` is not of this host. The address of a router that forwards to it (NAT) is of no use:
            gloo and NCCL announce the host's own.
    """
    return _automatic(towards_redis) if local_addr is None else _given(local_addr, towards_redis)


def _automatic(towards_redis: str | None) -> LocalAddress:
    resolved = meant_by_hostname()
    gloo_is_right = bool(resolved) and not is_loopback(resolved)
    if towards_redis:
        host, source = towards_redis, "its way to Redis"
    elif gloo_is_right:
        host, source = resolved, "what its hostname means"
    elif route := next(filter(None, map(source_address, _FAR_AWAY)), ""):
        host, source = route, "its default route"
    else:
        return LocalAddress(LOOPBACK, "it has no other")
    return LocalAddress(host, source, "" if gloo_is_right else interface_of(host))


def _given(local_addr: str, towards_redis: str | None) -> LocalAddress:
    def refuse(why: str) -> ValueError:
        listed = [f"{address} ({name})" for name, own in interfaces().items() for address in own]
        more = ", …" if len(listed) > MAX_LISTED else ""
        return ValueError(
            f"local_addr={local_addr!r} is not this host's: {why}. Give an address that its peers can reach, or its "
            f"interface; this host has {', '.join(listed[:MAX_LISTED])}{more}."
        )

    if (own := interfaces().get(local_addr)) is not None:
        if not own:
            raise refuse("the interface has no address")
        return LocalAddress(_best(own), f"of the given interface {local_addr}", local_addr)
    try:
        found = socket.getaddrinfo(local_addr, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as e:
        raise refuse(f"neither an address, an interface, nor a name that resolves ({e})") from e
    resolved = list(dict.fromkeys(str(place[4][0]) for place in found))
    held = [address for address in map(_bound, found) if address]
    if not held:
        raise refuse("no interface has it" if resolved == [local_addr] else f"it resolves to {', '.join(resolved)}")
    if ipaddress.ip_address(held[0]).is_unspecified:
        raise refuse("it means every address, so it gives peers none")
    if held[0] != local_addr and is_loopback(held[0]):  # peers resolve the name to another address
        return LocalAddress(local_addr, "given", _automatic(towards_redis).interface)
    return LocalAddress(local_addr, "given", interface_of(held[0]))


def meant_by_hostname() -> str:
    """The address that gloo would use: the hostname's first one that is of this host; "" if there is none.

    It is "" too if the name server does not answer within ``LOOKUP_TIMEOUT``.
    """
    found: list[Any] = []

    def look_up() -> None:
        with contextlib.suppress(OSError, UnicodeError):
            found.extend(socket.getaddrinfo(socket.gethostname(), 0, type=socket.SOCK_STREAM))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(LOOKUP_TIMEOUT)
    return next(filter(None, map(_bound, found)), "")


def _bound(place: Any) -> str:
    """The address if it is of this host, else ""."""
    family, kind, _, _, where = place
    try:
        with socket.socket(family, kind) as trial:
            trial.bind(where)
    except OSError:
        return ""
    scope = where[3] if family == socket.AF_INET6 else 0  # of an address that is valid on one link only
    return f"{where[0]}%{socket.if_indextoname(scope)}" if scope else str(where[0])


def interfaces() -> dict[str, list[_IPAddress]]:
    """The addresses of this host, by interface."""
    return {
        name: [ipaddress.ip_address(a.address) for a in addresses if a.family in (socket.AF_INET, socket.AF_INET6)]
        for name, addresses in psutil.net_if_addrs().items()
    }


def interface_of(address: str) -> str:
    """The interface that has an address; "" if none has."""
    wanted = ipaddress.ip_address(address)
    return next((name for name, own in interfaces().items() if wanted in own), "")


def _best(own: list[_IPAddress]) -> str:
    """The address that most peers can use; gloo prefers an interface's IPv4 address, too."""
    return str(min(own, key=lambda address: (address.is_link_local, address.version)))


def why_unreached(host: str, port: int, timeout: float, is_over: Callable[[], bool]) -> str:
    """Try to connect to a peer until that succeeds.

    Args:
        host: of the peer.
        port: of the peer.
        timeout: how long to try, in seconds.
        is_over: whether the caller no longer needs the answer.

    Returns:
        Why it failed; "" if it succeeded or was given up.
    """
    deadline = time.monotonic() + timeout
    while not is_over():
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), max(left, RETRY_PAUSE)).close()
        except (OSError, UnicodeError) as e:
            if left <= 0:
                return str(e)
            time.sleep(min(RETRY_PAUSE, left))
        else:
            return ""
    return ""
