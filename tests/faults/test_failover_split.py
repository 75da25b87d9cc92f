"""A frozen master is thawed beside the master that replaced it: a split brain (I1, I2, I4, I9)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Left
from redelastic.monitoring.records import Run
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support import servers
from tests.support.failovers import CONFIRMED, INTERVAL, LIMIT, NO_LOSS, Group, new_group, settle, wait_until_all_beat
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record, state
from tests.support.servers import HOST, MASTER_NAME, SentinelGroup, Shard, port_of, wait_until

pytest_plugins = ["tests.support.failover_servers"]
pytestmark = pytest.mark.timeout(300)

TWO: Final = "the old master is thawed beside the new one: "
STANDS: Final = "I9: nobody is evicted, all find the new master, epochs go up"
# A node that waits this long for a reply is still connected to the old master when it is thawed; the other is not.
HOLDS: Final[dict[str, Any]] = {"keep_alive_max_attempt": 100, "heartbeat_timeout": 30}
FOLLOWS: Final[dict[str, Any]] = {"keep_alive_max_attempt": 100, "heartbeat_timeout": 0.3}


@dataclass
class Split:
    """Two masters, until the sentinels make the old one a replica."""

    group: SentinelGroup
    old: RedisServer
    new: RedisServer

    def set_period(self, name: str, ms: int) -> None:
        for port in self.group.sentinel_ports:
            with redis.Redis(HOST, port, password=self.group.sentinel_password) as sentinel:
                sentinel.execute_command("SENTINEL", "DEBUG", name, ms)

    def end(self) -> None:
        """Make the old master a replica: it drops what it has written meanwhile."""
        self.set_period("PUBLISH-PERIOD", 100)
        self.set_period("INFO-PERIOD", 300)
        wait_until(Shard("", self.group.servers).in_step, "the old master follows the new one", LIMIT)
        self.set_period("PUBLISH-PERIOD", 2000)
        self.set_period("INFO-PERIOD", 10_000)


Splitting = Callable[[], AbstractContextManager[Split]]


@pytest.fixture
def split_brain(sentinels: SentinelGroup, with_sentinel: Shard, run_id: str) -> Splitting:
    """Within the block there are two masters, both with all earlier writes."""

    def begin() -> AbstractContextManager[Split]:
        with_sentinel.replicate(run_id)
        return frozen_and_replaced(sentinels)

    return begin


@contextmanager
def frozen_and_replaced(group: SentinelGroup) -> Iterator[Split]:
    split = Split(group, group.master(), group.master())

    def replaced(port: int) -> bool:
        with redis.Redis(HOST, port, password=group.sentinel_password) as sentinel:
            seen: Any = sentinel.sentinel_master(MASTER_NAME)
        return (seen["port"], seen["role-reported"]) == (port_of(split.new), "master")

    def agreed() -> bool:
        split.new = group.master()
        return split.new is not split.old and all(map(replaced, group.sentinel_ports))

    with servers.frozen(split.old):
        wait_until(agreed, "all sentinels name the new master", LIMIT)
        split.set_period("PUBLISH-PERIOD", 600_000)  # the sentinels make the old master a replica after four times that
    try:
        yield split
    finally:
        split.end()


def run_at(server: RedisServer, run_id: str) -> Run:
    with closing(Connection.open(server.url)) as connection:
        return RunControl(connection, RunKeys(run_id)).state()


def beats_at(server: RedisServer, run_id: str, *nodes: RedisRendezvousHandler) -> bool:
    heard = {node.id for node in run_at(server, run_id).nodes if node.silence < 2 * INTERVAL}
    return {node.node.id for node in nodes} <= heard


def hold_connections(nodes: Group, count: int) -> None:
    for node in nodes:
        wire: Any = node.backend.connection._wire
        wire._idle.extend(wire._pool.get_connection() for _ in range(count))


@pytest.mark.fault("the master is frozen, a replica takes over, and it is thawed", STANDS)
def test_a_thawed_master_becomes_a_replica(in_cluster: Shard, new_node: NodeFactory, run_id: str) -> None:
    """A Cluster's master knows by itself that it was replaced."""
    nodes = new_group(new_node, in_cluster, 1, 3)
    join(*nodes)
    before = record(nodes[0])
    old = in_cluster.master()
    assert old is not None
    [replica] = in_cluster.replicas()
    in_cluster.replicate(run_id)
    with servers.frozen(old):
        wait_until(lambda: in_cluster.role(replica)[0] == b"master", "the replica is master", LIMIT)
    wait_until(in_cluster.in_step, "the old master follows the new one", LIMIT)
    wait_until_all_beat(*nodes)
    assert record(nodes[0]) == before
    assert not events(nodes[0], "lost")
    join(*nodes)
    assert [event.epoch for event in events(nodes[0], "completed")] == [1, 2]


@pytest.mark.fault(TWO + "some hold connections to it", STANDS)
def test_a_round_stands(split_brain: Splitting, with_sentinel: Shard, new_node: NodeFactory, run_id: str) -> None:
    holders = new_group(new_node, with_sentinel, 1, 3, 2, **HOLDS)
    [follower] = new_group(new_node, with_sentinel, 1, 3, 1, **FOLLOWS)
    nodes = [*holders, follower]
    join(*nodes)
    before = record(follower)
    with split_brain() as split:
        wait_until(lambda: beats_at(split.old, run_id, *holders), "two beat at the old master", LIMIT)
        wait_until(lambda: beats_at(split.new, run_id, follower), "the third beats at the new one", LIMIT)
        wait_until(
            lambda: not any(beats_at(split.new, run_id, node) for node in holders),
            "the first two do not beat there",
            LIMIT,
        )
    wait_until_all_beat(*nodes)
    assert record(follower) == before
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
    assert not events(follower, "lost")
    join(*nodes)
    assert [event.epoch for event in events(follower, "completed")] == [1, 2]


@pytest.mark.fault(TWO + "all regroup", "I2, I4: all meet in one round, with a higher epoch")
def test_a_regrouping(split_brain: Splitting, with_sentinel: Shard, new_node: NodeFactory) -> None:
    """Each thread of a node has its own connection, to either master."""
    nodes = new_group(new_node, with_sentinel, 2, 3, **HOLDS)
    join(*nodes)
    with split_brain(), ThreadPoolExecutor(3) as pool:
        joining = [pool.submit(node.next_rendezvous) for node in nodes]
        wait_until(lambda: any(future.done() for future in joining), "one has entered a round", LIMIT)
    for future in joining:
        future.result(LIMIT)
    settle(nodes)
    run = state(nodes[0])
    assert run is not None
    assert run.epoch > 1


@pytest.mark.fault(
    TWO + "each completes a round",
    "I1, I4: when the old master becomes a replica, its group is fenced; the new master's run stands",
)
@pytest.mark.parametrize("rounds", quick_first([1, 2]))
def test_of_two_runs_that_of_the_new_master_stands(
    split_brain: Splitting, with_sentinel: Shard, new_node: NodeFactory, run_id: str, rounds: int
) -> None:
    left = new_group(new_node, with_sentinel, 2, 2, 2, **HOLDS)
    hold_connections(left, 4)
    with split_brain() as split:
        for _ in range(rounds):
            join(*left)
        right = new_group(new_node, with_sentinel, 2, 2, 2)
        join(*right)
        assert (run_at(split.old, run_id).epoch, run_at(split.new, run_id).epoch) == (rounds, 1)
        assert not any(node.num_nodes_waiting() for node in left + right)
    stay, go = right, left  # each master has a run of its own: an incarnation that a higher epoch does not end
    wait_until(lambda: all(node.num_nodes_waiting() for node in go), "one group is fenced", LIMIT)
    wait_until_all_beat(*stay)
    run = state(stay[0])
    assert run is not None
    assert (run.epoch, {node.id for node in run.members}) == (1, {node.node.id for node in stay})
    assert not any(node.num_nodes_waiting() for node in stay)
    stay[0].end(Left(cause="drained"), "goes on")
    settle([stay[1], go[0]])
    run = state(go[0])
    assert run is not None
    assert run.epoch > 1


@pytest.mark.fault(CONFIRMED + TWO + "each completes a round", NO_LOSS)
def test_a_confirmed_round_completes_at_the_new_master_alone(
    split_brain: Splitting, with_sentinel: Shard, new_node: NodeFactory, run_id: str
) -> None:
    """The old master's replicas have left it."""
    left = new_group(new_node, with_sentinel, 2, 2, 2, min_replicas=1, **HOLDS)
    hold_connections(left, 4)
    with ThreadPoolExecutor(2) as pool:
        with split_brain() as split:
            joining = [pool.submit(node.next_rendezvous) for node in left]
            wait_until(lambda: run_at(split.old, run_id).epoch == 1, "the old master has completed it", LIMIT)
            right = new_group(new_node, with_sentinel, 2, 2, 2, min_replicas=1)
            places = join(*right)
            assert not any(future.done() for future in joining)
        wait_until_all_beat(*right)
        assert sorted(places) == [(0, 2), (1, 2)]
        assert not any(node.num_nodes_waiting() for node in right)
        for node in right:
            node.end(Left(cause="drained"), "goes on")
        assert sorted(future.result(LIMIT).rank for future in joining) == [0, 1]
    run = state(left[0])
    assert run is not None
    assert run.epoch == 2


@pytest.mark.fault(
    "min-replicas-to-write is 1, " + TWO + "some hold connections to it",
    "I9: it refuses writes, and nodes move to the new one; nobody is evicted",
)
def test_an_old_master_that_refuses_writes(
    split_brain: Splitting, with_sentinel: Shard, new_node: NodeFactory, run_id: str
) -> None:
    nodes = new_group(new_node, with_sentinel, 1, 2, 2, **HOLDS)
    join(*nodes)
    for server in with_sentinel.servers:
        with server.get_client() as client:
            client.config_set("min-replicas-to-write", 1)
            client.config_set("min-replicas-max-lag", 1)
    before = record(nodes[0])
    try:
        with split_brain() as split:
            wait_until(lambda: beats_at(split.new, run_id, *nodes), "all beat at the new master", LIMIT)
        assert record(nodes[0]) == before
        assert not events(nodes[0], "lost")
    finally:
        for server in with_sentinel.servers:
            with server.get_client() as client:
                client.config_set("min-replicas-to-write", 0)
