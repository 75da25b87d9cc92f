"""Stores under a prefix, RedisStore's own and torch's PrefixStore, against the contract of `test_store.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import stores
import test_store as contract
import torch.distributed as dist
from stores import opened

from redelastic.redis.server import RedisServer

shared_tcp_store, tcp_store = stores.shared_tcp_store, stores.tcp_store


class TestRedisStorePrefixed(contract.TestRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            made.set("outside", "v")
            yield made.prefixed("outer").prefixed(b"inner")

    def test_prefixes_stand_before_the_keys(self, server: RedisServer, run_id: str) -> None:
        with opened(server, run_id) as made:
            view = made.prefixed("outer").prefixed("inner")
            view.set("k", "v")
            view.queue_push("q", "item")
            assert made.list_keys() == ["outer/inner/k"]
            assert made.queue_len("outer/inner/q") == 1
            assert dist.PrefixStore("inner", dist.PrefixStore("outer", made)).get("k") == b"v", "as in torch's own"
            assert (made.prefixed("other").num_keys(), view.num_keys()) == (0, 1)


class TestPrefixStoreOfHashStore(contract.TestHashStore):
    @pytest.fixture
    def store(self) -> Any:
        return dist.PrefixStore("p", dist.HashStore())


class TestPrefixStoreOfTCPStore(contract.TestTCPStore):
    @pytest.fixture
    def store(self, tcp_store: Any) -> Any:
        return dist.PrefixStore("p", tcp_store)


class TestPrefixStoreOfRedisStore(contract.TestRedisStore):
    queues = lists_keys = False

    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            yield dist.PrefixStore("p", made)


class TestNestedPrefixStores(TestPrefixStoreOfRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            yield dist.PrefixStore("inner", dist.PrefixStore("outer", made.prefixed("own")))
