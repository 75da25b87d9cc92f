"""Calls to Redis, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redelastic.redis.connection import Connection
from redelastic.redis.wire import Client

ATTEMPT_TIMEOUT = 0.5  # timeout of one attempt on a server that gives no answer, in seconds
LONG_TIMEOUT = 60.0  # of anything that a busy machine should not end, in seconds
ALLOWANCE = 20.0  # allowance for a busy machine, in seconds


def open_connection(url: str, *, attempt: float = LONG_TIMEOUT, connect: float = LONG_TIMEOUT) -> Connection:
    """A connection whose calls are retried for ``LONG``; one that is attempted twice may have two effects."""
    return Connection.open(url, attempt, LONG_TIMEOUT, connect)


@contextmanager
def takes(least: float, most: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert least <= took <= most + ALLOWANCE, f"{took:.2f} s"  # pytest shows no values for a module that is not a test


def increment(client: Client) -> int:
    return int(client.incr("counter"))
