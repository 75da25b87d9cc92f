"""RedisStore alone: waiting asks nothing, errors are named, and how long its keys and connections live."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import redis
import stores
import torch.distributed as dist
from stores import SHORT, SOON, in_thread, opened, until

from redelastic.redis.client import DirectClient
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from redelastic.store import redis_store as store_module

store = stores.store


def blocked_clients(client: redis.Redis) -> int:
    return int(client.info("clients")["blocked_clients"])


def test_many_threads_block_at_once_on_one_handle(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waits = [in_thread(store.get, f"k{i % 10}") for i in range(40)]
        until(lambda: blocked_clients(client) == 40)
        store.multi_set([f"k{i}" for i in range(10)], ["v"] * 10)
        assert [wait.result(SOON) for wait in waits] == [b"v"] * 40


def test_a_thousand_waits_leak_no_connection(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.set("there", "v")
        for i in range(500):
            store.wait(["there"])
            with pytest.raises(dist.DistStoreError):
                store.wait(["missing"], timedelta(milliseconds=1 if i % 50 == 0 else 0))
        assert len(client.client_list()) <= 3


def test_a_blocked_wait_asks_nothing(own_server: RedisServer, run_id: str) -> None:
    """It is woken; it does not poll."""
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waiting = in_thread(store.wait, ["k"])
        until(lambda: blocked_clients(client) == 1)
        before = client.info("commandstats")
        for _ in range(50):
            store.check(["other"])
        after = client.info("commandstats")
        asked = {name: stats["calls"] - before.get(name, {"calls": 0})["calls"] for name, stats in after.items()}
        own = {"cmdstat_hexists": 50, "cmdstat_exists": 50, "cmdstat_info": 1, "cmdstat_auth": 1}
        assert {name: calls for name, calls in asked.items() if calls} == own, "only this thread's own"
        store.set("k", "v")
        waiting.result(SOON)


def test_a_wait_for_what_is_there_runs_no_script(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.set("there", "")
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        store.wait(["there"])
        assert client.info("commandstats")["cmdstat_evalsha"]["calls"] == before


def test_a_barrier_is_one_script_for_each_and_one_wake_up_for_all(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waiting = [in_thread(store.barrier, "b", 5) for _ in range(4)]
        until(lambda: blocked_clients(client) == 4)
        store.barrier("b", 5)
        assert [each.result(SOON) for each in waiting] == [None] * 4
        stats = client.info("commandstats")
        scripts_run = sum(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))
        reads = stats["cmdstat_xread"]["calls"]  # each along with a script
        assert (scripts_run, stats["cmdstat_xadd"]["calls"], reads) == (5, 1, 5)


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
def test_who_is_woken_is_told_the_value(
    own_server: RedisServer, run_id: str, write: Callable[[RedisStore], None], value: bytes
) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        key = "/last_member" if value == b"1" else "k"
        waiting = in_thread(store.get, key)
        until(lambda: blocked_clients(client) == 1)
        write(store)
        assert waiting.result(SOON) == value
        [(_, told)] = client.xrange(store._keys.stream(key.encode()))
        assert told == {b"value": value}


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("kind", [DirectClient, redis.Redis])
def test_who_waits_is_not_told_what_was_set_before(
    own_server: RedisServer, run_id: str, protocol: int, kind: type[redis.Redis]
) -> None:
    with kind.from_url(own_server.url, protocol=protocol, socket_timeout=5) as client:
        store = RedisStore(client, run_id)
        for value in (b"old", b"new"):
            waiting = in_thread(store.get, "k")
            until(lambda: blocked_clients(client) == 1)
            store.set("k", value)
            assert waiting.result(SOON) == value
            store.delete_key("k")
        store.close()


def test_a_wait_ends_at_once_for_a_key_that_came_after_the_first_look(store: RedisStore) -> None:
    store.set("k", "v")
    for _ in range(2):  # the second one finds what ended the first
        started = time.monotonic()
        in_thread(store._await, [b"k"], "wait", started, 60).result(SOON)
        assert time.monotonic() - started < 1


def test_a_wait_for_a_queue_with_items_needs_no_memory(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.queue_push("q", "item")
        client.config_set("maxmemory", 1)
        started = time.monotonic()
        store.wait(["q"], timedelta(seconds=60))
        assert time.monotonic() - started < 3


def test_what_ends_one_wait_at_once_ends_no_other(own_server: RedisServer, run_id: str) -> None:
    """One caller looks when the key is there; another one blocks on its stream, since it was deleted meanwhile."""
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waiting = in_thread(store.wait, ["k"])
        until(lambda: blocked_clients(client) == 1)
        client.xadd(store._keys.stream(b"k"), {"over": 1})
        until(lambda: client.info("commandstats")["cmdstat_xread"]["calls"] == 2 and blocked_clients(client) == 1)
        store.set("k", "v")
        waiting.result(SOON)


def test_a_wait_without_time_looks_once(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.wait(["k"], timedelta(0))
        assert "cmdstat_xread" not in client.info("commandstats")


def test_a_barrier_that_all_have_passed_is_open(store: RedisStore) -> None:
    for _ in range(3):
        started = time.monotonic()
        in_thread(store.barrier, "b", 1).result(SOON)
        assert time.monotonic() - started < 1


def test_a_waits_own_time_out_holds_without_a_server(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id, timeout=600) as store:
        store.set("there", "v")
        own_server.kill()
        with pytest.raises(dist.DistNetworkError, match="could not be reached"):
            in_thread(store.wait, ["there"], timedelta(seconds=0.2)).result(SOON)


@pytest.mark.parametrize("what", ["get", "wait", "queue_pop"])
def test_a_wait_survives_the_loss_of_all_data(own_server: RedisServer, run_id: str, what: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
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
    with opened(own_server, run_id) as store:
        with own_server.get_client() as client:
            waiting = in_thread(store.get, "k")
            until(lambda: blocked_clients(client) == 1)
        own_server.kill()
        own_server.start()
        store.set("k", "v")
        assert waiting.result(2 * SOON) == b"v"


def test_a_wait_ends_in_time_while_redis_is_away(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store:
        own_server.kill()
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="could not be reached"):
            store.wait(["k"], timedelta(seconds=0.3))
        store.set_timeout(timedelta(seconds=0.3))
        for call in (lambda: store.get("k"), lambda: store.set("k", "v"), lambda: store.add("k", 1)):
            with pytest.raises(dist.DistNetworkError, match="could not be reached"):
                call()
        assert time.monotonic() - started < 2 * SOON


def test_all_keys_have_a_time_to_live(client: redis.Redis, server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, ttl=100) as store:
        store.set_timeout(SHORT)
        for miss in (lambda: store.get("missing"), lambda: store.queue_pop("missing")):
            with pytest.raises(dist.DistStoreError):
                miss()
        with pytest.raises(dist.QueueEmptyError):
            store.prefixed("p").queue_pop("q", block=False)
        pops = in_thread(store.clone().queue_pop, "woken")
        store.set("k", "v")
        store.append("k", "v")
        store.add("n", 1)
        store.compare_set("c", "", "v")
        store.queue_push("q", "v")
        store.queue_push("woken", "v")
        with contextlib.suppress(dist.DistStoreError):
            pops.result(SOON)
        store.delete_key("n")
        names = list(client.scan_iter(f"*{run_id}*"))
        assert len(names) >= 4
        assert all(0 < client.ttl(name) <= 100 for name in names)
        client.expire(RunKeys(run_id).store("default").base, 5)
        store.set("k", "w")
        assert client.ttl(RunKeys(run_id).store("default").base) > 90


def test_stores_of_other_names_and_runs_are_apart(server: RedisServer, run_id: str, store: RedisStore) -> None:
    store.set("k", "v")
    for options in ({"name": "other"}, {"epoch": 1}, {"key_prefix": "other"}):
        with opened(server, run_id, **options) as other:
            assert not other.check(["k"])
    with opened(server, run_id + "x") as other:
        assert not other.check(["k"])
    with opened(server, run_id) as same:
        assert same.get("k") == b"v"


@pytest.mark.parametrize(
    ("suffix", "type_of_ours", "call"),
    [
        ("", "hash", lambda s: s.get("k")),
        ("", "hash", lambda s: s.set("k", "v")),
        ("", "hash", lambda s: s.num_keys()),
        ("", "hash", lambda s: s.check(["k"])),
        (":waits", "hash", lambda s: s.get("k")),
        (":waits", "hash", lambda s: s.set("k", "v")),
        (":once", "hash", lambda s: s.add("k", 1)),
        (":wake:k", "stream", lambda s: s.get("k")),
        (":queue:k", "list", lambda s: s.queue_push("k", "v")),
        (":queue:k", "list", lambda s: s.queue_pop("k")),
        (":queue:k", "list", lambda s: s.queue_len("k")),
    ],
)
def test_a_key_of_a_wrong_type_is_named(
    client: redis.Redis, store: RedisStore, suffix: str, type_of_ours: str, call: Callable[[RedisStore], Any]
) -> None:
    base = store._keys.base
    client.set(base + suffix, "not ours", ex=60)
    with pytest.raises(dist.DistStoreError, match="is a string, but a run needs a") as caught:
        call(store)
    assert f"'{base}{suffix}'" in str(caught.value)
    assert f"needs a {type_of_ours}" in str(caught.value)
    assert client.get(base + suffix) == b"not ours"


@pytest.mark.parametrize("text", ["no number", "1.5", str(2**63), "", " 1"])
def test_add_to_a_corrupt_number_names_the_key(store: RedisStore, text: str) -> None:
    store.set("the-key", text)
    with pytest.raises(ValueError, match="the-key"):
        store.add("the-key", 1)
    assert store.get("the-key") == text.encode()


def test_add_past_64_bits_changes_nothing(store: RedisStore) -> None:
    store.add("n", 2**63 - 1)
    with pytest.raises(ValueError, match="overflow"):
        store.add("n", 1)
    assert store.get("n") == str(2**63 - 1).encode()


def test_a_value_of_16_megabytes(store: RedisStore) -> None:
    value = bytes(range(256)) * (16 * 2**20 // 256)
    store.set("big", value)
    assert store.get("big") == value
    assert store.compare_set("big", value, value[::-1]) == value[::-1]
    store.append("big", b"tail")
    store.queue_push("q", value)
    assert store.queue_pop("q") == value
    assert store.multi_get(["big"]) == [value[::-1] + b"tail"]


def test_what_redis_would_hang_up_on_is_refused(store: RedisStore) -> None:
    """Sent, it would be tried again and again until the store's timeout."""
    for call in (lambda: store.set("k", bytes(2**29 + 1)), lambda: store.append("k", bytes(2**29 + 1))):
        with pytest.raises(ValueError, match="at most 536,870,912 bytes, not 536,870,913: split it"):
            call()
    assert not store.check(["k"])


def test_ten_thousand_keys(store: RedisStore) -> None:
    keys = [f"k{i}" for i in range(10_000)]
    got = in_thread(store.multi_get, keys)
    store.multi_set(keys, [key.upper() for key in keys])
    assert got.result(SOON) == [key.upper().encode() for key in keys]
    assert store.num_keys() == len(store.list_keys()) == 10_000
    assert store.check(keys)
    store.wait(keys, SHORT)


def test_a_client_that_decodes_is_refused(server: RedisServer, run_id: str) -> None:
    with server.get_client(decode_responses=True) as client, pytest.raises(ValueError, match="decode_responses=True"):
        RedisStore(client, run_id)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "{x}", "*", "x" * 201])
def test_a_name_that_is_no_part_of_a_key_is_refused(server: RedisServer, run_id: str, name: str) -> None:
    with server.get_client() as client, pytest.raises(ValueError, match="store name"):
        RedisStore(client, run_id, name)


# -- how long a store lives


def test_a_closed_store_may_be_collected(connection: Connection, run_id: str) -> None:
    store = RedisStore(connection, run_id)
    gone = weakref.ref(store)
    store.close()
    del store
    gc.collect()
    assert gone() is None


def test_a_store_that_only_torch_knows_stays_alive(connection: Connection, run_id: str) -> None:
    prefixed: Any = dist.PrefixStore("p", RedisStore(connection, run_id))
    copy = prefixed.clone()
    view = dist.PrefixStore("p", RedisStore(connection, run_id).prefixed("v"))
    gc.collect()
    prefixed.set("k", "v")
    view.set("k", "w")
    assert (copy.get("k"), view.get("k")) == (b"v", b"w")
    underlying = copy.underlying_store
    assert isinstance(underlying, RedisStore)
    for store in [each for each in store_module._alive if each._run.run_id == run_id]:
        store.close()


def test_closing_ends_the_connections_of_a_store_that_opened_them(own_server: RedisServer, run_id: str) -> None:
    with own_server.get_client() as client:
        store = RedisStore(own_server.url, run_id)
        store.set("k", "v")
        assert len(client.client_list()) == 2
        store.close()
        until(lambda: len(client.client_list()) == 1)


@pytest.mark.parametrize("milliseconds", [1, 70])
def test_a_time_out_names_the_limit_that_was_asked_for(store: RedisStore, milliseconds: int) -> None:
    """However much later it comes: Redis looks for clients whose time is up ten times a second."""
    limit = timedelta(milliseconds=milliseconds)
    mine = store.clone()
    mine.set_timeout(limit)
    mine.set("there", "v")
    calls: tuple[Callable[[], object], ...] = (
        lambda: mine.get("missing"),
        lambda: mine.multi_get(["there", "missing"]),
        lambda: mine.queue_pop("missing"),
        lambda: store.wait(["missing"], limit),
        lambda: store.wait(["there", "missing"], limit),
    )
    for call in calls:
        with pytest.raises(dist.DistStoreError, match=rf"wait timeout after {milliseconds}ms, keys: .*missing"):
            call()


def test_timeouts_and_numbers_may_be_of_other_types(server: RedisServer, run_id: str) -> None:
    """TCPStore takes them too."""
    with opened(server, run_id) as store:
        with pytest.raises(dist.DistStoreError):
            store.wait(["missing"], 0.05)
        with pytest.raises(dist.DistStoreError):
            store.barrier("b", 2, 0.05)
        assert store.add("n", np.int64(2)) == 2
        with pytest.raises(TypeError):
            store.add("n", 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl", [0, -1, 0.0001, float("inf"), float("nan")])
def test_a_ttl_that_keeps_nothing_is_refused(server: RedisServer, run_id: str, ttl: float) -> None:
    with pytest.raises(ValueError, match=r"ttl=.* is out of range"), opened(server, run_id, ttl=ttl):
        pass


def test_a_store_that_cannot_be_closed_in_order_is_closed(own_server: RedisServer, run_id: str) -> None:
    store = RedisStore(own_server.url, run_id, timeout=0.1, acknowledge=False)
    views = [store.prefixed(f"{i}") for i in range(3)]
    store.set("k", "v")
    assert store.get("k") == b"v"
    assert own_server.pid
    os.kill(own_server.pid, signal.SIGSTOP)
    store.set("k", "w")
    own_server.kill()
    with pytest.raises(dist.DistNetworkError):
        store.close()
    assert not any(one in store_module._alive for one in (store, *views))
    assert store._line is not None
    assert not store._line.under_way
