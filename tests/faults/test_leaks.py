"""Closed handlers and stores leave nothing behind: no thread, file, connection or memory here, no key in Redis.

REDELASTIC_LONG=1 makes a thousand of each, and ten thousand stores of rounds.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import logging
import re
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
import redis
from torch.distributed.elastic.rendezvous import RendezvousParameters

from redelastic.redis.connection import Connection
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler, handler_from_parameters
from redelastic.store.redis_store import RedisStore, _alive
from tests.support.fault_matrix import Measured
from tests.support.long_tests import LONG
from tests.support.servers import wait_until

TIMES: Final = 1000 if LONG else 40
ROUNDS: Final = 10_000 if LONG else 200
TTL: Final = 4.0
LEFT: Final = "no thread, file, connection, memory or key is left"

pytestmark = pytest.mark.timeout(600 if LONG else 180)


def memory() -> int:
    """Resident memory of this process, in bytes, without its allocator's reserve."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    found = re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return 1024 * int(found.group(1))


Repeat = Callable[..., None]


@pytest.fixture
def repeat(own_server: RedisServer, measured: Measured) -> Iterator[Repeat]:
    """Does something many times, and asserts that it leaves nothing; afterwards, that Redis is empty after the TTL.

    The first quarter of the calls fills caches and may leave something. What is kept in only one of the last two is no
    leak either, such as another thread's or a new connection's.
    """
    logging.disable(logging.WARNING)  # pytest would keep each record
    with own_server.get_client() as client:

        def run(once: Callable[[int], object], times: int, keepers: int = 0) -> None:
            first, *others = (range(start, start + times // 4) for start in range(0, times, times // 4))
            for i in first:
                once(i)
            before, stores, resident = settled(client, keepers), len(_alive), memory()
            tracemalloc.start()
            try:
                held = []
                for quarter in others:
                    for i in quarter:
                        once(i)
                    held.append(traced(client, keepers))
            finally:
                tracemalloc.stop()
            after = settled(client, keepers)
            opened, closed = after - before, before - after  # an earlier test's files may have been closed by now
            assert opened["connections"] == closed["connections"] == 0, "connections"
            if keepers:  # a node that lives on may have replaced a connection
                opened, closed = kinds(opened), kinds(closed)
                opened -= closed
            assert not opened, "open files"
            assert len(_alive) == stores
            kept, grown = min(later - sooner for sooner, later in itertools.pairwise(held)), memory() - resident
            measured("Python memory kept by each", kept / len(first), "B")
            measured("resident memory kept by each", grown / (times - len(first)), "B")
            assert kept < 100 * len(first) + 13_000, "less than one small object each"
            assert grown < 1000 * (times - len(first)) + 8e6

        yield run
        wait_until(lambda: client.dbsize() == 0, "every key is gone after the TTL", TTL + 30)
    logging.disable(logging.NOTSET)


def settled(client: redis.Redis, keepers: int) -> Counter[str]:
    """Open files of this process and connections of the server, once all threads but `keepers` have ended.

    A thread that serves a bootstrap store may still resolve a name: 5 s and more, where a name server loses queries.
    """
    gc.collect()
    names = "redelastic-bootstrap", "redelastic-keepalive"
    wait_until(lambda: sum(t.name.startswith(names) for t in threading.enumerate()) == keepers, "threads end", 90)
    gc.collect()
    found = Counter({"connections": int(client.info("clients")["connected_clients"])})
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            found[str(link.readlink())] += 1  # the name of a socket or pipe has its number
    return found


def kinds(files: Counter[str]) -> Counter[str]:
    """Open files by their names without numbers, so that all sockets are of one kind."""
    found = Counter[str]()
    for name, count in files.items():
        found[re.sub(r"\d+", "", name)] += count
    return found


def traced(client: redis.Redis, keepers: int) -> int:
    """Memory that Python has allocated since tracing began, in bytes."""
    settled(client, keepers)
    return tracemalloc.get_traced_memory()[0]


def new_node(server: RedisServer, run_id: str) -> RedisRendezvousHandler:
    params = RendezvousParameters("redis", server.url, run_id, 1, 1, ttl=TTL, keep_alive_interval=0.5)
    node = handler_from_parameters(params)
    assert isinstance(node, RedisRendezvousHandler)
    return node


@pytest.mark.fault("handlers are made, joined and shut down, many times", LEFT)
def test_handlers(own_server: RedisServer, repeat: Repeat, run_id: str) -> None:
    def once(i: int) -> None:
        node = new_node(own_server, f"{run_id}-{i}")
        assert node.next_rendezvous().world_size == 1
        node.shutdown()

    repeat(once, TIMES)


@pytest.mark.fault("stores are made, used and closed, many times", LEFT)
def test_stores(own_server: RedisServer, repeat: Repeat, run_id: str) -> None:
    def once(i: int) -> None:
        store = RedisStore(own_server.url, run_id, f"store-{i}", ttl=TTL)
        store.set("key", "value")
        assert store.clone().prefixed("p").check(["key"]) is False
        store.close()

    repeat(once, TIMES)


@pytest.mark.fault("a connection serves the stores of many rounds", LEFT)
def test_stores_of_rounds(own_server: RedisServer, repeat: Repeat, run_id: str) -> None:
    connection = Connection.open(own_server.url)

    def once(i: int) -> None:
        store = RedisStore(connection, run_id, epoch=i + 1, ttl=TTL)
        store.set("key", "value")
        assert store.add("number", 1) == 1
        store.close()

    repeat(once, ROUNDS)
    connection.close()


@pytest.mark.fault("a node goes through very many rounds", LEFT)
def test_rounds(own_server: RedisServer, repeat: Repeat, run_id: str) -> None:
    """The node lives on meanwhile, so its keeper's thread and connection are there before and after."""
    node = new_node(own_server, run_id)

    def once(i: int) -> None:
        assert node.next_rendezvous().world_size == 1
        assert node.node.view.epoch_held == i + 1

    try:
        repeat(once, TIMES, keepers=1)
    finally:
        node.shutdown()
