"""Drains without workers: what they count in Redis, and when each node leaves; and one that comes to nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from redelastic.agent import RedisElasticAgent
from redelastic.agent.regrouping import RegroupingAgent
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Admitted, Event, Left, Saved
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.node import DrainedError
from redelastic.store import RedisStore
from redelastic.workers import drains
from redelastic.workers.drains import MAX_LOGGED_DRAINS, Drains
from tests.support.commands import until
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all

N = 12


class Workers:
    """They have saved what they were asked to once the test says so."""

    def __init__(self) -> None:
        self.can_be_asked = 1
        self.asked = 0
        self.signalled = 0
        self.saved = False
        self.channels = None

    def ask_to_save(self, *, by_signal: bool) -> int:
        self.asked += 1
        self.signalled += by_signal
        self.saved = False
        return self.can_be_asked

    def await_own_save(self, *, leads: bool) -> None:
        self.leads = leads
        self.saved = False

    def have_saved(self) -> bool:
        return self.saved


class AtOnce:
    """A reporter that runs its tasks at once."""

    def send(self, task: Callable[[], object]) -> None:
        task()


class Site:
    """The nodes of one round, each with its drains."""

    def __init__(
        self, connection: Connection, keys: RunKeys, new_node: NodeFactory, n: int, most: int | None = None
    ) -> None:
        self.control = RunControl(connection, keys)
        self.nodes = [new_node(n, most or n, keep_alive_interval=0.5, last_call_timeout=0) for _ in range(n)]
        with ThreadPoolExecutor(n) as pool:
            join_all(pool, *self.nodes)
        self.store = RedisStore(connection, keys.run_id, epoch=1, timeout=20)
        self.workers = [Workers() for _ in self.nodes]
        self.drains = [self._drains(i) for i in range(n)]

    def _drains(self, i: int) -> Drains:
        node, workers, reporter = self.nodes[i].node, self.workers[i], AtOnce()
        note = partial(self._note, node.id)
        fakes: Any = (workers, reporter)
        assert node.view.round
        of_round: dict[str, Any] = {"store": self.store, "rank": node.view.round.rank, "size": len(self.nodes)}
        return Drains(node, fakes[0], **of_round, reporter=fakes[1], note=note)

    def _note(self, node: str, event: Event) -> None:
        self.control.note(replace(event, node=node))

    @property
    def saved(self) -> list[Saved]:
        return [event for event in self.control.events() if isinstance(event, Saved)]

    def has_drained(self, i: int) -> bool:
        try:
            self.drains[i].advance()
        except DrainedError:
            return True
        return False


@pytest.fixture
def site(connection: Connection, keys: RunKeys, new_node: NodeFactory) -> Callable[[int], Site]:
    return partial(Site, connection, keys, new_node)


@pytest.mark.fault("all nodes drain at once, as at Slurm's time limit", "each saves once, and what it costs is O(N)")
def test_when_all_nodes_drain_each_saves_and_counts_once(
    site: Callable[[int], Site], client: redis.Redis, keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    here = site(N)
    for node in here.nodes:
        node.node.drain("SIGTERM", 600)
    for node in here.nodes:
        until(lambda node=node: len(node.node.view.drains) == N, "it has heard of all drains")  # type: ignore[misc]
    assert not any(here.has_drained(i) for i in range(N)), "nobody has saved"
    for workers in here.workers[1:]:
        workers.saved = True
    assert not any(here.has_drained(i) for i in range(N)), "one has not saved"
    here.workers[0].saved = True
    for i in range(N):
        until(partial(here.has_drained, i), "all have saved, so it leaves")

    assert [workers.asked for workers in here.workers] == [1] * N
    assert sorted(event.node for event in here.saved) == sorted(node.node.id for node in here.nodes)
    assert {len(event.drains) for event in here.saved} == {min(N, MAX_LOGGED_DRAINS)}
    wake: Any = client.xrange(keys.wake)
    last, kept = wake[-1][0], client.hgetall(keys.store(1).data)
    assert kept == {b"redelastic/saved/%d" % rank: last for rank in range(N)}, "one key for each, whoever drains"
    of_one = [r for r in caplog.records if r.name.endswith("drains") and r.threadName == "MainThread"]
    assert len(of_one) <= N * (MAX_LOGGED_DRAINS + 2)


def test_a_node_leaves_when_its_own_time_is_up_and_no_sooner(site: Callable[[int], Site]) -> None:
    here = site(2)
    here.nodes[0].node.drain("by hand", 600)
    here.nodes[1].node.drain("SIGTERM", 0)
    for node in here.nodes:
        until(lambda node=node: len(node.node.view.drains) == 2, "it has heard of both")  # type: ignore[misc]
    assert not here.has_drained(0), "its time is not up, nor has the other told anything"
    assert here.has_drained(1)
    assert all(event.late for event in here.saved)


def test_a_node_that_has_not_heard_of_its_own_drain_waits_for_the_others(site: Callable[[int], Site]) -> None:
    """Its agent knows before Redis does: the others have not been asked yet."""
    here = site(2)
    here.nodes[0].node.watch.begin_drain("SIGTERM", 600)
    assert not here.has_drained(0)
    here.workers[0].saved = True
    assert not here.has_drained(0)


def test_of_one_drain_the_event_says_for_whom_and_how_many_were_asked(site: Callable[[int], Site]) -> None:
    here = site(2)
    leaving = here.nodes[0].node
    here.workers[0].can_be_asked = 0
    leaving.drain("SIGTERM", 600)
    until(lambda: here.nodes[1].node.view.drains, "the other has heard of it")
    assert not here.has_drained(0) | here.has_drained(1), "they are asked to save only now"
    for workers in here.workers:
        workers.saved = True
    until(lambda: here.has_drained(0) or here.has_drained(1), "both have saved, and it leaves")
    assert [event.drains for event in here.saved] == [(leaving.id,)] * 2
    assert {event.node: event.asked for event in here.saved} == {leaving.id: 0, here.nodes[1].node.id: 1}


def test_a_save_for_a_drain_that_came_to_nothing_does_not_count_for_a_later_one(
    site: Callable[[int], Site], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = site(3)
    stuck, leaving = here.nodes[2].node, here.nodes[0].node
    assert here.control.drain(stuck.id, "by hand", 600)
    for node in here.nodes:
        until(lambda node=node: node.node.view.drains, "it has heard of the drain")  # type: ignore[misc]
    for i in range(3):
        here.has_drained(i)
        here.workers[i].saved = True
    until(lambda: sum(here.has_drained(i) for i in range(3)), "all have saved; yet the node does not leave")

    monkeypatch.setattr(drains, "RESAVE_INTERVAL", 0.0)
    leaving.drain("SIGTERM", 600)
    for node in here.nodes:
        until(lambda node=node: len(node.node.view.drains) == 2, "it has heard of both")  # type: ignore[misc]
    for i in (0, 1, 2):
        here.has_drained(i)
    assert [workers.asked for workers in here.workers] == [2] * 3
    here.workers[0].saved = True
    assert not here.has_drained(0), "two have not saved for it"
    for i in (1, 2):
        here.workers[i].saved = True
        here.has_drained(i)
    until(lambda: here.has_drained(0), "now they have, so it leaves")
    assert [event.drains for event in here.saved] == [(stuck.id,)] * 3 + [(leaving.id,)] * 3


def test_workers_that_fail_do_not_wait_for_ever_for_a_node_that_drains(
    connection: Connection, keys: RunKeys, new_node: NodeFactory, tmp_path: Path
) -> None:
    """torchrun has no agent of ours, and so does not drain; but anybody may ask its node to."""
    nodes = [new_node(2, 2, keep_alive_interval=0.4) for _ in range(2)]
    fail = "until test -e {}; do sleep 0.02; done; exit 1"
    mine, other = (
        WorkerSpec("test", 1, node, entrypoint="sh", args=("-c", fail.format(tmp_path / name)), max_restarts=0)
        for node, name in zip(nodes, ("mine", "other"), strict=True)
    )
    agents = (
        RedisElasticAgent(mine, DefaultLogsSpecs(str(tmp_path / "logs-a")), shutdown_timeout=0.5),
        RegroupingAgent(other, DefaultLogsSpecs(str(tmp_path / "logs-b"))),
    )
    control = RunControl(connection, keys)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(agent.run) for agent in agents]
        until(lambda: [event for event in control.events() if event.event == "started"], "the workers run")
        assert control.drain(nodes[1].node.id, "by hand", 0)
        until(lambda: nodes[0].node.view.drains, "it is known")
        try:
            (tmp_path / "mine").touch()
            assert ends[0].result(20).state == WorkerState.FAILED
        finally:
            (tmp_path / "other").touch()
            ends[1].result(20)
            nodes[1].end(Left(cause="drained"), "goes on", 5)


# -- saves for nodes that wait to be let in, and for people


@pytest.fixture
def waiting(site: Callable[[int, int], Site], new_node: NodeFactory) -> Iterator[tuple[Site, Callable[[float], Any]]]:
    """Two nodes that train, and a function with which a third one joins; it returns what is to be its round."""
    here = site(2, 3)
    with ThreadPoolExecutor(1) as pool:

        def join(timeout: float) -> Any:
            node = new_node(2, 3, keep_alive_interval=0.5, admit_timeout=timeout)
            return pool.submit(node.next_rendezvous)

        yield here, join
        here.control.close("by the test", stop=False)


def heard(here: Site) -> None:
    for node in here.nodes:
        until(lambda node=node: node.node.view.saves, "it has heard of the save")  # type: ignore[misc]
    assert not any(here.has_drained(i) for i in range(2))


def is_let_in(here: Site) -> bool:
    assert not any(here.has_drained(i) for i in range(2))
    return all(node.num_nodes_waiting() > 0 for node in here.nodes)


def test_a_new_node_is_let_in_when_all_have_saved(waiting: tuple[Site, Callable[[float], Any]]) -> None:
    here, join = waiting
    joining = join(600)
    heard(here)
    assert [(workers.asked, workers.signalled) for workers in here.workers] == [(1, 0)] * 2, "by signal to nobody"
    here.workers[0].saved = True
    for _ in range(3):
        assert not is_let_in(here), "one has not saved"
    here.workers[1].saved = True
    until(partial(is_let_in, here), "all have saved")
    with ThreadPoolExecutor(2) as pool:
        rounds = [*pool.map(lambda node: node.next_rendezvous(), here.nodes), joining.result(30)]
    assert sorted((joined.rank, joined.world_size) for joined in rounds) == [(0, 3), (1, 3), (2, 3)]
    (admitted,) = [event for event in here.control.events() if isinstance(event, Admitted)]
    assert admitted.saved
    assert {event.drains for event in here.saved} == {()}


def test_a_new_node_is_let_in_when_the_time_to_save_is_over(waiting: tuple[Site, Callable[[float], Any]]) -> None:
    here, join = waiting
    join(0.5)
    heard(here)
    until(partial(is_let_in, here), "the time is over")
    (admitted,) = [event for event in here.control.events() if isinstance(event, Admitted)]
    assert not admitted.saved


def test_a_new_node_may_wait_for_a_checkpoint_of_the_jobs_own(waiting: tuple[Site, Callable[[float], Any]]) -> None:
    here, join = waiting
    join(math.inf)
    heard(here)
    assert [workers.asked for workers in here.workers] == [0, 0]
    assert sorted(workers.leads for workers in here.workers) == [False, True]
    for workers in here.workers:
        assert not is_let_in(here)
        workers.saved = True
    until(partial(is_let_in, here), "both have saved")


def test_a_new_node_that_waits_is_not_forgotten_when_a_person_asks(
    waiting: tuple[Site, Callable[[float], Any]],
) -> None:
    here, join = waiting
    join(math.inf)
    heard(here)
    assert here.control.save("by hand", 600)
    for node in here.nodes:
        until(lambda node=node: len(node.node.view.saves) == 2, "it has heard of both")  # type: ignore[misc]
    assert not is_let_in(here)
    for workers in here.workers:
        workers.saved = True
    until(partial(is_let_in, here), "both have saved")


@pytest.mark.parametrize("timeout", [600, math.inf])
def test_workers_end_for_a_new_node_only_if_they_were_asked_to_save(
    waiting: tuple[Site, Callable[[float], Any]], timeout: float
) -> None:
    here, join = waiting
    join(timeout)
    heard(here)
    assert {drains.admits for drains in here.drains} == {timeout < math.inf}


def test_a_drain_asks_by_signal_though_workers_were_asked_without(
    waiting: tuple[Site, Callable[[float], Any]],
) -> None:
    here, join = waiting
    join(600)
    heard(here)
    here.nodes[1].node.drain("SIGTERM", 600)
    for node in here.nodes:
        until(lambda node=node: node.node.view.drains, "it has heard of the drain")  # type: ignore[misc]
    assert not here.has_drained(1)
    assert (here.workers[1].asked, here.workers[1].signalled) == (2, 1)


def test_of_a_checkpoint_that_a_person_asks_for_it_is_known_who_has_saved(site: Callable[[int], Site]) -> None:
    here = site(2)
    asked = here.control.save("by hand", 600)
    assert asked
    heard(here)
    assert here.control.unsaved(asked) == [0, 1]
    first = next(i for i in range(2) if here.nodes[i].node.view.round.rank == 0)  # type: ignore[union-attr]
    here.workers[first].saved = True
    assert not here.has_drained(first)
    assert here.control.unsaved(asked) == [1]
    assert not here.nodes[0].num_nodes_waiting(), "nobody regroups"
