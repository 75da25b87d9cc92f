"""The master dies, and a replica with all of its writes takes over (I9)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.failovers import (
    GOES_ON,
    LIMIT,
    TAKES_OVER,
    FailOver,
    new_group,
    wait_for_candidates,
    wait_until_all_beat,
)
from tests.support.fault_matrix import Measured
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record
from tests.support.servers import Shard, wait_until

pytest_plugins = ["tests.support.failover_servers"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.fault(TAKES_OVER, GOES_ON)
def test_a_running_group(shard: Shard, new_node: NodeFactory, run_id: str, measured: Measured) -> None:
    nodes = new_group(new_node, shard, 1, 3)
    join(*nodes)
    before = record(nodes[0])
    shard.replicate(run_id)
    fail_over = FailOver(shard, run_id)
    measured("first heartbeat answered", fail_over.wait_for_heartbeat())
    wait_until_all_beat(*nodes)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
    assert record(nodes[0]) == before

    dead, *others = nodes
    dead.node.stop()
    wait_until(lambda: all(node.num_nodes_waiting() for node in others), "its death is known", LIMIT)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]
    assert [event.epoch for event in events(others[0], "completed")] == [1, 2]


@pytest.mark.fault(TAKES_OVER, GOES_ON)
def test_a_rendezvous(shard: Shard, new_node: NodeFactory, run_id: str, measured: Measured) -> None:
    nodes = new_group(new_node, shard, 3, 3)
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_for_candidates(nodes[0], 2)
        shard.replicate(run_id)
        fail_over = FailOver(shard, run_id)
        infos = [pool.submit(nodes[2].next_rendezvous).result(LIMIT), *(future.result(LIMIT) for future in early)]
    measured("rendezvous complete", fail_over.seconds)
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert [event.epoch for event in events(nodes[0], "completed")] == [1], "it completes once"


@pytest.mark.fault(TAKES_OVER, GOES_ON)
def test_a_regrouping(shard: Shard, new_node: NodeFactory, run_id: str, measured: Measured) -> None:
    """Two of three wait for the next round, the third still holds the last one."""
    nodes = new_group(new_node, shard, 1, 3)
    places = join(*nodes)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_for_candidates(nodes[0], 2)
        wait_until(lambda: nodes[2].num_nodes_waiting() > 0, "the third is to regroup", LIMIT)
        shard.replicate(run_id)
        fail_over = FailOver(shard, run_id)
        [late] = join(nodes[2])
        again = [future.result(LIMIT) for future in early]
    measured("rendezvous complete", fail_over.seconds)
    assert [(info.rank, info.world_size) for info in again] + [late] == places, "with their old ranks"
    assert [event.epoch for event in events(nodes[0], "completed")] == [1, 2]
