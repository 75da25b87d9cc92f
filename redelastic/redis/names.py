"""Look-ups of host names: each takes a bounded time, and falls back on the last known addresses."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, TypeAlias

from .interrupts import Latch

Addresses: TypeAlias = "Sequence[tuple[int, int, int, str, Any]]"  # as socket.getaddrinfo returns them
_Place: TypeAlias = "tuple[str, int]"

LOOKUP_TIMEOUT: Final = 1.0  # in seconds, after which known addresses are used although the look-up still runs


def look_up(host: str, port: int, timeout: float) -> Addresses:
    """Find the addresses of a host for a TCP connection.

    The C library gives up a silent name server after half a minute, so each look-up runs in a thread of its own;
    callers that ask meanwhile share it.

    Args:
        host: a name, or an address, which needs no look-up.
        port: of the addresses.
        timeout: how long to wait for the name server, in seconds; at most ``LOOKUP_TIMEOUT`` if addresses are known
            from an earlier look-up.

    Returns:
        The addresses as :func:`socket.getaddrinfo` orders them; the last known ones if the look-up fails or takes too
        long.

    Raises:
        OSError: the look-up failed, and no addresses are known.
    """
    with suppress(socket.gaierror):
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    place = host, port
    running = _running.get(place)
    if running is None or running.done.is_set():
        running = _LookUp(place)
        running.start()
        _running[place] = running
    known = _known.get(place)
    running.done.wait(running.started + LOOKUP_TIMEOUT - time.monotonic() if known else timeout)
    if running.found:
        return running.found
    if known:
        return known
    raise running.error or socket.gaierror(socket.EAI_AGAIN, f"The name server did not answer within {timeout:g} s")


class _LookUp:
    """A look-up in a thread of its own; ``done`` is set once it has ended."""

    def __init__(self, place: _Place) -> None:
        self.place, self.started, self.done = place, time.monotonic(), Latch()
        self.found: Addresses = []
        self.error: OSError | None = None

    def start(self) -> None:
        try:
            threading.Thread(target=self._run, name="redelastic-look-up", daemon=True).start()
        except RuntimeError as e:  # this process can start no more threads
            self.error = OSError(str(e))
            self.done.set()

    def _run(self) -> None:
        try:
            host, port = self.place
            self.found = _known[self.place] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as e:
            self.error = OSError(*e.args) if isinstance(e, UnicodeError) else e
        finally:
            self.done.set()


_known: Final[dict[_Place, Addresses]] = {}
_running: Final[dict[_Place, _LookUp]] = {}
os.register_at_fork(after_in_child=_running.clear)  # the threads are the parent's
