"""RedisStore alone: its errors, and how long its keys and connections live."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import redis
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from redelastic.redis.connection import Connection
from redelastic.redis.errors import FencedError, RedelasticError, UnavailableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore, RoundBrokenError
from redelastic.store import redis_store as store_module
from redelastic.store.requests import REPEATABLE
from tests.support import stores
from tests.support.calls import takes
from tests.support.peers import peer, speak_http
from tests.support.servers import HOST, reserved_port
from tests.support.stores import SHORT, SOON, in_thread, open_store, until

store = stores.store


def test_all_keys_have_a_time_to_live(client: redis.Redis, server: RedisServer, run_id: str) -> None:
    with open_store(server, run_id, ttl=100) as store:
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
        assert all(0 < client.ttl(name) <= (REPEATABLE if b":dedup:" in name else 100) for name in names)
        client.expire(RunKeys(run_id).store("default").base, 5)
        store.set("k", "w")
        assert client.ttl(RunKeys(run_id).store("default").base) > 90


def test_stores_of_other_names_and_runs_are_apart(server: RedisServer, run_id: str, store: RedisStore) -> None:
    store.set("k", "v")
    for options in ({"name": "other"}, {"epoch": 1}, {"key_prefix": "other"}):
        with open_store(server, run_id, **options) as other:
            assert not other.check(["k"])
    with open_store(server, run_id + "x") as other:
        assert not other.check(["k"])
    with open_store(server, run_id, name="1") as named, open_store(server, run_id, epoch=1) as of_round:
        named.set("k", "v")
        assert not of_round.check(["k"])
    with open_store(server, run_id) as same:
        assert same.get("k") == b"v"


@pytest.mark.parametrize(
    ("suffix", "type_of_ours", "call"),
    [
        ("", "hash", lambda s: s.get("k")),
        ("", "hash", lambda s: s.set("k", "v")),
        ("", "hash", lambda s: s.num_keys()),
        ("", "hash", lambda s: s.check(["k"])),
        (":waits", "zset", lambda s: s.get("k")),
        (":waits", "zset", lambda s: s.set("k", "v")),
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


def test_connecting_takes_no_longer_than_the_stores_timeout() -> None:
    with reserved_port() as port, takes(0.5, 2), pytest.raises(RendezvousConnectionError, match="could not be reached"):
        RedisStore(f"redis://{HOST}:{port}", "r", timeout=0.5)


def test_a_store_that_cannot_connect_raises_torchs_error(run_id: str) -> None:
    with peer(speak_http) as http, pytest.raises(RendezvousConnectionError, match="is not Redis") as raised:
        RedisStore(f"127.0.0.1:{http.port}", run_id)
    assert type(raised.value.__cause__) is UnavailableError


@pytest.mark.parametrize("key", ["0//cpu//0/3", "0//cuda//0", "default_pg/0//cpu//0/12"])
def test_the_addresses_of_a_process_group_are_written_once(store: RedisStore, key: str) -> None:
    view = store.prefixed("p")
    for each in (store, view):
        each.set(key, "here")
        with pytest.raises(dist.DistStoreError, match="give each start"):
            each.set(key, "elsewhere")
        assert each.get(key) == b"here"


@pytest.mark.parametrize("key", ["0//cpu//1/0", "10//cpu//0/0", "0//1//cpu//0/0", "0//cpu//0/last"])
def test_other_keys_are_written_again(store: RedisStore, key: str) -> None:
    store.set(key, "a")
    store.set(key, "b")
    assert store.get(key) == b"b"


def test_groups_of_a_round_may_write_their_addresses_again(server: RedisServer, run_id: str) -> None:
    with open_store(server, run_id, epoch=1) as store:
        for value in ("a", "b"):
            store.set("0//cpu//0/0", value)
        assert store.get("0//cpu//0/0") == b"b"


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
    value = bytes(range(256)) * (16_000_000 // 256)
    store.set("big", value)
    assert store.get("big") == value
    assert store.compare_set("big", value, value[::-1]) == value[::-1]
    store.append("big", b"tail")
    store.queue_push("q", value)
    assert store.queue_pop("q") == value
    assert store.multi_get(["big"]) == [value[::-1] + b"tail"]


def test_requests_too_large_for_redis_are_refused(store: RedisStore) -> None:
    """Redis would close the connection, and the store repeat the request until its timeout."""
    for call in (lambda: store.set("k", bytes(2**29 + 1)), lambda: store.append("k", bytes(2**29 + 1))):
        with pytest.raises(ValueError, match="at most 536,870,912 bytes, not 536,870,913: split it"):
            call()
    half = bytes(2**28 + 1)
    with pytest.raises(ValueError, match="multi_set takes at most 536,870,912 bytes at once"):
        store.multi_set(["k", "l"], [half, half])
    many = ["k"] * (2**18 + 1)
    for verb in (store.multi_get, store.wait, store.check):
        with pytest.raises(ValueError, match="at most 262,144 keys, not 262,145: split it"):
            verb(many)
    assert not store.check(["k"])


def test_as_many_keys_as_allowed(server: RedisServer, run_id: str) -> None:
    """With longer attempts: the script that looks for all of them takes a second of a core that Redis has to itself."""
    with contextlib.closing(Connection.open(server.url, attempt_timeout=100)) as connection:
        store = RedisStore(connection, run_id)
        keys = [f"k{i}" for i in range(2**18)]
        store.multi_set(keys, keys)
        store.wait(keys)
        assert store.multi_get(keys)[-1] == keys[-1].encode()
        store.close()


def test_append_to_a_long_value_is_refused(store: RedisStore) -> None:
    """Redis would serve no other client for seconds."""
    value = bytes(2**24 - 1)
    store.set("k", value)
    with pytest.raises(ValueError, match=r"would have 16,777,217 bytes, and at most 16,777,216 .* several keys"):
        store.append("k", "xy")
    store.append("k", "x")
    assert store.get("k") == value + b"x"


def test_ten_thousand_keys(store: RedisStore) -> None:
    keys = [f"k{i}" for i in range(10_000)]
    got = in_thread(store.multi_get, keys)
    store.multi_set(keys, [key.upper() for key in keys])
    assert got.result(SOON) == [key.upper().encode() for key in keys]
    assert store.num_keys() == len(store.list_keys()) == 10_000
    assert store.check(keys)
    store.wait(keys, SHORT)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "{x}", "*", "x" * 201])
def test_a_name_that_cannot_be_part_of_a_key_is_refused(server: RedisServer, run_id: str, name: str) -> None:
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


def test_a_store_that_only_torch_refers_to_stays_alive(connection: Connection, run_id: str) -> None:
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
    """The error may come later: Redis looks for clients whose time is up only ten times a second."""
    limit = timedelta(milliseconds=milliseconds)
    clone = store.clone()
    clone.set_timeout(limit)
    clone.set("there", "v")
    calls: tuple[Callable[[], object], ...] = (
        lambda: clone.get("missing"),
        lambda: clone.multi_get(["there", "missing"]),
        lambda: clone.queue_pop("missing"),
        lambda: store.wait(["missing"], limit),
        lambda: store.wait(["there", "missing"], limit),
    )
    for call in calls:
        with pytest.raises(
            dist.DistStoreError, match=rf"wait timeout after {milliseconds}ms, keys: (/there, )?/missing of "
        ):
            call()


def test_timeouts_and_numbers_may_be_of_other_types(server: RedisServer, run_id: str) -> None:
    """TCPStore takes them too."""
    with open_store(server, run_id) as store:
        with pytest.raises(dist.DistStoreError):
            store.wait(["missing"], 0.05)
        with pytest.raises(dist.DistStoreError):
            store.barrier("b", 2, 0.05)
        assert store.add("n", np.int64(2)) == 2
        with pytest.raises(TypeError):
            store.add("n", 2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("ttl", [0, -1, 0.0001, float("inf"), float("nan")])
def test_a_ttl_that_keeps_nothing_is_refused(server: RedisServer, run_id: str, ttl: float) -> None:
    with pytest.raises(ValueError, match=r"ttl=.* is out of range"), open_store(server, run_id, ttl=ttl):
        pass


def test_an_error_has_the_one_below_as_its_cause(own_server: RedisServer, run_id: str) -> None:
    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        for call in (lambda: store.barrier("b", 2, SHORT), lambda: store.wait(["k"], SHORT)):
            with pytest.raises(dist.DistStoreError, match="timeout") as caught:
                call()
            assert caught.value.__cause__ is None
        client.hset(store._keys.data, mapping={"n": "text", "b/num_members": "text"})
        for add in (lambda: store.add("n", 1), lambda: store.barrier("b", 2, SHORT)):
            with pytest.raises(ValueError, match="Cannot add 1") as wrong:
                add()
            assert isinstance(wrong.value.__cause__, dist.DistStoreError)
            assert isinstance(wrong.value.__cause__.__cause__, RedelasticError)
        client.hset(RunKeys(run_id).run, "epoch", 4)
        with open_store(own_server, run_id, epoch=3) as round_store:
            with pytest.raises(RoundBrokenError) as broken:
                round_store.add("n", 1)
            assert isinstance(broken.value.__cause__, FencedError)


class Held:
    """An object that a caller refers to while the server does not know a script."""


def test_a_server_without_its_scripts_keeps_no_request_alive(own_server: RedisServer, run_id: str) -> None:
    def call(store: RedisStore) -> weakref.ref[Held]:
        held = Held()
        store.add("n", 1)
        return weakref.ref(held)

    with open_store(own_server, run_id) as store, own_server.get_client() as client:
        call(store)
        client.script_flush()
        gc.disable()
        try:
            assert call(store)() is None
        finally:
            gc.enable()


# -- what Redis keeps of requests that may be repeated, and of waits


def test_data_for_repeated_requests_are_kept_for_minutes_only(
    client: redis.Redis, server: RedisServer, run_id: str
) -> None:
    """They go when the item arrives, with `close`, or after minutes: each write renews the store, but not them."""
    keys = RunKeys(run_id).store("default")
    with open_store(server, run_id) as store, open_store(server, run_id) as other:
        store.queue_push("q", bytes(100_000))
        other.queue_pop("q")
        kept = client.keys(f"{keys.base}:[dr]e*")
        assert sum(client.memory_usage(key) or 0 for key in kept) < 1000
        assert all(0 < client.ttl(key) <= REPEATABLE for key in kept)
        store.prefixed("p").set("k", "v")
        assert len(client.keys(keys.dedup(b"*"))) == 3
    assert client.keys(f"{keys.base}*") == [keys.data.encode()]


def test_waits_that_timed_out_are_forgotten(client: redis.Redis, store: RedisStore) -> None:
    waits = store._keys.waits
    for i in range(20):
        with pytest.raises(dist.DistStoreError):
            store.wait([f"missing{i}"], 0)
    assert 0 < client.pttl(waits) <= 60_000
    client.zadd(waits, {f"missing{i}": 1 for i in range(20)})
    for i in range(2):
        with pytest.raises(dist.DistStoreError):
            store.wait([f"also missing{i}"], 0)
    assert client.zcard(waits) == 2
