"""A master without its replicas takes no writes, or completes rounds that no node enters (I1, I2, I4, I9)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Final

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.failovers import (
    CONFIRMED,
    INTERVAL,
    LIMIT,
    LOST,
    NO_LOSS,
    TAKES_OVER,
    FailOver,
    lost_writes,
    new_group,
    resolved,
    wait_until_all_beat,
)
from tests.support.fault_matrix import Measured
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record, state
from tests.support.servers import Shard, wait_until

pytest_plugins = ["tests.support.failover_servers"]
pytestmark = pytest.mark.timeout(300)

LEASE: Final = 3 * INTERVAL


@pytest.fixture
def pair(own_server: RedisServer) -> Iterator[Shard]:
    """A master and a replica, without a failover."""
    with servers.replica_of(own_server) as replica:
        yield Shard(own_server.url, [own_server, replica])


@pytest.mark.fault(
    "min-replicas-to-write is 1, and the master loses its replica",
    "I9: as in an outage: nobody is evicted, the log says why, joins wait",
)
def test_a_master_that_refuses_writes(
    pair: Shard, new_node: NodeFactory, caplog: pytest.LogCaptureFixture, measured: Measured
) -> None:
    *nodes, newcomer = new_group(new_node, pair, 2, 3, last_call_timeout=0)
    join(*nodes)
    before = record(nodes[0])
    with pair.get_client() as admin:
        admin.config_set("min-replicas-to-write", 1)
    with ThreadPoolExecutor(1) as pool:
        with pair.cut():
            joining = pool.submit(newcomer.next_rendezvous)
            wait_until(lambda: min(node.node.watch.away for node in nodes) > 2 * LEASE, "it is away for long", LIMIT)
            said = [r.getMessage() for r in caplog.records if "keeps its place" in r.getMessage()]
            assert len(said) >= 2, "each says so"
            assert all("NOREPLICAS" in text for text in said)
            assert record(nodes[0]) == before
            assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
            assert not joining.done()
        back = time.monotonic()
        wait_until(lambda: all(node.num_nodes_waiting() for node in nodes), "there is room for the newcomer", LIMIT)
        measured("heard again", time.monotonic() - back)
        assert sorted([*join(*nodes), (joining.result(LIMIT).rank, 3)]) == [(0, 3), (1, 3), (2, 3)]
    assert not events(nodes[0], "lost")


@pytest.mark.fault(
    CONFIRMED + "the replica is frozen",
    "nobody enters a round before it is thawed; at the join_timeout an error says why",
)
def test_nobody_enters_an_unconfirmed_round(pair: Shard, new_node: NodeFactory, measured: Measured) -> None:
    nodes = new_group(new_node, pair, 2, 2, 2, min_replicas=1)
    hasty = new_group(new_node, pair, 1, 1, 1, min_replicas=1, join_timeout=0.5, run_id="hasty")[0]
    with ThreadPoolExecutor(2) as pool:
        with servers.frozen(pair.servers[1]):
            with pytest.raises(
                RendezvousTimeoutError, match=r"only 0 of min_replicas=1 replicas .* confirmed it within"
            ):
                hasty.next_rendezvous()
            joining = [pool.submit(node.next_rendezvous) for node in nodes]
            wait_until(lambda: (run := state(nodes[0])) is not None and run.epoch == 1, "it is complete", LIMIT)
            wait_until(
                lambda: (run := state(nodes[0])) is not None and (run.age or 0) > 2 * LEASE, "time passes", LIMIT
            )
            run = state(nodes[0])
            assert run is not None
            assert len(run.members) == 2, "a node that waits for a replica keeps its place"
            assert not any(future.done() for future in joining)
        thawed = time.monotonic()
        assert sorted(info.rank for info in resolved(*joining)) == [0, 1]
        measured("entered", time.monotonic() - thawed)
    assert [event.epoch for event in events(nodes[0], "completed")] == [1]


@pytest.mark.fault(CONFIRMED + TAKES_OVER, NO_LOSS)
def test_a_confirmed_round_is_not_lost(shard: Shard, new_node: NodeFactory, run_id: str) -> None:
    """No node has to put it back."""
    nodes = new_group(new_node, shard, 1, 3, min_replicas=1)
    join(*nodes)
    before = record(nodes[0])
    FailOver(shard, run_id).wait_for_heartbeat()
    wait_until_all_beat(*nodes)
    assert record(nodes[0]) == before
    assert not events(nodes[0], "restored")
    if len(shard.servers) == 2:  # the only replica is master now
        shard.heal()
    join(*nodes)
    assert [event.epoch for event in events(nodes[0], "completed")] == [1, 2]


@pytest.mark.fault(CONFIRMED + LOST + "a completed round", NO_LOSS)
@pytest.mark.parametrize("asks", quick_first(["the old master", "the new master"]))
def test_nobody_enters_a_round_that_is_lost(in_cluster: Shard, new_node: NodeFactory, run_id: str, asks: str) -> None:
    """The old master has completed it; the nodes ask one of the two masters whether replicas have it."""
    nodes = new_group(new_node, in_cluster, 2, 2, 2, min_replicas=1)
    join(*nodes)
    may_ask = threading.Event()
    if asks == "the old master":
        may_ask.set()
    for node in nodes:
        connection = node.backend.connection

        def asking(*args: Any, ask: Callable[..., int] = connection.replicas_with, **options: Any) -> int:
            assert may_ask.wait(LIMIT)
            return ask(*args, **options)

        connection.replicas_with = asking  # type: ignore[method-assign]

    with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
        stack.callback(may_ask.set)
        with lost_writes(in_cluster, run_id):
            joining = [pool.submit(node.next_rendezvous) for node in nodes]
            wait_until(lambda: (run := state(nodes[0])) is not None and run.epoch == 2, "it is complete", LIMIT)
            assert not any(future.done() for future in joining)
        in_cluster.heal()
        wait_until_all_beat(*nodes)
        may_ask.set()
        assert sorted(info.rank for info in resolved(*joining)) == [0, 1]
    assert len({(r.epoch, r.size, r.completed_at) for node in nodes if (r := node.node.view.round)}) == 1
    assert [event.epoch for event in events(nodes[0], "completed")] == [1, 2], "as the new master has it"
    assert not events(nodes[0], "restored"), "no node had to put it back"
