"""Stores for one test, time limits, and calls in threads, for the tests of stores."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support.waiting import Within

SHORT = timedelta(milliseconds=30)
LONG = timedelta(seconds=60)
SOON = 20.0  # limit on a busy machine of what is due at once, in seconds
until = Within(SOON)


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Call a function in a daemon thread: a call that never ends does not hold up the end of the tests."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as e:  # noqa: BLE001
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


@contextlib.contextmanager
def open_store(server: RedisServer, run_id: str, **options: Any) -> Iterator[RedisStore]:
    made = RedisStore(server.url, run_id, **options)
    yield made
    made.close()


@pytest.fixture
def store(server: RedisServer, run_id: str) -> Iterator[RedisStore]:
    with open_store(server, run_id) as made:
        yield made


@pytest.fixture(scope="module")
def shared_tcp_store() -> Any:
    """One store for all tests of a module: without a name server, it may take five seconds to make one."""
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


@pytest.fixture
def tcp_store(shared_tcp_store: Any) -> Any:
    """The shared store, emptied."""
    shared_tcp_store.set_timeout(timedelta(minutes=5))
    for key in shared_tcp_store.list_keys():
        shared_tcp_store.delete_key(key)
    for queue in ("q", "p/q"):
        while shared_tcp_store.queue_len(queue):
            shared_tcp_store.queue_pop(queue)
    return shared_tcp_store
