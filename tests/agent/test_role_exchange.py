"""Agents exchange their roles, whatever a failover loses of the exchange and whenever it comes (I9)."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import pytest
from torch.distributed import DistStoreError

from redelastic.redis.connection import Connection
from redelastic.store import RedisStore
from redelastic.store.exchange import Exchange


@pytest.fixture
def store(connection: Connection, run_id: str) -> RedisStore:
    return RedisStore(connection, run_id, timeout=timedelta(seconds=30))


def impatient(store: RedisStore) -> Exchange:
    """An exchange that looks five times a second whether its values are still there."""
    timeout = store.timeout
    store.set_timeout(timedelta(seconds=0.2))  # a reader waits no longer than the store
    made = Exchange(store)
    store.set_timeout(timeout)
    return made


def test_roles_that_are_lost_before_the_wait_are_sent_again(store: RedisStore) -> None:
    exchange = impatient(store)
    exchange.multi_set(["a", "b"], ["1", "2"])
    store.delete_key("a")
    store.delete_key("b")
    assert exchange.multi_get(["a", "b"]) == [b"1", b"2"]


def test_roles_that_are_lost_between_wait_and_read_are_sent_again(connection: Connection, run_id: str) -> None:
    lost: list[bool] = []

    class Late(RedisStore):
        """A store that loses a value just before its first read."""

        def clone(self) -> RedisStore:
            return Late(connection, run_id)

        def multi_get(self, keys: Sequence[str | bytes]) -> list[bytes]:
            if not lost:
                lost.append(self.delete_key("a"))
            return super().multi_get(keys)

    exchange = impatient(Late(connection, run_id, timeout=timedelta(seconds=30)))
    exchange.set("a", "1")
    assert exchange.get("a") == b"1"
    assert lost == [True]


def test_an_exchange_that_stays_incomplete_is_an_error(store: RedisStore) -> None:
    store.set_timeout(timedelta(seconds=0.5))
    said = r"^Not all agents reported within 0.5 s; the last wait timeout after \d+ms, keys: /a, /b of "
    with pytest.raises(DistStoreError, match=said):
        Exchange(store).multi_get(["a", "b"])
