"""The life of a run on any kind of server: two rounds, every verb of the store, and the close."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import DistStoreError, QueueEmptyError
from torch.distributed.elastic.rendezvous import RendezvousClosedError, RendezvousInfo, RendezvousParameters

from redelastic import RedisStore, create_backend, create_handler
from redelastic.rendezvous.handler import RedisRendezvousHandler


def make_node(url: str, run_id: str, low: int, high: int, **config: Any) -> RedisRendezvousHandler:
    times = {"last_call_timeout": 0.2, "join_timeout": 30, "keep_alive_interval": 0.3, "heartbeat_timeout": 1}
    params = RendezvousParameters("redis", url, run_id, low, high, **(times | config))
    backend, store = create_backend(params)
    store.close()
    handler = create_handler(backend, params)
    assert isinstance(handler, RedisRendezvousHandler)
    return handler


@contextmanager
def nodes(url: str, run_id: str, count: int, **config: Any) -> Iterator[list[RedisRendezvousHandler]]:
    """Make so many nodes, and shut them down at the end of the block."""
    made: list[RedisRendezvousHandler] = []
    try:
        for _ in range(count):
            made.append(make_node(url, run_id, count, count, **config))  # noqa: PERF401  # if one fails, the others are shut down
        yield made
    finally:
        for node in made:
            node.shutdown()


def rendezvous(members: Sequence[RedisRendezvousHandler]) -> list[RendezvousInfo]:
    """Have nodes form a round, and check their ranks."""
    with ThreadPoolExecutor(len(members)) as pool:
        infos = list(pool.map(lambda node: node.next_rendezvous(), members))
    assert sorted(info.rank for info in infos) == list(range(len(members)))
    assert {info.world_size for info in infos} == {len(members)}
    return infos


def use_store(store: RedisStore, other: RedisStore) -> None:
    """Call every verb of a store; the other one wakes calls that block."""
    with ThreadPoolExecutor(1) as pool:
        getting = pool.submit(store.get, "late")
        other.set("late", "value")
        assert getting.result(10) == b"value"
        waiting = pool.submit(store.wait, ["late", "later"], timedelta(seconds=10))
        other.multi_set(["later", "x"], ["1", "2"])
        waiting.result(10)
        popping = pool.submit(store.queue_pop, "queue")
        other.queue_push("queue", b"item")
        assert popping.result(10) == b"item"
    assert store.multi_get(["later", "x"]) == [b"1", b"2"]
    assert [store.add("n", 2), other.add("n", 3)] == [2, 5]
    store.append("text", "a")
    other.append("text", "b")
    assert store.get("text") == b"ab"
    assert store.compare_set("text", "ab", "c") == b"c"
    assert (store.check(["text", "n"]), store.check(["none"])) == (True, False)
    assert store.delete_key("text") is True
    assert store.num_keys() == len(store.list_keys()) == 4
    assert store.queue_len("queue") == 0
    with pytest.raises(QueueEmptyError):
        store.queue_pop("queue", block=False)
    with pytest.raises(DistStoreError, match="wait timeout after"):
        store.wait(["none"], timedelta(seconds=0.05))


def live_through_a_run(url: str, run_id: str, count: int, **config: Any) -> None:
    """Form two rounds, use the store of the second one and the backend, and close the run."""
    with nodes(url, run_id, count, **config) as members:
        rendezvous(members)
        assert [node.num_nodes_waiting() for node in members] == [0] * count
        infos = rendezvous(members)
        one, other = infos[0].store, infos[-1].store
        assert isinstance(one, RedisStore)
        assert isinstance(other, RedisStore)
        use_store(one, other)
        backend = members[0].backend
        first = backend.set_state(b"state")
        assert first is not None
        assert backend.get_state() == first[:2]
        members[0].set_closed()
        assert all(node.is_closed() for node in members)
        for node in members:
            with pytest.raises(RendezvousClosedError):
                node.next_rendezvous()
