"""`redelastic drain`: a node is asked to save and leave, and `--wait` reports the outcome."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redelastic.monitoring import operator
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Event, Left, Lost
from redelastic.monitoring.operator import Drain
from redelastic.monitoring.records import Node, Run
from tests.support.commands import Cli, rank_of, until, with_agent
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all
from tests.support.scenes import START

pytest_plugins = ["tests.support.cli_fixtures"]


class TestDrain:
    def test_a_node_without_redelastics_agent(
        self, cli: Cli, new_node: NodeFactory, control: RunControl, run_id: str
    ) -> None:
        new_node(1, 1).next_rendezvous()
        done = cli("drain", run_id, "0")
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("redelastic drain: Node ")
        assert "send SIGTERM to its torchrun" in done.err
        assert not control.state().nodes[0].draining

    @pytest.mark.parametrize("by", ["rank", "name", "id"])
    def test_the_node_is_asked(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str, by: str
    ) -> None:
        nodes = [with_agent(new_node(2, 2, node_name=f"host-{i}")) for i in range(2)]
        join_all(pool, *nodes)
        members = [node.node for node in nodes]
        named = {"rank": str(rank_of(members[1])), "name": "host-1", "id": members[1].id}[by]
        done = cli("drain", run_id, named, "--reason", "spot VM goes", "--timeout", "12", "--json")
        assert done.code == 0
        assert (done.json["node"], done.json["asked"], done.json["left"]) == (members[1].id, True, None)
        for member in members:
            until(lambda member=member: member.view.drains, "the node hears of it")  # type: ignore[misc]
            [begun] = member.view.drains
            assert (begun.node, begun.timeout) == (members[1].id, 12)
            assert begun.reason.endswith(": spot VM goes")
        again = cli("drain", run_id, named)
        assert "is already draining" in again.out
        assert "spot VM goes" in again.out

    def test_wait_until_it_has_left(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        node = with_agent(new_node(1, 1))
        node.next_rendezvous()

        def agent() -> None:
            until(lambda: node.node.view.drains, "it is asked")
            node.end(Left(cause="drained"), "goes on")

        leaving = pool.submit(agent)
        done = cli("drain", run_id, "0", "--wait", "--json")
        assert (done.code, done.json["left"]) == (0, True)
        leaving.result(60)

    def test_wait_for_one_that_dies(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        nodes = [with_agent(new_node(2, 2)) for _ in range(2)]
        join_all(pool, *nodes)
        victim = nodes[0].node

        def die() -> None:
            until(lambda: victim.view.drains, "it is asked")
            victim.stop()

        dying = pool.submit(die)
        done = cli("drain", run_id, str(rank_of(victim)), "--wait")
        assert done.code == 1
        assert "it died: it lost its lease" in done.err
        dying.result(60)

    def test_wait_for_one_that_leaves_with_many_others(
        self, cli: Cli, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str
    ) -> None:
        """Their events are merged under the first node's name."""
        nodes = [with_agent(new_node(20, 20, join_timeout=60)) for _ in range(20)]
        with ThreadPoolExecutor(20) as many:
            join_all(many, *nodes)
        last = max(nodes, key=lambda node: rank_of(node.node))

        def leave() -> None:
            until(lambda: last.node.view.drains, "it is asked")
            for node in [*(other for other in nodes if other is not last), last]:
                node.end(Left(cause="drained", reason="by hand"), "goes on")

        leaving = pool.submit(leave)
        done = cli("drain", run_id, str(rank_of(last.node)), "--wait")
        leaving.result(60)
        assert (done.code, done.err) == (0, "")

    def test_wait_reads_merged_events_that_come_after_the_node_is_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Merged events are recorded a second or two late: until then it is unknown whether a node died."""
        node = Node("b-1-0", "member", 1, 1.0, 0.0, "", {"name": "b"})
        lost = Lost(id="2-0", node="a-1-0", nodes=("a-1-0", "b-1-0"), cause="lease", silent_ms=6000)

        class Gone(RunControl):
            """A run from which the node is gone; each reading of its events takes a second."""

            def __init__(self, *readings: list[Event]) -> None:
                self.now, self.readings = 100.0, readings

            def state(self) -> Run:
                return Run("r", 1, 2, 1, 2, 1.0, None, None, False, None, 6.0, 0, 0, {}, [], (), START)

            def follow(self, *_: Any, **__: Any) -> Iterator[list[Event]]:
                for events in self.readings:
                    self.now += 1
                    yield events

        late = Gone(*[[]] * 6, [lost])
        monkeypatch.setattr(time, "monotonic", lambda: late.now)
        assert Drain(node, True, True, 30, late, "0", 200).wait() == "did not leave, it died: it lost its lease"
        late = Gone(*[[]] * 9)
        assert Drain(node, True, True, 30, late, "0", 102).wait() == "", "after a lease no event of the node can follow"

    def test_wait_for_one_that_stays(
        self, cli: Cli, new_node: NodeFactory, run_id: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(operator, "DRAIN_GRACE", 0.1)
        with_agent(new_node(1, 1)).next_rendezvous()
        done = cli("drain", run_id, "0", "--wait", "--timeout", "0.1", "--json")
        assert (done.code, done.json["left"]) == (1, False)

    def test_no_such_node(self, cli: Cli, new_node: NodeFactory, run_id: str) -> None:
        new_node(1, 1).next_rendezvous()
        done = cli("drain", run_id, "7")
        assert (done.code, done.err.count("\n")) == (4, 1)
