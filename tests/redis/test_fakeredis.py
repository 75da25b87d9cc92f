"""Clients other than redis-py's own: users test their code on fakeredis, which has its own Lua."""

from __future__ import annotations

import fakeredis
import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous import RendezvousParameters

from redelastic import RedisRendezvousBackend, RedisStore, create_handler


@pytest.fixture
def fake() -> fakeredis.FakeRedis:
    return fakeredis.FakeRedis(socket_timeout=5)


def test_a_store(fake: fakeredis.FakeRedis) -> None:
    store = RedisStore(fake, "job", timeout=0.2)
    store.set("key", "value")
    assert store.get("key") == b"value"
    assert [store.add("n", 2), store.add("n", 3)] == [2, 5]
    store.queue_push("queue", "item")
    assert store.queue_pop("queue") == b"item"
    with pytest.raises(DistStoreError, match="wait timeout"):
        store.get("missing")


def test_a_backend(fake: fakeredis.FakeRedis) -> None:
    backend = RedisRendezvousBackend(fake, "job")
    first = backend.set_state(b"one")
    assert first is not None
    assert backend.set_state(b"two") == (b"one", first[1], False)


def test_a_rendezvous_of_one(fake: fakeredis.FakeRedis) -> None:
    params = RendezvousParameters("redis", "", "job", 1, 1)
    handler = create_handler(RedisRendezvousBackend(fake, "job"), params)
    info = handler.next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)
    assert handler.shutdown()
