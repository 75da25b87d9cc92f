"""Redis goes away, comes back, and may have forgotten everything: nobody is evicted, no worker restarts (I9).

REDELASTIC_LONG=1 adds an outage of a minute.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Event, Failed, Left
from redelastic.redis.errors import UnavailableError
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.node import News, RunThen
from redelastic.rendezvous.view import View
from tests.support.agent_job import AgentJob
from tests.support.fault_matrix import Measured
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record, state
from tests.support.servers import HOST, port_of, wait_until
from tests.support.torchrun_job import LONG_LEASES, Job

pytestmark = pytest.mark.timeout(300)

INTERVAL: Final = 0.4
LEASE: Final = 3 * INTERVAL


PROMISE: Final = "I9: nobody is evicted, no worker restarts, the record is there again"


def killed(server: RedisServer, away: float) -> None:
    """SIGKILL, and a new server on the same port."""
    server.kill()
    time.sleep(away)
    server.start()


def frozen(server: RedisServer, away: float) -> None:
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    time.sleep(away)
    os.kill(pid, signal.SIGCONT)


def flushed(server: RedisServer, away: float) -> None:
    del away
    server.get_client().flushall()


Outage = Callable[[RedisServer, float], None]
AWAY: Final = (2 * LEASE, 1.0, 60.0)  # the first for all, the others in long runs


def case(name: str, what: str, how: Outage, away: float, *, keeps: bool = False) -> Any:
    marks = [pytest.mark.fault(what, PROMISE), *([pytest.mark.long] if away in AWAY[1:] else [])]
    return pytest.param((keeps, how, away), id=f"{name}-{away:g}", marks=marks)


OUTAGES: Final = [
    *(case("killed-kept", "Redis is killed and comes back with its data", killed, a, keeps=True) for a in AWAY),
    *(case("killed-empty", "Redis is killed and comes back empty", killed, a) for a in AWAY),
    *(case("frozen", "Redis is frozen, and thawed", frozen, a) for a in AWAY),
    case("flushed", "Redis is flushed under a running job", flushed, 0.0),
]


@pytest.fixture(params=OUTAGES)
def outage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[RedisServer, Callable[[], None]]]:
    """A server, and what makes it go away and come back."""
    keeps, how, away = request.param
    with RedisServer(data_dir=tmp_path if keeps else None) as server:
        yield server, lambda: how(server, away)


def test_a_running_group_outlives_an_outage(
    outage: tuple[RedisServer, Callable[[], None]], new_node: NodeFactory, measured: Measured
) -> None:
    server, happens = outage
    nodes = [new_node(1, 3, url=server.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(3)]
    places = join(*nodes)
    before = record(nodes[0])
    happens()
    back = time.monotonic()
    wait_until(lambda: record(nodes[0]) == before, "the record is there again", 20)
    measured("record as before", time.monotonic() - back)
    control = RunControl(nodes[0].backend.connection, nodes[0].backend.keys)

    def fresh() -> bool:
        """Each has beaten since."""
        run = control.state()
        return all(node.silence < 2 * INTERVAL for node in run.members)

    wait_until(fresh, "all beat again", 20)
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
    assert record(nodes[0]) == before

    dead, *others = nodes
    dead.node.stop()
    silent = time.monotonic()
    wait_until(lambda: all(node.num_nodes_waiting() for node in others), "its death is known", 20)
    measured("a later death known", time.monotonic() - silent)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]
    run = state(others[0])
    assert run is not None
    assert run.epoch == 2 > before[0]
    assert sorted(rank for rank, _ in places) == [0, 1, 2]


def test_a_rendezvous_outlives_an_outage(
    outage: tuple[RedisServer, Callable[[], None]], new_node: NodeFactory, measured: Measured
) -> None:
    server, happens = outage
    nodes = [new_node(3, 3, url=server.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_until(lambda: (run := state(nodes[0])) is not None and len(run.candidates) == 2, "two wait", 20)
        happens()
        back = time.monotonic()
        infos = [pool.submit(nodes[2].next_rendezvous).result(60), *(future.result(60) for future in early)]
    measured("rendezvous complete", time.monotonic() - back)
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert [event.epoch for event in events(nodes[0], "completed")] == [1], "it completes once"


def test_a_regrouping_outlives_an_outage(outage: tuple[RedisServer, Callable[[], None]], new_node: NodeFactory) -> None:
    """Two of three wait for the next round, the third still holds the last one."""
    server, happens = outage
    nodes = [new_node(1, 3, url=server.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(3)]
    places = join(*nodes)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_until(lambda: (run := state(nodes[0])) is not None and len(run.candidates) == 2, "two wait", 20)
        wait_until(lambda: nodes[2].num_nodes_waiting() > 0, "the third is to regroup", 20)
        happens()
        [late] = join(nodes[2])
        again = [future.result(60) for future in early]
    assert [(info.rank, info.world_size) for info in again] + [late] == places, "with their old ranks"
    run = state(nodes[0])
    assert run is not None
    assert run.epoch == 2


@pytest.mark.fault("Redis is flushed, and a member dies with it", "I1, I7: the others regroup after one lease")
def test_the_member_that_does_not_come_back_is_lost(own_server: RedisServer, new_node: NodeFactory) -> None:
    nodes = [new_node(1, 3, url=own_server.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(3)]
    join(*nodes)
    nodes[1].node.stop()
    own_server.get_client().flushall()
    others = [nodes[0], nodes[2]]
    wait_until(lambda: all(node.num_nodes_waiting() for node in others), "the others regroup", 20)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]
    run = state(nodes[0])
    assert run is not None
    assert run.epoch == 2


@contextmanager
def silenced(node: RedisRendezvousHandler) -> Iterator[None]:
    """A node sends no heartbeats for one block, which begins once none is in flight."""
    keeper, missed = node.keeper, threading.Event()
    beat = keeper.beat

    def miss() -> None:
        keeper.schedule(INTERVAL)
        missed.set()

    keeper.beat = miss  # type: ignore[method-assign]
    assert missed.wait(20)
    yield
    keeper.beat = beat  # type: ignore[method-assign]


@pytest.mark.fault("newcomers are first at an empty Redis", "I4, I9: the higher epoch wins, the newcomers join it")
def test_newcomers_at_an_empty_server_give_way_to_the_old_group(own_server: RedisServer, new_node: NodeFactory) -> None:
    """A newcomer forms a group of its own there; the old group's epoch is higher."""
    old = [new_node(1, 3, url=own_server.url, keep_alive_interval=INTERVAL, last_call_timeout=2) for _ in range(2)]
    join(*old)
    join(*old)
    with ExitStack() as stack:
        for node in old:  # they come later
            stack.enter_context(silenced(node))
        own_server.get_client().flushall()
        # The new group gives way for one and a half of its intervals.
        newcomer = new_node(1, 3, url=own_server.url, keep_alive_interval=4, last_call_timeout=0)
        assert join(newcomer) == [(0, 1)]
    wait_until(lambda: newcomer.num_nodes_waiting() > 0, "the newcomer is fenced", 20)
    assert all(node.num_nodes_waiting() == 0 for node in old)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(newcomer.next_rendezvous)
        wait_until(lambda: all(node.num_nodes_waiting() for node in old), "there is room for it", 20)
        assert sorted([*join(*old), (joined.result(20).rank, 3)]) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.fault("Redis forgets that a run was closed", "I5: it is closed again")
def test_what_was_closed_stays_closed(own_server: RedisServer, new_node: NodeFactory) -> None:
    nodes = [new_node(2, 2, url=own_server.url, keep_alive_interval=INTERVAL) for _ in range(2)]
    join(*nodes)
    nodes[0].set_closed()
    wait_until(lambda: nodes[1].node.view.record_of_closing[0] != "", "the other knows of it", 20)
    own_server.get_client().flushall()
    wait_until(lambda: bool((run := state(nodes[0])) and run.closed), "it is put back", 20)


@pytest.mark.fault("Redis is flushed, and a member finishes before any heartbeat", "I5, I9: that closes the run")
@pytest.mark.parametrize("run_then", ["closes", "stops"])
def test_a_member_that_finishes_closes_a_forgotten_run(
    own_server: RedisServer, new_node: NodeFactory, run_then: RunThen
) -> None:
    nodes = [new_node(1, 2, url=own_server.url, keep_alive_interval=INTERVAL) for _ in range(2)]
    join(*nodes)
    beat = nodes[1].keeper.beat
    nodes[1].keeper.beat = lambda: None  # type: ignore[method-assign]  # its heartbeat comes later
    own_server.get_client().flushall()
    assert nodes[0].end(Left(cause="finished"), run_then)
    nodes[1].keeper.beat = beat  # type: ignore[method-assign]
    wait_until(lambda: nodes[1].node.view.closed, "the other knows of it", 20)
    assert bool(nodes[1].node.view.is_stopped) == (run_then == "stops")
    nodes[1].keeper.beat()
    assert nodes[1].num_nodes_waiting() == 0


@pytest.mark.fault(
    "the report of the worker that failed first reaches Redis last", "the host where it failed first is charged"
)
def test_a_late_report_charges_the_host_that_failed_first(own_server: RedisServer, new_node: NodeFactory) -> None:
    """The report was sent in time, and lost; when it is sent again it carries the age of the failure by then."""
    with FaultyProxy(HOST, port_of(own_server)) as proxy:
        through = own_server.url.replace(str(port_of(own_server)), str(proxy.port))
        first = new_node(2, 2, url=through, node_name="first", keep_alive_interval=2)
        second = new_node(2, 2, url=own_server.url, node_name="second", keep_alive_interval=2)
        join(first, second)
        failed_at = time.monotonic()

        def fail_later() -> None:
            # Redis counts back from when a report reaches it: this is more than a busy machine takes to send one.
            wait_until(lambda: time.monotonic() > failed_at + 0.5, "Redis can tell the two failures apart")
            assert charge(second, time.monotonic()) == (1, 1, None)

        lost = proxy.add(Fault(b"CAUSE", lose_request=True, meanwhile=fail_later))
        assert charge(first, failed_at) == (1, 1, None)
        assert lost.fired.is_set()
        assert charge(second, time.monotonic()) == (1, 0, None)
        lost.release()
        first.shutdown()


def charge(node: RedisRendezvousHandler, failed_at: float) -> tuple[int, int, Event | None]:
    """Restarts of the job, rounds in a row that are charged to this host, and why the run is to be stopped."""
    return node.node.charge(failed_at, -1, News.NEVER_ANY, Failed(message="CAUSE"), (-1, -1, -1), final=False)


@pytest.mark.fault("Redis is killed and comes back empty", PROMISE)
@pytest.mark.parametrize("agent", quick_first([True, False]), ids=["redelastic run", "torchrun"])
def test_a_training_outlives_a_server_that_comes_back_empty(
    own_server: RedisServer, tmp_path: Path, *, agent: bool
) -> None:
    new_job = AgentJob if agent else Job
    with new_job(own_server, tmp_path, "1:3", conf=LONG_LEASES) as job:
        job.start("a", "b", "c")
        epoch = job.wait_round("abc")
        workers = {line.pid for line in job.lines("start")}
        killed(own_server, 2 * 1.2)
        steps = len(job.lines("step"))
        job.wait("the record is there again", lambda: len(job.redis("members") or []) == 3)
        job.wait("they train on", lambda: len(job.lines("step")) > steps + 30)
        assert {line.pid for line in job.lines("start")} == workers, "no worker was restarted"
        assert job.epoch == epoch
        assert job.redis("run")["epoch"] == str(epoch)

        fault = job.note("SIGKILL of rank 0")
        victim = job.by_rank(epoch)[0]
        victim.kill()
        names = set("abc") - {victim.name}
        job.wait_round(names, epoch, fault=fault)
        job.finish(*names)


@pytest.mark.fault("Redis forgets a stopped run; a node that knows only of its closing is first", "I5: it is stopped")
def test_what_was_stopped_stays_stopped(own_server: RedisServer, new_node: NodeFactory) -> None:
    nodes = [new_node(2, 2, url=own_server.url, keep_alive_interval=INTERVAL) for _ in range(2)]
    join(*nodes)
    nodes[0].set_closed()
    nodes[1].node.watch.update(View.apply_closing, "by hand", stop=True)
    own_server.get_client().flushall()
    wait_until(lambda: all(node.node.view.is_stopped for node in nodes), "both know that it is stopped", 20)
    assert state(nodes[0]).stopped  # type: ignore[union-attr]


@pytest.mark.fault(
    "Redis is out of memory, and a lease has run out", "I9: nobody is evicted until it takes heartbeats again"
)
def test_a_server_without_memory_evicts_nobody(own_server: RedisServer, new_node: NodeFactory) -> None:
    """It refuses a script at its first command that takes memory; commands that remove a node take none.

    One script that got through would hide the outage: the nodes whose heartbeats are refused would be lost, too.
    """
    nodes = [new_node(1, 2, url=own_server.url, keep_alive_interval=30) for _ in range(2)]
    join(*nodes)
    one, other = nodes
    with own_server.get_client() as client:
        client.zadd(one.backend.keys.leases, {other.node.id: 1})
        client.config_set("maxmemory", 1)
        with pytest.raises(UnavailableError):
            one.keeper.beat()
        client.config_set("maxmemory", 0)
        assert client.sismember(one.backend.keys.members, other.node.id)
        one.keeper.beat()
        assert [event.node for event in events(one, "lost")] == [other.node.id], "now it is"


@pytest.mark.fault(
    "Redis comes back empty on a host whose clock is behind", "I7: every node receives what happens next"
)
def test_wake_ups_of_a_server_with_lower_ids_are_received(own_server: RedisServer, new_node: NodeFactory) -> None:
    nodes = [new_node(1, 3, url=own_server.url, keep_alive_interval=INTERVAL) for _ in range(3)]
    join(*nodes)

    def all_hear_of(name: str) -> bool:
        return all(any(drain.node == name for drain in node.node.view.drains) for node in nodes)

    with own_server.get_client() as client:
        entry = {"event": "drain", "node": "x", "reason": "ahead", "timeout": "1000", "epoch": "1"}
        client.xadd(nodes[0].backend.keys.wake, entry, id=f"{client.time()[0] + 3600}000-0")
    wait_until(lambda: all_hear_of("x"), "all have read an id that is an hour ahead", 20)
    killed(own_server, 0.0)
    wait_until(lambda: bool((run := state(nodes[0])) and len(run.members) == 3), "the round is put back", 20)
    drained = nodes[1].node
    drained.drain("test", 60)
    wait_until(lambda: all_hear_of(drained.id), "all have heard of another drain", 20)
