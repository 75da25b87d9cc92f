"""Four clients call one store over a network that loses things.

A client's own keys are compared with a dict, call by call; shared keys, at the end.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Final

import torch.distributed as dist

from redelastic.redis.connection import Connection
from redelastic.store import RedisStore
from tests.support.lossy_network import ATTEMPT_TIMEOUT, CALL_TIMEOUT, LossyNetwork, all_at_once

OPERATIONS: Final = 5_000  # of a batch
CLIENTS: Final = 4
RATE: Final = 0.05  # of requests that meet a fault


class Client:
    """Calls a store at random, and compares every reply about its own keys with a dict."""

    SHARED: Final = 3  # keys of each kind that all clients change

    def __init__(self, me: int, store: RedisStore, random: Random) -> None:
        self.me, self._store, self._random = me, store, random
        self.own: dict[str, bytes] = {}
        self.own_queue: deque[bytes] = deque()
        self.added: defaultdict[str, list[int]] = defaultdict(list)  # replies, by key
        self.appended: defaultdict[str, list[bytes]] = defaultdict(list)
        self.swapped: list[tuple[bytes, bytes]] = []  # (expected, desired), of one key
        self.pushed: defaultdict[str, list[bytes]] = defaultdict(list)
        self.popped: defaultdict[str, list[bytes]] = defaultdict(list)
        self._seen = b""  # the last value seen in that key
        self._calls = 0

    def run(self, calls: int) -> None:
        verbs: list[Callable[[], None]] = [
            *(self._set, self._multi_set, self._get, self._multi_get, self._check, self._delete, self._compare_set),
            *(self._add, self._append, self._push, self._pop, self._pop),
            *(self._add_shared, self._append_shared, *3 * [self._swap_shared], self._push_shared, self._pop_shared),
        ]
        while self._calls < calls:
            if self._calls % 200 == 0:
                self._meet()
            self._calls += 1
            self._random.choice(verbs)()
        self._store.check([])  # completes unacknowledged writes

    def _meet(self) -> None:
        """Meet all clients, then read what the next client writes here."""
        self._store.barrier(f"barrier met {self._calls}", CLIENTS)
        self._store.set(f"{self.me} met {self._calls}", b"here")
        assert self._store.get(f"{(self.me + 1) % CLIENTS} met {self._calls}") == b"here"

    def _key(self) -> str:
        return f"{self.me}/{self._random.randrange(8)}"

    def _value(self) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 8, 8, 8, 60, 60, 9_000, 40_000)))

    def _tag(self) -> bytes:
        """A value that is written only once."""
        return b"%d:%06d;" % (self.me, self._calls)

    def _set(self) -> None:
        key, value = self._key(), self._value()
        self._store.set(key, value)
        self.own[key] = value

    def _multi_set(self) -> None:
        pairs = {self._key(): self._value() for _ in range(3)}
        self._store.multi_set(list(pairs), list(pairs.values()))
        self.own |= pairs

    def _get(self) -> None:
        if self.own:
            key = self._random.choice(sorted(self.own))
            assert self._store.get(key) == self.own[key], key

    def _multi_get(self) -> None:
        assert self._store.multi_get(list(self.own)) == list(self.own.values())

    def _check(self) -> None:
        key = self._key()
        assert self._store.check([key]) == (key in self.own), key

    def _delete(self) -> None:
        key = self._key()
        assert self._store.delete_key(key) == (key in self.own), key
        self.own.pop(key, None)

    def _compare_set(self) -> None:
        key, desired = self._key(), self._tag()
        there = self.own.get(key)
        expected = self._random.choice((there or b"", b"", b"something else"))
        reply = self._store.compare_set(key, expected, desired)
        if (there or b"") == expected:
            self.own[key] = there = desired
        assert reply == (expected if there is None else there), key

    def _add(self) -> None:
        key, amount = f"{self.me}/n", self._random.randint(-9, 9)
        total = int(self.own.get(key, b"0")) + amount
        assert self._store.add(key, amount) == total
        self.own[key] = b"%d" % total

    def _append(self) -> None:
        key, value = self._key(), self._tag()
        self._store.append(key, value)
        self.own[key] = self.own.get(key, b"") + value

    def _push(self) -> None:
        value = self._tag()
        self._store.queue_push(f"{self.me}/queue", value)
        self.own_queue.append(value)

    def _pop(self) -> None:
        assert self._try_pop(f"{self.me}/queue") == (self.own_queue.popleft() if self.own_queue else None)

    def _try_pop(self, key: str) -> bytes | None:
        try:
            return self._store.queue_pop(key, block=False)
        except dist.QueueEmptyError:
            return None

    def _shared(self) -> str:
        return str(self._random.randrange(self.SHARED))

    def _add_shared(self) -> None:
        key = self._shared()
        self.added[key].append(self._store.add(f"sum {key}", 1))

    def _append_shared(self) -> None:
        key, value = f"{self._shared()}/{self._calls // 100}", self._tag()
        self._store.append(f"log {key}", value)
        self.appended[key].append(value)

    def _swap_shared(self) -> None:
        expected, desired = self._seen, self._tag()
        self._seen = self._store.compare_set("swap", expected, desired)
        if self._seen == desired:
            self.swapped.append((expected, desired))

    def _push_shared(self) -> None:
        key, value = self._shared(), self._tag()
        self._store.queue_push(f"queue {key}", value)
        self.pushed[key].append(value)

    def _pop_shared(self) -> None:
        key = self._shared()
        if item := self._try_pop(f"queue {key}"):
            self.popped[key].append(item)


def run_batch(seed: str) -> Counter[str]:
    """A batch of OPERATIONS; returns the faults that it met."""
    with ExitStack() as stack:
        network = LossyNetwork(stack, seed, RATE)
        clients = []
        for me in range(CLIENTS):
            connection = Connection.open(network.url(), ATTEMPT_TIMEOUT, CALL_TIMEOUT, CALL_TIMEOUT)
            stack.callback(connection.close)
            store = RedisStore(connection, "lossy", timeout=CALL_TIMEOUT)
            stack.callback(store.close)
            clients.append(Client(me, store, Random(f"{seed}, calls of {me}")))
        all_at_once(*(partial(client.run, OPERATIONS // CLIENTS) for client in clients))
        direct = RedisStore(network.server.url, "lossy")
        stack.callback(direct.close)
        compare(direct, clients)
        return sum((proxy.happened for proxy in network.proxies), Counter())


def compare(store: RedisStore, clients: list[Client]) -> None:
    """Compare everything in Redis with what the clients know."""
    left = {key: store.get(key) for key in store.list_keys()}
    met = [left.pop(key) for key in list(left) if " met " in key]
    meetings = -(-OPERATIONS // CLIENTS // 200)
    assert Counter(met) == {b"here": CLIENTS * meetings, b"%d" % CLIENTS: meetings, b"1": meetings}
    for client in clients:
        for key, value in client.own.items():
            assert left.pop(key) == value, key
        assert emptied(store, f"{client.me}/queue") == list(client.own_queue)
    swaps = [swap for client in clients for swap in client.swapped]
    follows, value = dict(swaps), b""
    assert len(follows) == len(swaps), "one value was swapped for two others"
    while value in follows:
        value = follows.pop(value)
    assert not follows, "swaps outside the chain of values"
    assert left.pop("swap", b"") == value, "a swap that no client made"
    for key in map(str, range(Client.SHARED)):
        replies = sorted(number for client in clients for number in client.added[key])
        total = int(left.pop(f"sum {key}", b"0"))
        assert replies == list(range(1, total + 1)), f"adds to sum {key}: {len(replies)} of {total}"

        popped = [item for client in clients for item in client.popped[key]]
        pushed = [item for client in clients for item in client.pushed[key]]
        assert sorted(popped + emptied(store, f"queue {key}")) == sorted(pushed), f"queue {key}"
        for taker in clients:
            for maker in clients:
                taken = made_by(maker, taker.popped[key])
                assert taken == sorted(taken), f"{taker.me} got what {maker.me} put into {key} in another order"
    for key in {key for client in clients for key in client.appended}:
        parts = re.findall(rb"[^;]*;", left.pop(f"log {key}"))
        for client in clients:
            assert made_by(client, parts) == client.appended[key], f"log {key}"
    assert not left, f"keys that nobody wrote: {sorted(left)}"


def made_by(client: Client, tags: list[bytes]) -> list[bytes]:
    return [tag for tag in tags if tag.startswith(b"%d:" % client.me)]


def emptied(store: RedisStore, queue: str) -> list[bytes]:
    return [store.queue_pop(queue) for _ in range(store.queue_len(queue))]
