"""RedisStore in several processes at once: forked, spawned, and called from threads not created by Python."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
import torch.distributed as dist

from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support.long_tests import quick_first

# Python 3.12 warns of forks in processes with threads: that such forks are safe here is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")

LIMIT = 60.0  # seconds for a child's part
ROUNDS = 150


@pytest.fixture
def store(server: RedisServer, run_id: str) -> Iterator[RedisStore]:
    made = RedisStore(server.url, run_id, timeout=LIMIT)
    yield made
    made.close()


class Forked:
    """Runs a function in a forked child, and hands back what it returns."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            signal.alarm(int(LIMIT))  # a child that hangs ends
            try:
                result: Any = function(*args)
            except BaseException as e:  # noqa: BLE001
                result = e
            with os.fdopen(write, "wb") as pipe:
                pipe.write(pickle.dumps(result))
            os._exit(0)
        os.close(write)

    def result(self) -> Any:
        with os.fdopen(self._read, "rb") as pipe:
            data = pipe.read()
        os.waitpid(self.pid, 0)
        assert data, "the child ended without a result"
        result = pickle.loads(data)  # noqa: S301
        if isinstance(result, BaseException):
            raise result
        return result


def connection_id(store: RedisStore) -> int:
    return int(store._connection.call(lambda client: client.client_id()))


def work(store: RedisStore, name: str) -> tuple[int, list[int]]:
    """Use own keys, to notice a reply meant for another process; returns the connection's id and the adds' replies."""
    numbers = []
    for i in range(ROUNDS):
        store.set(f"{name}/{i}", f"{name}={i}")
        numbers.append(store.add("shared", 1))
        assert store.get(f"{name}/{i}") == f"{name}={i}".encode()
        store.queue_push(f"{name}/queue", f"{name}={i}")
        assert store.queue_pop(f"{name}/queue") == f"{name}={i}".encode()
    return connection_id(store), numbers


def check_apart(results: list[tuple[int, list[int]]]) -> None:
    ids, numbers = zip(*results, strict=True)
    assert len(set(ids)) == len(results), "two processes use one connection"
    assert sorted(n for each in numbers for n in each) == list(range(1, ROUNDS * len(results) + 1))


def test_forked_children_share_no_connection_with_their_parent(store: RedisStore) -> None:
    store.set("warm", "up")
    store.add("other", 1)  # so that there is a connection, and a sender, to inherit
    children = [Forked(work, store, f"child{i}") for i in range(2)]
    own = work(store, "parent")
    check_apart([own, *(child.result() for child in children)])


def test_a_grandchild_shares_no_connection_with_its_parents(store: RedisStore) -> None:
    store.add("other", 1)

    def child() -> list[tuple[int, list[int]]]:
        store.add("other", 1)
        grandchild = Forked(work, store, "grandchild")
        return [work(store, "child"), grandchild.result()]

    forked = Forked(child)
    check_apart([work(store, "parent"), *forked.result()])


def test_a_fork_while_threads_are_blocked_and_busy(store: RedisStore, client: redis.Redis) -> None:
    """The child uses no lock and no connection that another thread holds at the fork."""
    got: dict[str, bytes] = {}
    stop = threading.Event()

    def busy() -> None:
        while not stop.is_set():
            store.add("busy", 1)

    def wait(key: str) -> None:
        got[key] = store.get(key)

    threads = [threading.Thread(target=wait, args=(f"k{i}",)) for i in range(3)]
    threads += [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    waits = RunKeys(store._run.run_id).store("default").waits
    deadline = time.monotonic() + LIMIT
    while client.zcard(waits) < 3:
        assert time.monotonic() < deadline

    def child(i: int) -> tuple[int, list[int]]:
        result = work(store, f"child{i}")
        store.set(f"k{i}", f"from child {i}")
        return result

    results = [Forked(child, i).result() for i in range(3)]
    stop.set()
    for thread in threads:
        thread.join(LIMIT)
    assert got == {f"k{i}": f"from child {i}".encode() for i in range(3)}
    check_apart(results)


def test_a_child_waits_for_its_parent_and_the_parent_for_its_child(store: RedisStore) -> None:
    def child() -> bytes:
        asked = store.get("from parent")
        store.set("from child", asked + b"!")
        store.wait(["done"], timedelta(seconds=LIMIT))
        return asked

    forked = Forked(child)
    store.set("from parent", "ping")
    assert store.get("from child") == b"ping!"
    store.set("done", "")
    assert forked.result() == b"ping"


def test_a_prefix_store_in_a_forked_child(store: RedisStore) -> None:
    """In the child, torch calls the store's Python methods from C++."""
    prefixed = dist.PrefixStore("p", store.prefixed("v"))
    prefixed.set("k", "v")
    forked = Forked(lambda: (prefixed.get("k"), prefixed.add("n", 1), connection_id(store)))
    value, number, its_connection = forked.result()
    assert (value, number, prefixed.add("n", 1)) == (b"v", 1, 2)
    assert its_connection != connection_id(store)


def _multiprocessing_child(url: str, run_id: str, inherited: RedisStore | None, name: str, results: Any) -> None:
    store = inherited or RedisStore(url, run_id, timeout=LIMIT)
    results.put(work(store, name))


@pytest.mark.parametrize("method", quick_first(["fork", "spawn"]))  # a spawned process imports torch, for 3 s
def test_children_of_multiprocessing(store: RedisStore, server: RedisServer, run_id: str, method: Any) -> None:
    context: Any = multiprocessing.get_context(method)
    results = context.Queue()
    store.add("other", 1)
    inherited = store if method == "fork" else None
    children = [
        context.Process(target=_multiprocessing_child, args=(server.url, run_id, inherited, f"child{i}", results))
        for i in range(2)
    ]
    for child in children:
        child.start()
    own = work(store, "parent")
    check_apart([own, *(results.get(timeout=LIMIT) for _ in children)])
    for child in children:
        child.join(LIMIT)
        assert child.exitcode == 0


def native_thread(function: Callable[[], None]) -> Callable[[], None]:
    """Start a thread that Python does not know of, like torch's; returns a function that joins it."""
    pthread = ctypes.CDLL(None)
    entry = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: function())
    thread = ctypes.c_ulong()
    assert pthread.pthread_create(ctypes.byref(thread), None, entry, None) == 0

    def join() -> None:
        assert pthread.pthread_join(thread, None) == 0
        assert entry  # kept until the thread has ended

    return join


def test_threads_that_python_did_not_create(store: RedisStore, client: redis.Redis, run_id: str) -> None:
    """For Python each call of such a thread is a new thread, so nothing may be kept per thread."""
    prefixed: Any = dist.PrefixStore("p", store)
    numbers: list[int] = []
    got: list[bytes] = []
    waiting = native_thread(lambda: got.append(prefixed.get("awaited")))
    for _ in range(100):
        native_thread(lambda: numbers.append(prefixed.add("n", 1)))()
    at_once = [native_thread(lambda: numbers.append(prefixed.add("n", 1))) for _ in range(8)]
    for join in at_once:
        join()
    prefixed.set("awaited", "v")
    waiting()
    assert sorted(numbers) == list(range(1, 109))
    assert got == [b"v"]
    kept = client.keys(RunKeys(run_id).store("default").dedup(b"*"))
    assert len(kept) <= 10, "one entry per concurrent writer"
