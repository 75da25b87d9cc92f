"""Stores under a prefix, RedisStore's own and torch's PrefixStore, against the contract of torch's stores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from redelastic.redis.server import RedisServer
from tests.support import stores
from tests.support.store_contract import NEEDS_BARRIER, HashContract, RedisContract, TCPContract
from tests.support.stores import LONG, SHORT, SOON, in_thread, open_store, until

shared_tcp_store, tcp_store = stores.shared_tcp_store, stores.tcp_store


class TestRedisStorePrefixed(RedisContract):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with open_store(server, run_id) as made:
            made.set("outside", "v")
            yield made.prefixed("outer").prefixed(b"inner")

    def test_prefixes_stand_before_the_keys(self, server: RedisServer, run_id: str) -> None:
        with open_store(server, run_id) as made:
            view = made.prefixed("outer").prefixed("inner")
            view.set("k", "v")
            view.queue_push("q", "item")
            assert made.list_keys() == ["outer/inner/k"]
            assert made.queue_len("outer/inner/q") == 1
            assert dist.PrefixStore("inner", dist.PrefixStore("outer", made)).get("k") == b"v", "as in torch's own"
            assert (made.prefixed("other").num_keys(), view.num_keys()) == (0, 1)


@NEEDS_BARRIER
def test_a_barrier_is_met_through_any_prefix(server: RedisServer, run_id: str) -> None:
    """torch's own view calls add, set and wait."""
    with open_store(server, run_id) as made:
        view: Any = dist.PrefixStore("p", made)
        meeting = [in_thread(each.barrier, "b", 4, LONG) for each in (view, made.prefixed("p"), view)]
        until(lambda: made.check(["p/b/num_members"]) and made.get("p/b/num_members") == b"3")
        assert not any(each.done() for each in meeting)
        made.barrier("p/b", 4, LONG)
        assert [each.result(SOON) for each in meeting] == [None] * 3
        made.barrier("p/b", 4, SHORT)  # a late caller passes, as in torch's


class TestPrefixStoreOfHashStore(HashContract):
    @pytest.fixture
    def store(self) -> Any:
        return dist.PrefixStore("p", dist.HashStore())


class TestPrefixStoreOfTCPStore(TCPContract):
    @pytest.fixture
    def store(self, tcp_store: Any) -> Any:
        return dist.PrefixStore("p", tcp_store)


class TestPrefixStoreOfRedisStore(RedisContract):
    queues = lists_keys = False

    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with open_store(server, run_id) as made:
            yield dist.PrefixStore("p", made)


class TestNestedPrefixStores(TestPrefixStoreOfRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with open_store(server, run_id) as made:
            yield dist.PrefixStore("inner", dist.PrefixStore("outer", made.prefixed("own")))
