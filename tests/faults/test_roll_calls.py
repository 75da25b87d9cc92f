"""A failure starts a roll call: silent nodes are out long before their lease, and no others, whatever Redis does."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from redelastic.redis.connection import Entries
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.failovers import LIMIT, lost_writes, new_group
from tests.support.fault_matrix import Measured
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, state
from tests.support.servers import Shard, wait_until

pytest_plugins = ["tests.support.failover_servers"]

INTERVAL: Final = 20.0  # a lease of a minute: no test waits for one
PATIENT: Final = 5.0  # all nodes answer within it, however busy this machine is
Group = list[RedisRendezvousHandler]


def group(new_node: NodeFactory, count: int, **config: Any) -> Group:
    config = {"keep_alive_interval": INTERVAL, "join_timeout": 120, "roll_call_timeout": PATIENT} | config
    nodes = [new_node(1, count, **config) for _ in range(count)]
    join(*nodes)
    return nodes


def call(node: RedisRendezvousHandler) -> None:
    node.node.call_roll(time.monotonic())


def roll_calls(node: RedisRendezvousHandler) -> list[str]:
    wake: Any = node.backend.connection.call(lambda client: client.xrange(node.backend.keys.wake))
    return [fields[b"event"].decode() for _, fields in wake if fields[b"event"] in {b"roll_call", b"answered"}]


class Silence:
    """Keeps a node from answering roll calls."""

    def __init__(self, node: RedisRendezvousHandler) -> None:
        self._hear, self._answer = node.keeper.hear, node.keeper.answer
        self._asked, self._released = threading.Event(), threading.Event()
        node.keeper.hear = self._hold_back  # type: ignore[method-assign]
        node.keeper.answer = self._hold_back_answer  # type: ignore[method-assign]

    def _hold_back(self, entries: Entries) -> None:
        if any(change.get("event") == "roll_call" for _, change in entries):
            self._wait()
        self._hear(entries)

    def _hold_back_answer(self, roll_call: int) -> None:
        if roll_call:
            self._wait()
        self._answer(roll_call)

    def _wait(self) -> None:
        self._asked.set()
        self._released.wait(LIMIT)

    def wait_until_asked(self) -> None:
        assert self._asked.wait(LIMIT)

    def end(self) -> None:
        self._released.set()


def counted_beats(node: RedisRendezvousHandler) -> Callable[[], int]:
    """Count a node's heartbeats from now on; returns a function that gives the number begun."""
    beat, begun = node.keeper.beat, []

    def count() -> None:
        begun.append(1)
        beat()

    node.keeper.beat = count  # type: ignore[method-assign]
    return lambda: len(begun)


@pytest.mark.fault(
    "a node dies, and a worker of another one fails", "I7: it is out within roll_call_timeout, not a lease"
)
def test_a_silent_node_is_out_long_before_its_lease(new_node: NodeFactory, measured: Measured) -> None:
    dead, *others = group(new_node, 3, roll_call_timeout=1.0)
    dead.node.stop()
    asked = time.monotonic()
    call(others[0])
    assert all(node.wait_for_loss() for node in others)
    measured("out", time.monotonic() - asked)
    [lost] = events(others[0], "lost")
    assert lost.node == dead.node.id
    assert (lost.cause, lost.asked_by) == ("roll_call", others[0].node.id)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]


@pytest.mark.fault("a worker fails by itself", "the verdict that no node is lost takes a round trip, not a lease")
def test_all_answer_and_nobody_is_lost(new_node: NodeFactory, measured: Measured) -> None:
    nodes = group(new_node, 4)
    asked = time.monotonic()
    call(nodes[0])
    assert not nodes[0].wait_for_loss(), "and that is known long before the lease of a minute"
    measured("verdict", time.monotonic() - asked)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0, 0]
    assert roll_calls(nodes[0]) == ["roll_call", "answered"]
    [roll_call] = events(nodes[0], "roll_call")
    assert (roll_call.node, roll_call.answers) == (nodes[0].node.id, 4)


def test_a_failure_during_a_roll_call_waits_for_another_one(new_node: NodeFactory) -> None:
    """A node may have answered and then died, and its death may be the cause of this failure."""
    nodes = group(new_node, 3)
    silence = Silence(nodes[2])
    call(nodes[0])
    wait_until(lambda: roll_calls(nodes[0]) == ["roll_call"], "it is open")
    time.sleep(0.01)  # the server orders failures and roll calls by the millisecond
    call(nodes[1])
    silence.end()
    assert not nodes[0].wait_for_loss()
    assert not nodes[1].wait_for_loss()
    assert roll_calls(nodes[0]) == ["roll_call", "answered"] * 2


def test_a_spare_answers_and_so_does_a_node_that_regroups(new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
    config = {"keep_alive_interval": INTERVAL, "join_timeout": 120, "roll_call_timeout": PATIENT}
    nodes = [new_node(2, 2, **config) for _ in range(2)]
    join(*nodes)
    spare = new_node(2, 2, **config)
    waiting = pool.submit(spare.next_rendezvous)
    keys = nodes[0].backend.keys
    waiters = lambda: nodes[0].backend.connection.call(lambda client: client.zcard(keys.candidates))  # noqa: E731
    wait_until(lambda: waiters() == 1, "the spare waits")
    regrouping = pool.submit(nodes[1].next_rendezvous)
    wait_until(lambda: waiters() == 2, "one regroups")
    call(nodes[0])
    assert not nodes[0].wait_for_loss()
    assert not events(nodes[0], "lost")
    assert nodes[0].next_rendezvous().world_size == regrouping.result(LIMIT).world_size == 2
    spare.set_closed()
    assert waiting.exception(LIMIT)


def test_roll_calls_can_be_turned_off(new_node: NodeFactory) -> None:
    nodes = group(new_node, 2, roll_call_timeout=0)
    call(nodes[0])
    assert not roll_calls(nodes[0])


def test_a_node_that_has_just_found_redis_again_calls_no_roll(new_node: NodeFactory) -> None:
    """The others may still be looking for it."""
    nodes = group(new_node, 2)
    nodes[0].node.watch.apply_outage(OSError("gone"))
    nodes[0].node.watch.apply_return()
    call(nodes[0])
    assert not roll_calls(nodes[0])


PROMISE: Final = "I9: nobody is evicted; the leases decide"


@pytest.mark.fault("Redis is frozen in the middle of a roll call, and thawed", PROMISE)
def test_a_frozen_server_evicts_nobody(own_server: RedisServer, new_node: NodeFactory) -> None:
    """Once thawed it reads the others' checks whether the time is up, which it is, before the last answer."""
    nodes = group(new_node, 3, url=own_server.url)
    silence, beats = Silence(nodes[2]), [counted_beats(node) for node in nodes[:2]]
    call(nodes[0])
    silence.wait_until_asked()
    wait_until(lambda: silent_nodes(nodes[0]) == 1, "the others have answered")
    assert own_server.pid is not None
    os.kill(own_server.pid, signal.SIGSTOP)
    before = [count() for count in beats]
    wait_until(lambda: all(count() > n for count, n in zip(beats, before, strict=True)), "both check", LIMIT)
    answers = counted_beats(nodes[2])
    silence.end()
    wait_until(lambda: answers() > 0, "it answers", LIMIT)
    os.kill(own_server.pid, signal.SIGCONT)
    wait_until(lambda: not roll_call_is_open(nodes[0]), "it is over", LIMIT)
    assert not events(nodes[0], "lost")


@pytest.mark.fault("Redis is killed in the middle of a roll call, and comes back with its data", PROMISE)
def test_a_server_that_restarts_evicts_nobody(new_node: NodeFactory, tmp_path: Path) -> None:
    with RedisServer(data_dir=tmp_path) as server:
        nodes = group(new_node, 3, url=server.url)
        silence = Silence(nodes[2])
        call(nodes[0])
        server.kill()
        server.start()
        wait_until(lambda: not roll_call_is_open(nodes[0]), "it is over", LIMIT)
        silence.end()
        assert not events(nodes[0], "lost")
        for node in nodes:
            node.shutdown()


@pytest.mark.fault("the master fails over in the middle of a roll call", PROMISE)
@pytest.mark.parametrize("case", quick_first(["the new master knows of it", "it is lost"]))
@pytest.mark.timeout(300)
def test_a_fail_over_evicts_nobody(shard: Shard, new_node: NodeFactory, run_id: str, case: str) -> None:
    nodes = new_group(new_node, shard, 3, 3, keep_alive_interval=5, roll_call_timeout=PATIENT)
    join(*nodes)
    silence = Silence(nodes[2])
    if case == "it is lost":
        with lost_writes(shard, run_id):
            call(nodes[0])
    else:
        call(nodes[0])
        shard.replicate(run_id)
        assert roll_call_is_open(nodes[0])
        shard.kill_master()
    wait_until(lambda: not roll_call_is_open(nodes[0]), "it is over", LIMIT)
    over = time.monotonic()
    silence.end()
    wait_until(lambda: longest_silence(nodes[0]) < time.monotonic() - over, "all are heard", LIMIT)
    assert not events(nodes[0], "lost")


def longest_silence(node: RedisRendezvousHandler) -> float:
    """The longest silence of a member, in seconds."""
    run = state(node)
    assert run is not None
    return max(member.silence for member in run.members)


def silent_nodes(node: RedisRendezvousHandler) -> int:
    """How many nodes have not answered the open roll call."""
    ask, keys = node.backend.connection.call, node.backend.keys
    until: Any = ask(lambda client: client.hget(keys.run, "roll_until"))
    return int(ask(lambda client: client.zcount(keys.leases, "-inf", int(until))))


def roll_call_is_open(node: RedisRendezvousHandler) -> bool:
    return bool(node.backend.connection.call(lambda client: client.hexists(node.backend.keys.run, "roll_until")))
