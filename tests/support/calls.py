"""Calls to Redis on a connection whose attempts are short, and how long they take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from redelastic.redis.connection import Connection
from redelastic.redis.wire import Client

ATTEMPT = 0.5  # timeout of one attempt, in seconds
SLOW = 3.0  # allowance for a busy machine, in seconds


def opened(url: str, *, attempt: float = ATTEMPT, connect: float = 1.0, read: float = 10.0) -> Connection:
    return Connection.open(url, attempt, read, connect)


@contextmanager
def takes(least: float, most: float) -> Iterator[None]:
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert least <= took <= most + SLOW, f"{took:.2f} s"  # pytest shows no values for a module that is not a test


def increment(client: Client) -> int:
    return int(client.incr("counter"))
