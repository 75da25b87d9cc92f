"""Values that go past Lua, in a transaction: atomic, fenced, waking, and written once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import test_line
import test_store as contract
import torch.distributed as dist

from redelastic.redis.client import DirectClient, packed_uncopied
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore, RoundBrokenError, requests
from tests.support import stores
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.job_user import as_user_of
from tests.support.nodes import NodeFactory
from tests.support.stores import LONG, SOON, in_thread, opened, until

store, proxy, unlucky = stores.store, test_line.proxy, test_line.unlucky
OLD, NEW, NEWER = (part * 100_000 for part in (b"old", b"new", b"newer"))


class TestAllAreLarge(contract.TestRedisStore):
    """Whatever is set goes through a transaction."""

    @pytest.fixture
    def store(self, server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setattr(requests, "LARGE", 0)
        with opened(server, run_id) as made:
            yield made


class TestAllAreLargeAndUnacknowledged(contract.TestRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
        monkeypatch.setattr(requests, "LARGE", 3)
        with opened(server, run_id, acknowledge=False) as made:
            yield made


def calls_of(client: redis.Redis, command: str) -> int:
    return int(client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


def test_a_large_value_is_no_argument_of_a_script(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.set("small", "v" * (requests.LARGE - 1))
        assert calls_of(client, "exec") == 0
        store.set("large", "v" * requests.LARGE)
        store.multi_set(["small", "large"], [b"v", NEW])
        assert (store.multi_get(["small", "large"]), calls_of(client, "exec")) == ([b"v", NEW], 3)


@pytest.mark.parametrize("words", [[b"HSET"], [b"HSET", b"", b"x" * 9, b"y" * 10, b"z" * 11, b"\r\n"], [b"x" * 10] * 3])
def test_a_command_in_parts_is_that_command(words: list[bytes]) -> None:
    parts = packed_uncopied(words, 10)
    assert b"".join(parts) == b"".join(packed_uncopied(words, 1000))
    assert [part for part in parts if part in words] == [word for word in words if len(word) >= 10]


@pytest.mark.parametrize("keep", [0, 3, 30, -10], ids=["no reply", "a part of it", "more of it", "most of it"])
def test_a_lost_reply_has_one_effect(unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, keep: int) -> None:
    unlucky.set("k", OLD)
    fault = proxy.add(Fault(b"MULTI", keep=keep))
    unlucky.set("k", NEW)
    assert fault.fired.is_set()
    assert store.get("k") == NEW


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The transactions that were sent."""
    transactions: list[Any] = []
    plain = DirectClient.transact

    def transact(self: DirectClient, commands: Any) -> Any:
        transactions.append(commands)
        return plain(self, commands)

    monkeypatch.setattr(DirectClient, "transact", transact)
    return transactions


def again(store: RedisStore, transaction: Any) -> None:
    """As a copy that was on its way for long."""
    client: Any = store._connection.client
    client.transact(transaction)


@pytest.mark.parametrize("later", [False, True], ids=["the last request", "after others"])
@pytest.mark.parametrize("meanwhile", [NEWER, b"small", None], ids=["large", "small", "deleted"])
def test_a_late_copy_has_no_effect(
    store: RedisStore, client: redis.Redis, sent: list[Any], later: bool, meanwhile: bytes | None
) -> None:
    store.multi_set(["k", "other"], [OLD, b"v"])
    store.multi_set(["k", "other"], [NEW, b"w"])
    if later:
        store.set("something else", "v")
    somebody = RedisStore(client, store._run.run_id)
    somebody.set("k", meanwhile) if meanwhile is not None else somebody.delete_key("k")
    before = client.hgetall(store._keys.data), client.hgetall(store._keys.once)
    if later:
        with pytest.raises(Exception, match="late copy"):
            again(store, sent[1])
    else:
        again(store, sent[1])
    assert (client.hgetall(store._keys.data), client.hgetall(store._keys.once)) == before
    somebody.close()


def test_nothing_is_written_to_a_superseded_round(
    new_node: NodeFactory, server: RedisServer, client: redis.Redis, run_id: str
) -> None:
    nodes = [new_node(1, 2), new_node(1, 2)]
    for info in [in_thread(node.next_rendezvous) for node in nodes]:
        info.result(SOON)
    with opened(server, run_id, epoch=1) as old:
        old.set("k", OLD)
        nodes[0].membership.leave("test")
        nodes[1].next_rendezvous()
        before = client.hgetall(old._keys.data), client.hgetall(old._keys.once)
        writes: tuple[Callable[[], None], ...] = (
            lambda: old.set("k", NEW),
            lambda: old.set("absent", NEW),
            lambda: old.multi_set(["k", "absent"], [NEW, b"small"]),
        )
        for write in writes:
            with pytest.raises(RoundBrokenError, match="round 1 is over: the run is at epoch 2"):
                write()
            assert (client.hgetall(old._keys.data), client.hgetall(old._keys.once)) == before


def test_a_full_server_keeps_the_old_value(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.set("k", OLD)
        client.config_set("maxmemory", 1)
        with pytest.raises(dist.DistNetworkError, match="out of memory"):
            store.set("k", NEW)
        client.config_set("maxmemory", 0)
        assert store.get("k") == OLD
        store.set("k", NEW)
        assert store.get("k") == NEW


def test_no_reader_sees_what_a_late_copy_wrote(server: RedisServer, run_id: str, sent: list[Any]) -> None:
    stop = threading.Event()
    with opened(server, run_id) as store, opened(server, run_id) as reader:
        store.set("k", OLD)
        store.set("k", NEW)

        def read() -> set[bytes]:
            seen = set()
            while not stop.is_set():
                seen.add(reader.get("k"))
            return seen

        reading = in_thread(read)
        for _ in range(100):
            with pytest.raises(Exception, match="late copy"):
                again(store, sent[0])
        stop.set()
        assert reading.result(LONG.total_seconds()) == {NEW}


def test_whoever_waits_is_woken_and_reads_it(
    server: RedisServer, client: redis.Redis, store: RedisStore, run_id: str
) -> None:
    with opened(server, run_id) as other:
        waiting = in_thread(other.get, "k")
        until(lambda: bool(store._call(lambda client: client.exists(store._keys.waits))))
        store.set("k", NEW)
        assert waiting.result(SOON) == NEW
        assert client.xlen(store._keys.stream(b"k")) == 1, "it would look again after a while"


def test_a_user_who_may_not_use_transactions_writes_by_script(every_server: RedisServer, run_id: str) -> None:
    with opened(as_user_of(every_server, run_id), run_id) as store, every_server.get_client() as admin:  # type: ignore[arg-type]
        before = calls_of(admin, "exec")
        store.set("k", NEW)
        assert (store.get("k"), calls_of(admin, "exec")) == (NEW, before)


@pytest.mark.parametrize("rules", [["-multi"], ["-exec"], ["-multi", "-exec"]])
@pytest.mark.parametrize("known", [False, True], ids=["at first", "after it had been allowed"])
def test_a_user_who_may_use_only_a_part_or_no_more_writes_by_script(
    every_server: RedisServer, run_id: str, rules: list[str], known: bool
) -> None:
    user = as_user_of(every_server, run_id, "+multi", "+exec")
    with opened(user, run_id) as store, opened(every_server, run_id) as other:  # type: ignore[arg-type]
        if known:
            store.set("k", OLD)
            assert store._connection.transacts
        as_user_of(every_server, run_id, "+multi", "+exec", *rules)
        store.set("k", NEW)
        assert store._connection.transacts is False
        other.set("k", OLD)
        store.multi_set(["k", "other"], [NEWER, OLD])
        assert store.multi_get(["k", "other"]) == other.multi_get(["k", "other"]) == [NEWER, OLD]


@pytest.mark.parametrize("renamed", ["MULTI", "EXEC"])
def test_a_server_without_transactions_is_written_to_by_script(renamed: str, run_id: str) -> None:
    with RedisServer() as server:
        server._config["rename-command"] = f'{renamed} ""'
        server.stop()
        server.start()
        with opened(server, run_id) as store:
            store.set("k", NEW)
            assert store.get("k") == NEW


def test_no_more_is_queued_than_a_server_takes(
    own_server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MOST_QUEUED", 2 * len(NEW))
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.set("k", NEW)
        before = calls_of(client, "exec")
        store.multi_set(["k", "other"], [OLD, NEW])
        assert (store.multi_get(["k", "other"]), calls_of(client, "exec")) == ([OLD, NEW], before)


def test_what_another_program_has_there_is_told_and_stays(client: redis.Redis, store: RedisStore) -> None:
    store.set("small", "v")
    once = client.hgetall(store._keys.once)
    client.set(store._keys.data, "not ours", ex=60)
    with pytest.raises(dist.DistStoreError, match="is a string, but a run needs a hash"):
        store.set("k", NEW)
    assert (client.get(store._keys.data), client.hgetall(store._keys.once)) == (b"not ours", once)


def test_each_version_of_the_server_takes_it(every_server: RedisServer, run_id: str) -> None:
    with opened(every_server, run_id) as store:
        store.set("k", OLD)
        store.multi_set(["k", "other"], [NEW, b"v"])
        assert store.multi_get(["k", "other"]) == [NEW, b"v"]
