"""The master dies, and a replica without the last writes takes over (I2, I4, I5, I6, I7, I8, I9)."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any, cast

import pytest
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from redelastic import RedisStore
from redelastic.monitoring.events import Left
from redelastic.rendezvous.candidate import Candidate
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.failovers import (
    LIMIT,
    LOST,
    lost_writes,
    new_group,
    resolved,
    settle,
    wait_for_candidates,
    wait_until_all_beat,
)
from tests.support.fault_matrix import Measured
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record, state
from tests.support.servers import Shard, wait_until

pytest_plugins = ["tests.support.failover_servers"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.fault(
    LOST + "a completed round", "I4, I9: it is put back, nobody is evicted, the next one has a higher epoch"
)
@pytest.mark.parametrize("before", quick_first([0, 1]), ids=["the first", "a later one"])
def test_a_lost_round(shard: Shard, new_node: NodeFactory, run_id: str, before: int) -> None:
    nodes = new_group(new_node, shard, 3, 3)
    for _ in range(before):
        join(*nodes)
    with lost_writes(shard, run_id):
        join(*nodes)
        completed = record(nodes[0])
    wait_until(lambda: record(nodes[0]) == completed, "the record is there again", LIMIT)
    wait_until_all_beat(*nodes)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
    join(*nodes)
    run = state(nodes[0])
    assert run is not None
    assert run.epoch == before + 2


@pytest.mark.fault(LOST + "a join", "I6, I8: the node asks again, the rendezvous completes once")
def test_a_lost_join(shard: Shard, new_node: NodeFactory, run_id: str) -> None:
    nodes = new_group(new_node, shard, 3, 3)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(nodes[0].next_rendezvous)
        wait_for_candidates(nodes[0], 1)
        with lost_writes(shard, run_id):
            second = pool.submit(nodes[1].next_rendezvous)
            wait_for_candidates(nodes[0], 2)
        wait_for_candidates(nodes[0], 2)
        infos = [pool.submit(nodes[2].next_rendezvous).result(LIMIT), first.result(LIMIT), second.result(LIMIT)]
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert [event.epoch for event in events(nodes[0], "completed")] == [1]


@pytest.mark.fault(LOST + "that a node left", "I7: it is out after one lease, and does not come back")
def test_a_lost_leave(in_cluster: Shard, new_node: NodeFactory, run_id: str) -> None:
    leaver, *others = new_group(new_node, in_cluster, 1, 3)
    join(leaver, *others)
    gone = leaver.node.id
    with lost_writes(in_cluster, run_id):
        leaver.end(Left(cause="drained"), "goes on")
        wait_until(lambda: all(node.num_nodes_waiting() for node in others), "the others are to regroup", LIMIT)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]
    run = state(others[0])
    assert run is not None
    assert (run.epoch, gone in [node.id for node in run.nodes]) == (2, False)


@pytest.mark.fault(LOST + "that the run was closed", "I5: a node that knows of it closes the run again")
def test_a_lost_closing(shard: Shard, new_node: NodeFactory, run_id: str) -> None:
    nodes = new_group(new_node, shard, 2, 2, 2)
    join(*nodes)
    with lost_writes(shard, run_id):
        nodes[0].set_closed()
        wait_until(lambda: nodes[1].node.view.record_of_closing[0] != "", "the other knows of it", LIMIT)
    wait_until(lambda: bool((run := state(nodes[0])) and run.closed), "it is put back", LIMIT)
    for node in nodes:
        with pytest.raises(RendezvousClosedError):
            node.next_rendezvous()


@pytest.mark.fault(
    LOST + "writes to a store", "they are gone; the store works on, and a set still wakes a blocked wait"
)
def test_lost_writes_to_a_store(in_cluster: Shard, run_id: str) -> None:
    store, other = (RedisStore(in_cluster.url, run_id) for _ in range(2))
    store.set("kept", "old")
    store.add("n", 1)
    with ThreadPoolExecutor(1) as pool:
        with lost_writes(in_cluster, run_id):
            waiting = pool.submit(store.wait, ["late"], timedelta(seconds=LIMIT))
            store.set("kept", "new")
            store.set("lost", "x")
            assert store.add("n", 1) == 2
        assert (other.get("kept"), other.check(["lost"])) == (b"old", False)
        assert store.add("n", 1) == 2, "counted on from what the replica had"
        other.set("late", "x")
        waiting.result(LIMIT)
    for opened in (store, other):
        opened.close()


class Gate:
    """A gate before a node's connection: while it is shut, requests wait, as if the node's process was stopped."""

    def __init__(self, node: RedisRendezvousHandler) -> None:
        self._keeper = node.keeper
        self._inner = node.node.connection
        self._changed = threading.Condition()
        self._is_open = True
        self._passes: int | None = None  # a thread that passes a shut gate
        self._calls = 0  # in flight
        node.node.connection = cast("Any", self)

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            self._changed.notify_all()

    def shut(self) -> None:
        """Shut the gate, and wait until no request is in flight that may still evict the node."""
        with self._changed:
            self._is_open = False
            assert self._changed.wait_for(lambda: not self._calls, LIMIT)

    def _wait(self) -> None:
        may_pass = self._passes == threading.get_ident()
        assert may_pass or self._changed.wait_for(lambda: self._is_open, 2 * LIMIT)

    def attempt(self, *args: Any, **options: Any) -> Any:
        with self._changed:
            self._wait()
            self._calls += 1
        try:
            return self._inner.attempt(*args, **options)
        finally:
            with self._changed:
                self._calls -= 1
                self._changed.notify_all()

    def read(self, *args: Any, **options: Any) -> Any:
        with self._changed:
            self._wait()
        return self._inner.read(*args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def join_and_lose_the_reply(self) -> None:
        """Send one join through the shut gate, and drop its reply."""
        self._passes = threading.get_ident()
        Candidate(self._keeper, 1, time.monotonic() + LIMIT).ask()
        self._passes = None


@pytest.mark.fault(
    LOST + "a completed round, which only one node has entered",
    "I2, I4: the node's first heartbeat fences it, or its round is put back; all meet in one round",
)
@pytest.mark.parametrize("case", quick_first(["it lost its lease", "it is in the other round too", "it comes first"]))
def test_a_lost_round_that_one_node_entered(
    in_cluster: Shard, new_node: NodeFactory, run_id: str, case: str, measured: Measured
) -> None:
    """The other nodes do not know of that round, and complete another of the same epoch, with a fourth node."""
    attempts = 30 if case == "it is in the other round too" else 3
    nodes = new_group(new_node, in_cluster, 3, 4, 4, keep_alive_max_attempt=attempts, last_call_timeout=0.2)
    one, two, lucky, newcomer = nodes
    join(one, two, lucky)
    gates = {node: Gate(node) for node in nodes}
    with ThreadPoolExecutor(4) as pool, ExitStack() as stack:
        for gate in gates.values():
            stack.callback(gate.open)
        first = pool.submit(one.next_rendezvous)
        wait_for_candidates(newcomer, 1)
        heard = pool.submit(lucky.next_rendezvous)
        wait_for_candidates(newcomer, 2)
        gates[two].shut()
        gates[one].shut()
        with lost_writes(in_cluster, run_id):
            gates[two].join_and_lose_the_reply()
            assert heard.result(LIMIT).world_size == 3
            gates[lucky].shut()
        assert lucky.node.view.round is not None
        assert lucky.node.view.round.epoch == 2
        if case == "it comes first":
            gates[lucky].open()
            wait_until(lambda: (run := state(newcomer)) is not None and run.epoch == 2, "it is put back", LIMIT)
        gates[one].open()
        gates[two].open()
        if case == "it lost its lease":
            wait_for_candidates(newcomer, 1)
        fourth = pool.submit(newcomer.next_rendezvous)
        if case == "it comes first":
            wait_until(lambda: lucky.num_nodes_waiting() > 0, "the others did not come back", LIMIT)
            again = pool.submit(lucky.next_rendezvous)
            others = resolved(first, pool.submit(two.next_rendezvous), fourth, again)
        else:
            if case == "it is in the other round too":
                wait_for_candidates(newcomer, 3)
            others = resolved(first, pool.submit(two.next_rendezvous), fourth)
            run = state(newcomer)
            assert run is not None
            assert run.epoch == 2
            assert (lucky.node.id in [node.id for node in run.members]) == (run.size == 4)
            assert lucky.num_nodes_waiting() == 0, "it cannot know yet"
            gates[lucky].open()
            opened = time.monotonic()
            wait_until(lambda: lucky.num_nodes_waiting() > 0, "the node that had entered is fenced", LIMIT)
            measured("fenced", time.monotonic() - opened)
        assert {info.world_size for info in others} == {3 if case == "it lost its lease" else 4}
        settle(nodes)
