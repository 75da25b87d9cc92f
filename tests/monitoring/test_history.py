"""A run's history from its events, checked against the oracle, real nodes and stories."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import (
    BY_SCRIPTS,
    KINDS,
    Closed,
    Drain,
    Event,
    Hung,
    Left,
    Lost,
    Outage,
    Progressed,
    Readmitted,
    Saved,
    Started,
    decode,
)
from redelastic.monitoring.history import History, replay
from redelastic.monitoring.sentences import cause
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.nodes import NodeFactory
from tests.support.replays import SEQUENCES, Walk, recorded, spans, with_steps
from tests.support.scenes import HOSTILE, SCENES, START, Story, three_nodes
from tests.support.servers import wait_until


def check_spans(history: History) -> None:
    for node in history.nodes:
        times = [time for span in node.spans for time in (span.start, span.end)]
        assert times == sorted(times), node
        assert not times or history.start <= times[0] <= times[-1] <= history.end, node


class TestAgainstTheOracle:
    """`test_oracle.py` compares the oracle with the Lua."""

    @pytest.mark.parametrize("sizes", [(1, 3), (2, 4), (3, 8)], ids=str)
    def test_members_ranks_and_states_are_the_oracles(self, sizes: tuple[int, int]) -> None:
        rounds = 0
        for seed in range(SEQUENCES // 3):
            seen = Walk(seed, sizes).seen
            events = recorded(seen)
            for now, state in seen:
                if not state.events:
                    continue
                history = replay(with_steps(events[: len(state.events)]), now / 1000 + 1)
                check_spans(history)
                present = {node.id: node.spans[-1].state for node in history.nodes if node.gone is None}
                broken = state.broken is not None
                expected = dict.fromkeys(state.members, "regrouping" if broken else "training")
                expected |= {n: "regrouping" if at < 0 else "waiting" for n, at in state.candidates.items()}
                if state.closed is None:  # in a closed run nobody regroups for a broken round
                    assert present == expected, (seed, state)
                else:
                    assert present.keys() == expected.keys(), (seed, state)
                assert (history.closed is None) == (state.closed is None), seed
                if state.epoch:
                    last = history.rounds[-1]
                    assert (last.epoch, last.size, last.members) == (state.epoch, state.size, state.ranks), seed
                    assert [*last.members] == sorted(state.ranks, key=lambda node: state.ranks[node])
                    rounds = max(rounds, state.epoch)
        assert rounds > 5  # else nothing was compared

    @pytest.mark.parametrize("sizes", [(1, 3), (3, 8)], ids=str)
    def test_a_stream_without_its_beginning_gives_no_wrong_ranks(self, sizes: tuple[int, int]) -> None:
        known = 0
        for seed in range(SEQUENCES // 3):
            seen = Walk(seed, sizes).seen
            events, state = recorded(seen), seen[-1][1]
            for first in range(1, len(events), 3):
                history = replay(events[first:])
                check_spans(history)
                if events[first].epoch:
                    assert not history.complete
                if state.epoch and history.rounds:
                    last = history.rounds[-1]
                    assert (last.epoch, last.size) == (state.epoch, state.size)
                    assert len(last.members) <= last.size
                    if sizes[1] == 8:  # no round was full, so no unseen spare waited
                        wrong = {n: r for n, r in last.members.items() if r not in (None, state.ranks.get(n))}
                        assert not wrong, (seed, first)
                        assert last.members.keys() <= state.ranks.keys(), (seed, first)
                        known += len(last.members) == last.size
        assert known or sizes[1] < 8


class TestAgainstRealNodes:
    def test_joins_a_death_a_leave_spares_and_closing(
        self, new_node: NodeFactory, connection: Connection, client: redis.Redis, keys: RunKeys
    ) -> None:
        control = RunControl(connection, keys)
        by_rank: list[list[str]] = []

        def regroup(nodes: Sequence[RedisRendezvousHandler], n: int) -> None:
            for info in pool.map(lambda node: node.next_rendezvous(), nodes):
                assert info.world_size == n
            stored: Any = client.zrange(keys.ranks, 0, -1)
            by_rank.append([node.decode() for node in stored])
            last = replay(control.events()).rounds[-1]
            assert [*last.members.items()] == [(node, i) for i, node in enumerate(by_rank[-1])]

        def wait_for(event: str, n: int) -> None:
            wait_until(lambda: sum(e.event == event for e in control.events()) == n, f"{n} times {event}")

        with ThreadPoolExecutor(8) as pool:
            a, b, c, d, e = (new_node(2, 3, keep_alive_interval=0.5) for _ in range(5))
            regroup([a, b, c], 3)
            spares = []
            for i, node in enumerate((d, e)):  # one after the other: their order is their place
                spares.append(pool.submit(node.next_rendezvous))
                wait_for("joined", 4 + i)
            first = {node.node.id: node for node in (a, b, c)}
            second, third = first[by_rank[0][0]], first[by_rank[0][2]]
            kept = next(node for node in (a, b, c) if node not in (second, third))
            second.node.stop()  # the node of rank 0 dies
            wait_for("lost", 1)
            regroup([kept, third], 3)
            assert spares[0].result(20).world_size == 3
            assert by_rank[1] == [d.node.id, *by_rank[0][1:]]
            gone = kept.node.id
            assert kept.end(Left(cause="drained", reason="by a test"), "goes on")
            wait_for("left", 1)
            regroup([d, third], 3)
            assert spares[1].result(20).world_size == 3
            third.node.stop()
            wait_for("lost", 2)
            regroup([d, e], 2)
            assert d.shutdown()
        history = replay(control.events())
        assert [[*this.members] for this in history.rounds] == by_rank
        assert [this.broken_by and this.broken_by.event for this in history.rounds[:3]] == ["lost", "left", "lost"]
        assert history.rounds[3].broken_at is None
        assert history.closed
        assert (history.closed.node, cause(history.closed)) == (d.node.id, f"{d.node.id} finished")
        lost = {node.id for node in history.nodes if isinstance(node.gone, Lost) and node.gone.cause == "lease"}
        assert lost == {by_rank[0][0], by_rank[0][2]}
        left = next(node for node in history.nodes if node.id == gone).gone
        assert isinstance(left, Left)
        assert (left.cause, left.reason) == ("drained", "by a test")
        assert history.rounds[0].down is not None
        assert history.rounds[0].down >= 0.9  # it had been silent for its lease
        check_spans(history)


class TestReplay:
    def test_where_the_time_of_each_node_went(self) -> None:
        story = Story()
        a, b, c = (story.node(name) for name in "abc")
        story.join(0, [a])
        story.join(4, [b])
        story.complete(10, [a, b], "max_nodes", steps=False)
        story.add(12, Started(node=a, rank=0))
        story.add(13, Started(node=b, rank=1))
        story.add(16, Progressed(node=a, step=1, since_progress_ms=500))
        story.join(20, [c])  # a spare: it breaks nothing
        story.lose(40, b, 6500)
        story.regroup(41, [a])
        story.complete(41.5, [a, c], "max_nodes", steps=False)
        story.add(42, Started(node=a, rank=0, last_step=20, since_progress_ms=10_000))
        story.add(44, Started(node=c, rank=1))
        story.add(45, Progressed(node=a, step=16, last_step=20))
        story.add(47, Progressed(node=a, step=21, last_step=20))
        story.add(50, Left(node=a, cause="finished"))
        story.add(50, Closed(node=a, cause="finished"))
        history = replay(story.events(), START + 60)
        assert spans(history, "a") == [
            ("waiting", 0, 10, 0, None),
            ("starting", 10, 15.5, 1, 0),
            ("training", 15.5, 32, 1, 0),  # until the last step, which is known from the next round's start
            ("regrouping", 32, 41.5, 1, 0),
            ("starting", 41.5, 45, 2, 0),
            ("redone", 45, 47, 2, 0),
            ("training", 47, 50, 2, 0),
        ]
        assert spans(history, "b")[-1] == ("regrouping", 32, 40, 1, 1)
        assert spans(history, "c") == [
            ("waiting", 20, 41.5, 0, None),
            ("starting", 41.5, 45, 2, 1),
            ("redone", 45, 47, 2, 1),
            ("training", 47, 60, 2, 1),
        ]
        assert history.seconds == {
            "training": pytest.approx(16.5 + 16.5 + 3 + 13),
            "redone": pytest.approx(2 + 2),
            "starting": pytest.approx(5.5 + 5.5 + 3.5 + 3.5),
            "regrouping": pytest.approx(9.5 + 8),
            "waiting": pytest.approx(10 + 6 + 21.5),
            "unknown": 0,
        }
        first, second = history.rounds
        assert first.down == pytest.approx(8)
        assert first.restart == pytest.approx(10.5)
        assert first.broken_at == START + 40
        assert first.broken_by
        assert cause(first.broken_by) == f"{b} lost its lease after 6.5 s"
        assert (second.broken_at, second.down) == (None, None)  # a node that closes the run as it leaves breaks nothing

    def test_an_event_that_agents_report_twice_counts_once(self) -> None:
        events = three_nodes()
        hung = next(event for event in events if isinstance(event, Hung))
        at = events.index(hung)
        again = replace(hung, id=hung.id + "1", time=hung.time + 0.3)
        assert len(replay([*events[: at + 1], again, *events[at + 1 :]]).events) == len(events)
        later = replace(hung, id=hung.id + "2", time=hung.time + 90)
        assert len(replay([*events[: at + 1], later, *events[at + 1 :]]).events) == len(events) + 1

    def test_a_merged_event_is_no_repeat_of_a_nodes_own(self) -> None:
        alone = Saved(id="1-0", time=START, epoch=1, size=20, node="a-1-0", drains=("z",))
        together = replace(alone, id="2-0", time=START + 5, nodes=("a-1-0", "b-1-0"))
        assert replay([alone, together]).events == [alone, together]
        again = replace(together, id="3-0", time=START + 6)
        assert replay([alone, together, again]).events == [alone, together]

    @pytest.mark.parametrize("kind", [name for name, kind in KINDS.items() if kind in BY_SCRIPTS])
    def test_events_of_scripts_are_never_taken_for_repeats(self, kind: str) -> None:
        make: Any = KINDS[kind]
        first: Event = make(id="1-0", time=START, epoch=1, size=2, node="a-1-0")
        events = [first, replace(first, id="2-0", time=START + 5)]
        assert replay(events).events == events

    def test_ranks_are_those_of_the_completed_round(self) -> None:
        story = Story()
        a, b, c = (story.node(name) for name in "abc")
        story.join(0, [a, b, c])
        story.complete(3, [b, c, a], "max_nodes")  # by label, not by arrival
        assert replay(story.events()).rounds[0].members == {b: 0, c: 1, a: 2}
        story.add(4, Started(node=c, rank=1))
        without_beginning = [event for event in story.events() if isinstance(event, Started)]
        assert replay(without_beginning).rounds[0].members == {c: 1}

    def test_outages_and_drains_break_nothing(self) -> None:
        story = Story()
        a, b = story.node("a"), story.node("b")
        story.join(0, [a, b])
        story.complete(1, [a, b], "max_nodes")
        story.add(30, Outage(away_ms=12_500))
        story.add(40, Drain(node=b, reason="by hand"))
        story.add(50, Readmitted(node="a-host", reason="by hand"))  # a host, and no node
        history = replay(story.events())
        assert [(start - START, end - START) for start, end in history.outages] == [(17.5, 30)]
        assert history.rounds[0].broken_at is None
        assert len(history.nodes) == 2

    def test_a_part_of_it(self) -> None:
        whole = replay(three_nodes())
        part = whole.since(START + 100)
        assert (part.start, part.complete, part.end) == (START + 100, False, whole.end)
        assert [this.epoch for this in part.rounds] == [3, 4, 5]
        assert {node.name for node in part.nodes} == {"gpu-a", "gpu-c", "gpu-d"}
        cut = [min(max(s.end - START - 100, 0), s.end - s.start) for node in whole.nodes for s in node.spans]
        assert sum(part.seconds.values()) == pytest.approx(sum(cut))
        check_spans(part)

    @pytest.mark.parametrize("scene", [pytest.param(s, marks=[pytest.mark.long] * (s == "1000")) for s in SCENES])
    def test_any_part_of_a_stream_can_be_replayed(self, scene: str) -> None:
        events = SCENES[scene]()
        for first in range(0, len(events), max(1, len(events) // 25)):
            check_spans(replay(events[first:]))

    def test_hostile_values_in_the_stream_do_no_harm(self) -> None:
        rng = random.Random(0)
        values = [
            "",
            "0",
            "1",
            "99999999999999999999",
            "-5",
            "9e9",
            "lease",
            "a-1-b b-1-c",
            "c " * 9,
            HOSTILE,
            "[]",
            "{",
        ]
        names = ["a-1-b", "b-1-c", HOSTILE, "", "-", "c"]
        numbers = ["0", "1", "2", "3", "10" * 15, "x"]
        for _ in range(300):
            at = [rng.choice((0, 10**12, 2 * 10**12, 10**16)) + rng.randrange(1000) for _ in range(20)]
            events = []
            for ms in sorted(at):
                kind = rng.choice([*KINDS, "x"])
                own = KINDS[kind].__dataclass_fields__ if kind in KINDS else ("x",)
                fields = {name: rng.choice(values) for name in own}
                fields |= {
                    "event": kind,
                    "node": rng.choice(names),
                    "epoch": rng.choice(numbers),
                    "size": rng.choice(numbers),
                }
                events.append(decode(f"{ms}-0", fields))
            check_spans(replay(events))


class TestExtended:
    """Extending a history without a new event gives what a replay until then gives."""

    @pytest.mark.parametrize("scene", SCENES)
    def test_scenes(self, scene: str) -> None:
        events = SCENES[scene]()
        self.check(events)

    @pytest.mark.parametrize("seed", range(20))
    def test_random_runs(self, seed: int) -> None:
        events = with_steps(recorded(Walk(seed, (1, 4)).seen))
        for length in range(1, len(events), 5):
            self.check(events[:length])

    def check(self, events: list[Event]) -> None:
        end = events[-1].time
        assert replay(events, end + 0.001).extended(end + 50) == replay(events, end + 50)
