"""RedisStore against the contract of torch's own stores: the same tests on HashStore, TCPStore and RedisStore."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
import torch.distributed as dist

from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support import stores
from tests.support.store_contract import HashContract, RedisContract, TCPContract
from tests.support.stores import open_store

shared_tcp_store, tcp_store = stores.shared_tcp_store, stores.tcp_store


class TestHashStore(HashContract):
    @pytest.fixture
    def store(self) -> Any:
        return dist.HashStore()


class TestTCPStore(TCPContract):
    @pytest.fixture
    def store(self, tcp_store: Any) -> Any:
        return tcp_store


class TestRedisStore(RedisContract):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with open_store(server, run_id) as made:
            yield made


class TestRedisStoreOfAClient(RedisContract):
    """Made with a plain redis-py client, with its own retries, pool and protocol."""

    @pytest.fixture
    def store(self, client: redis.Redis, run_id: str) -> Iterator[Any]:
        made = RedisStore(client, run_id)
        yield made
        made.close()
