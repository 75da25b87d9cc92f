"""The dashboard's connections: how many there may be, and how long each may take to ask."""

from __future__ import annotations

import asyncio
import resource
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_TIMEOUT: Final = 10.0  # from the start or the last answer to the end of the next request's head, in seconds
MOST: Final = 256  # connections, or a quarter of the files that the process may open: others need descriptors too


def most_connections() -> int:
    """How many connections there may be at once."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if soft == resource.RLIM_INFINITY else min(MOST, max(4, soft // 4))


def backlog() -> int:
    """How many new connections may wait; asyncio accepts as many at once, before any of them is counted."""
    return most_connections() // 2


class LimitedProtocol(H11Protocol):
    """One connection, in uvicorn; if there are too many, the oldest that waits for a request makes room for it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin, or end at once if there is no room."""
        super().connection_made(transport)
        self.waits_since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._wait()
        if len(self.connections) > most_connections():
            waiting = [one for one in self.connections if isinstance(one, LimitedProtocol) and not one.is_answering]
            oldest = min(waiting, key=lambda one: one.waits_since, default=self)
            self.connections.discard(oldest)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        if self._timer:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._wait()

    @property
    def is_answering(self) -> bool:
        """Whether a request has come whose answer is not complete."""
        return self.cycle is not None and not self.cycle.response_complete

    def _wait(self) -> None:
        if self._timer:
            self._timer.cancel()
        self.waits_since = self.loop.time()
        self._timer = self.loop.call_later(REQUEST_TIMEOUT, self._end_if_silent)

    def _end_if_silent(self) -> None:
        if not self.is_answering:
            self.transport.close()
