"""Waits on a RedisStore: the requests that they send, what wakes them, and when they end."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
import redis
import torch.distributed as dist

from redelastic.redis.connection import Connection
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support import stores
from tests.support.peers import lossy_proxy
from tests.support.servers import frozen
from tests.support.stores import SOON, in_thread, open_store, until

store = stores.store


@contextlib.contextmanager
def patient(server: RedisServer, run_id: str) -> Iterator[RedisStore]:
    """A store whose blocking reads last longer than any pause of the machine."""
    connection = Connection.open(server.url, attempt_timeout=120)
    store = RedisStore(connection, run_id)
    yield store
    store.close()
    connection.close()


def blocked_clients(client: redis.Redis) -> int:
    return int(client.info("clients")["blocked_clients"])


def test_many_threads_block_at_once_on_one_handle(own_server: RedisServer, run_id: str) -> None:
    with patient(own_server, run_id) as store, own_server.get_client() as client:
        waits = [in_thread(store.get, f"k{i % 10}") for i in range(40)]
        until(lambda: blocked_clients(client) == 40)
        store.multi_set([f"k{i}" for i in range(10)], ["v"] * 10)
        assert [wait.result(SOON) for wait in waits] == [b"v"] * 40


def test_a_thousand_waits_leak_no_connection(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        store.set("there", "v")
        for i in range(500):
            store.wait(["there"])
            with pytest.raises(dist.DistStoreError):
                store.wait(["missing"], timedelta(milliseconds=1 if i % 50 == 0 else 0))
        assert len(client.client_list()) <= 3


def test_a_blocked_wait_sends_no_requests(own_server: RedisServer, run_id: str) -> None:
    """A write wakes it; it does not poll."""
    with patient(own_server, run_id) as store, own_server.get_client() as client:
        waiting = in_thread(store.wait, ["k"])
        until(lambda: blocked_clients(client) == 1)
        before = client.info("commandstats")
        for _ in range(50):
            store.check(["other"])
        after = client.info("commandstats")
        asked = {name: stats["calls"] - before.get(name, {"calls": 0})["calls"] for name, stats in after.items()}
        own = {"cmdstat_hexists": 50, "cmdstat_exists": 50, "cmdstat_info": 1, "cmdstat_auth": 1}
        assert {name: calls for name, calls in asked.items() if calls} == own, "only this thread's requests"
        store.set("k", "v")
        waiting.result(SOON)


def test_a_wait_for_existing_keys_runs_no_script(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        store.set("there", "")
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        store.wait(["there"])
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before


def test_a_barrier_costs_one_script_per_member_and_one_wake_up(own_server: RedisServer, run_id: str) -> None:
    with patient(own_server, run_id) as store, own_server.get_client() as client:
        store.barrier("the server learns the script", 1)
        client.config_resetstat()
        waiting = [in_thread(store.barrier, "b", 5) for _ in range(4)]
        until(lambda: blocked_clients(client) == 4)
        store.barrier("b", 5)
        assert [each.result(SOON) for each in waiting] == [None] * 4
        stats = client.info("commandstats")
        scripts_run = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))
        reads = stats["cmdstat_xread"]["calls"]
        assert (scripts_run, stats["cmdstat_xadd"]["calls"], reads) == (5, 1, 4)


@pytest.mark.parametrize(
    ("write", "value"),
    [
        (lambda s: s.set("k", "v"), b"v"),
        (lambda s: s.multi_set(["k", "other", "k"], ["1", "2", "3"]), b"3"),
        (lambda s: s.add("k", -(2**62)), b"%d" % -(2**62)),
        (lambda s: s.append("k", "v"), b"v"),
        (lambda s: s.compare_set("k", "", "v"), b"v"),
        (lambda s: s.barrier("", 1), b"1"),
    ],
    ids=["set", "multi_set", "add", "append", "compare_set", "barrier"],
)
def test_a_wake_up_has_the_value(
    own_server: RedisServer, run_id: str, write: Callable[[RedisStore], None], value: bytes
) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        key = "/last_member" if value == b"1" else "k"
        waiting = in_thread(store.get, key)
        until(lambda: blocked_clients(client) == 1)
        write(store)
        assert waiting.result(SOON) == value
        [(_, entry)] = client.xrange(store._keys.stream(key.encode()))
        assert entry == {b"value": value}


@pytest.mark.parametrize("protocol", [2, 3])
def test_a_waiter_does_not_get_an_earlier_value(own_server: RedisServer, run_id: str, protocol: int) -> None:
    with redis.Redis.from_url(own_server.url, protocol=protocol, socket_timeout=5) as client:
        store = RedisStore(client, run_id)
        for value in (b"old", b"new"):
            waiting = in_thread(store.get, "k")
            until(lambda: blocked_clients(client) == 1)
            store.set("k", value)
            assert waiting.result(SOON) == value
            store.delete_key("k")
        store.close()


def test_a_wait_with_a_timeout_of_0_checks_once(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.wait(["k"], timedelta(0))
        assert "cmdstat_xread" not in client.info("commandstats")


def test_a_barrier_that_all_have_passed_is_open(store: RedisStore) -> None:
    for _ in range(3):
        in_thread(store.barrier, "b", 1).result(SOON)


@pytest.mark.parametrize("what", ["get", "wait", "queue_pop"])
def test_a_wait_survives_the_loss_of_all_data(own_server: RedisServer, run_id: str, what: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        waiting = in_thread(getattr(store, what), ["k"] if what == "wait" else "k")
        until(lambda: blocked_clients(client) == 1)
        client.flushall()
        client.script_flush()
        if what == "queue_pop":
            store.queue_push("k", "v")
        else:
            store.set("k", "v")
        assert waiting.result(SOON) == (None if what == "wait" else b"v")


def test_a_wait_survives_a_restart(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store:
        with own_server.get_client() as client:
            waiting = in_thread(store.get, "k")
            until(lambda: blocked_clients(client) == 1)
        own_server.kill()
        own_server.start()
        store.set("k", "v")
        assert waiting.result(2 * SOON) == b"v"


def test_a_wait_ends_in_time_while_redis_is_away(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store:
        own_server.kill()
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="could not be reached"):
            store.wait(["k"], timedelta(seconds=0.3))
        store.set_timeout(timedelta(seconds=0.3))
        for call in (lambda: store.get("k"), lambda: store.set("k", "v"), lambda: store.add("k", 1)):
            with pytest.raises(dist.DistNetworkError, match="could not be reached"):
                call()
        assert time.monotonic() - started < 2 * SOON


@pytest.mark.parametrize("error", [TimeoutError, ValueError, KeyError])
@pytest.mark.parametrize(
    "call",
    [lambda s: s.get("k"), lambda s: s.wait(["k"]), lambda s: s.barrier("b", 2), lambda s: s.multi_get(["k", "l"])],
    ids=["get", "wait", "barrier", "multi_get"],
)
def test_a_signal_handlers_error_ends_a_wait(
    store: RedisStore, call: Callable[[RedisStore], object], error: type[Exception]
) -> None:
    """Also an error of a type that a lost connection raises, such as TimeoutError from an alarm."""

    def handle(*_: object) -> None:
        raise error("the alarm's")

    before = signal.signal(signal.SIGALRM, handle)
    try:
        store.set("there", "v")
        with pytest.raises(error, match="the alarm's"):  # noqa: PT012  # it may come at once
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            call(store)
        assert store.get("there") == b"v"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_wait_outlasts_the_stores_time_to_live(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id, ttl=0.2) as store:
        store._connection.max_block = 60
        waiting = in_thread(store.get, "k")
        with own_server.get_client() as client:
            until(lambda: blocked_clients(client) == 1)
            time.sleep(0.3)  # longer than the time to live
        store.set("k", "v")
        assert waiting.result(SOON) == b"v"


def test_a_wait_for_a_queue_with_items_writes_nothing(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        store._connection.max_block = 60
        store.queue_push("q", "item")
        client.config_set("maxmemory", 1)
        in_thread(store.wait, ["q"]).result(SOON)
        client.config_set("maxmemory", 0)
        assert store.queue_pop("q") == b"item"


@pytest.mark.parametrize("call", [lambda s: s.get("k"), lambda s: s.multi_get(["k", "k"])], ids=["get", "multi_get"])
def test_a_late_wake_up_leaves_only_the_rest_of_the_timeout(
    own_server: RedisServer, run_id: str, call: Callable[[RedisStore], object]
) -> None:
    """If Redis goes away just then, the next request gets only the time that is left."""
    limits: list[float] = []
    woken = threading.Event()

    class Late(Connection):
        """Its wait ends late, with the answer that the keys are there, and Redis ends with it."""

        def attempt(self, operation: Callable[[Any], Any], timeout: Any = None) -> Any:
            if woken.is_set():
                return super().attempt(operation, timeout)
            woken.set()
            time.sleep(1.5)
            own_server.kill()
            return [0]

        def exchange(self, *commands: Any, timeout: Any = None) -> list[Any]:
            limits.append(timeout() if callable(timeout) else timeout)
            return super().exchange(*commands, timeout=timeout)

    with closing(Late.open(own_server.url)) as connection:
        store = RedisStore(connection, run_id, timeout=timedelta(seconds=2))
        with pytest.raises(dist.DistNetworkError):
            call(store)
        assert woken.is_set()
        assert limits[-1] <= 0.5
        store.set_timeout(timedelta(0))
        store.close()


@pytest.mark.parametrize("call", ["get", "wait", "barrier"])
def test_a_frozen_server_gets_no_attempt_after_the_timeout(own_server: RedisServer, run_id: str, call: str) -> None:
    with lossy_proxy(own_server) as (url, loss):
        store = RedisStore(Connection.open(url, attempt_timeout=0.5), run_id)
        store.barrier("b", 1)
        store.set_timeout(timedelta(seconds=0.2))
        loss.proxy.sent.clear()
        with frozen(own_server), pytest.raises(dist.DistNetworkError):
            getattr(store, call)(*{"get": ("k",), "wait": (["k"],), "barrier": ("c", 2)}[call])
        assert len(loss.proxy.sent) == 1
        store.close()


def test_an_item_wakes_only_the_longest_waiter(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        store._connection.max_block = 60
        pops: list[Future[bytes]] = []
        for _ in range(10):
            pops.append(in_thread(store.queue_pop, "q"))
            until(lambda: blocked_clients(client) == len(pops))
        client.config_resetstat()
        for i, pop in enumerate(pops):
            store.queue_push("q", b"%d" % i)
            assert pop.result(SOON) == b"%d" % i
        stats = client.info("commandstats")
        assert sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha")) <= 21


def test_items_are_not_kept_for_dead_waiters(own_server: RedisServer, run_id: str) -> None:
    with (
        open_store(own_server, run_id) as store,
        open_store(own_server, run_id) as dead,
        own_server.get_client() as client,
    ):
        dead.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            dead.queue_pop("q")
        assert client.zcard(store._keys.poppers(b"q")) == 0
        client.zadd(store._keys.poppers(b"q"), {"long gone": 1, "just killed": 2})
        client.zadd(store._keys.waits, {"just killed": 2**52})
        pop = in_thread(store.queue_pop, "q")
        until(lambda: blocked_clients(client) == 1)
        store.queue_push("q", "item")
        assert pop.result(SOON) == b"item"
