"""Connections to Redis with known time limits, and a check of how long a call takes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redelastic.redis.connection import Connection
from redelastic.redis.wire import Client

ATTEMPT_TIMEOUT = 0.5  # of one attempt on a server that does not answer, in seconds
LONG_TIMEOUT = 60.0  # of what must not time out on a busy machine, in seconds
ALLOWANCE = 20.0  # for what a busy machine adds, in seconds


def open_connection(url: str, *, attempt: float = LONG_TIMEOUT, connect: float = LONG_TIMEOUT) -> Connection:
    """A connection whose calls are retried for ``LONG_TIMEOUT``, so that a second attempt shows as a second effect."""
    return Connection.open(url, attempt, LONG_TIMEOUT, connect)


@contextmanager
def takes(least: float, most: float) -> Iterator[None]:
    """Check that this block takes between so many seconds, with an allowance for a busy machine."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert least <= took <= most + ALLOWANCE, f"{took:.2f} s"  # pytest explains asserts of tests only


def increment(client: Client) -> int:
    return int(client.incr("counter"))
