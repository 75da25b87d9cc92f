"""Rounds of a run over a network that loses things, compared with the oracle.

The oracle replays every request that reached Redis, copies and late ones too, in the order in which Redis ran them: the
run's record, events included, has to be the oracle's.
"""

from __future__ import annotations

import re
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any, Final

from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from redelastic.monitoring.events import Left
from redelastic.redis import scripts
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler, handler_from_parameters
from redelastic.store import RedisStore, RoundBrokenError
from tests.proofs.oracle import apply
from tests.proofs.oracle_state import NOTHING, Beat, Join, Known, Leave, Request, Settings, State
from tests.proofs.twin import Server, stored
from tests.support.lossy_network import ATTEMPT_TIMEOUT, CALL_TIMEOUT, LossyNetwork, address_of, all_at_once

ROUNDS: Final = 10  # of a batch
RATE: Final = 0.1  # of requests that meet a fault


class Monitor:
    """All commands that a server runs, in order."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._socket = socket.create_connection(address_of(server))
        self._socket.sendall(f"AUTH {server.password}\r\nMONITOR\r\n".encode())
        self._file = self._socket.makefile("rb")
        assert [self._file.readline() for _ in range(2)] == [b"+OK\r\n"] * 2
        self._lines: list[bytes] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._end = uuid.uuid4().hex.encode()
        self._reader.start()

    def _read(self) -> None:
        for line in self._file:
            if self._end in line:
                return
            self._lines.append(line)

    def commands(self) -> Iterator[list[str]]:
        """Words of each command so far, including commands of scripts; ends the monitor."""
        with self._server.get_client() as client:
            client.echo(self._end)
        self._reader.join(CALL_TIMEOUT)
        assert not self._reader.is_alive()
        self._socket.close()
        for line in self._lines:
            words = re.findall(rb'"((?:[^"\\]|\\.)*)"', line)
            yield [word.decode("unicode_escape") for word in words]


def replayed(monitor: Monitor, keys: RunKeys) -> State:
    """The oracle's state after all requests that reached Redis; each script's clock is read from what it writes."""
    verbs: dict[str, type[Request]] = {
        scripts.JOIN.digest: Join,
        scripts.BEAT.digest: Beat,
        scripts.LEAVE.digest: Leave,
    }
    state, now = State(), 0
    request: Request | None = None
    for words in monitor.commands():
        if words[0] == "EVALSHA" and words[1] in verbs:
            if request:
                state, _ = apply(state, now, request)
            request = parsed(verbs[words[1]], words[3 + int(words[2]) :])
        elif words[:2] == ["HSET", keys.run] and "beat_at" in words:
            now = int(words[words.index("beat_at") + 1])
    assert request
    return apply(state, now, request)[0]


def parsed(kind: type[Request], args: list[str]) -> Request:
    """A request in the oracle's types; `twin.Server.apply` does the reverse."""
    node, _status, *rest = args
    n, m = len(Settings._fields), len(Settings._fields) + len(Known._fields)
    settings = Settings(*map(int, rest[:n]))
    values: list[Any] = [
        int(text) if isinstance(default, int) else text for default, text in zip(NOTHING, rest[n:m], strict=True)
    ]
    known = Known(*values)
    if kind is Beat:
        return Beat(node, settings, known)
    if kind is Leave:
        run_then, *fields = rest[m:]
        return Leave(node, tuple(fields), run_then, settings, known)  # type: ignore[arg-type]
    after, endpoint, label, *admission = rest[m:]
    return Join(node, int(after), endpoint, label, settings, known, *map(int, admission))


def run_batch(seed: str) -> Counter[str]:
    """A batch of ROUNDS of one run; now and then a node leaves while the others regroup, and a new one joins."""
    random, keys = Random(seed), RunKeys("lossy")
    n = random.randint(2, 5)
    with ExitStack() as stack:
        network = LossyNetwork(stack, seed, RATE)
        monitor = Monitor(network.server)

        def new_node() -> RedisRendezvousHandler:
            url = network.url()
            config: dict[str, Any] = {
                "keep_alive_interval": 0.5,
                "keep_alive_max_attempt": 60,
                "join_timeout": CALL_TIMEOUT,
            }
            config |= {
                "read_timeout": CALL_TIMEOUT,
                "close_timeout": CALL_TIMEOUT,
                "heartbeat_timeout": ATTEMPT_TIMEOUT,
            }
            node = handler_from_parameters(RendezvousParameters("redis", url, keys.run_id, n, n, **config))
            assert isinstance(node, RedisRendezvousHandler)
            return node

        nodes, before = [new_node() for _ in range(n)], None
        for epoch in range(1, ROUNDS + 1):
            leaving, leaves = random.randrange(n), epoch > 1 and random.random() < 0.3
            last: list[Callable[[], Any]] = []
            if leaves:
                last.append(partial(nodes[leaving].end, Left(cause="drained"), "goes on", CALL_TIMEOUT))
                nodes[leaving] = new_node()
            infos = all_at_once(*(node.next_rendezvous for node in nodes), *last)[:n]
            agreed(infos, n, epoch)
            all_at_once(*(partial(exchange, info) for info in infos))
            if before is not None:
                refused(before)
            before = infos[0].store
        closed = all_at_once(*(node.shutdown for node in nodes))
        assert all(closed)

        network.close()  # a late heartbeat would be in Redis, and not in the monitor's record
        state = replayed(monitor, keys)
        assert (state.epoch, state.size, state.members) == (ROUNDS, n, set())
        with network.server.get_client() as client:
            oracle = Server(client)
            oracle.keys = keys
            found, expected = oracle.stored(), stored(state)
            differ = {name: (found[name], expected[name]) for name in found if found[name] != expected[name]}
            assert not {name: pair for name, pair in differ.items() if name != "left"}, f"Redis, oracle: {differ}"
            assert {client.get(keys.status(node)) for node in state.left} == {b"left"}
        return sum((proxy.happened for proxy in network.proxies), Counter())


def agreed(infos: list[RendezvousInfo], n: int, epoch: int) -> None:
    assert sorted(info.rank for info in infos) == list(range(n)), "ranks are no permutation"
    assert {info.world_size for info in infos} == {n}
    assert {info.store._epoch for info in infos if isinstance(info.store, RedisStore)} == {epoch}
    assert len({str(info.bootstrap_store_info) for info in infos}) == 1, "several masters"


def exchange(info: RendezvousInfo) -> None:
    """What members of a round do first: each writes its rank and reads all others."""
    info.store.set(f"rank {info.rank}", f"{info.rank}")
    assert info.store.add("here", 1) <= info.world_size
    for rank in range(info.world_size):
        assert info.store.get(f"rank {rank}") == b"%d" % rank


def refused(store: RedisStore) -> None:
    """I4: the store of a round that is over takes no write."""
    try:
        store.set("rank 0", "late")
    except RoundBrokenError:
        return
    raise AssertionError("a write to an older round's store was taken")
