"""A run's history from its events, checked against the oracle, real nodes and stories."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest
import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import (
    BY_SCRIPTS,
    KINDS,
    Closed,
    Completed,
    Drain,
    Event,
    Failed,
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
from tests.proofs import oracle, oracle_state
from tests.support.nodes import NodeFactory
from tests.support.scenes import HOSTILE, SCENES, START, Story, three_nodes
from tests.support.servers import wait_until

SEQUENCES = int(os.environ.get("REDELASTIC_REPLAY_SEQUENCES", "120"))  # of random requests, replayed


class Walk:
    """Random requests of nodes to the oracle; keeps the time and the state after each."""

    def __init__(self, seed: int, sizes: tuple[int, int]) -> None:
        self.random = random.Random(seed)
        self.settings = oracle_state.Settings(*sizes, replacement=self.random.choice((0, 2500)))
        self.state, self.now = oracle_state.State(), 1_000_000
        self.held: dict[str, int] = {}
        self.names = list("abcdefgh")
        self.seen: list[tuple[int, oracle_state.State]] = []
        for _ in range(60):
            steps = (self.join, self.all_join, self.beat, self.leave, self.close, self.wait)
            self.random.choices(steps, (4, 5, 3, 1, 0.05, 1))[0](self.random.randrange(len(self.names)))

    def send(self, request: oracle_state.Request) -> None:
        self.state, reply = oracle.apply(self.state, self.now, request)
        if reply[:1] == ("complete",):
            self.held[request[0]] = int(reply[1])
        self.seen.append((self.now, self.state))

    def ask(self, name: str) -> None:
        known = oracle_state.NOTHING._replace(incarnation=self.state.incarnation or "")
        self.send(oracle_state.Join(name, self.held.get(name, 0), f"{name} 1", "", self.settings, known))

    def join(self, pick: int) -> None:
        self.ask(self.names[pick])

    def all_join(self, _: int) -> None:
        for name in [*self.state.candidates, *sorted(self.state.members)]:
            self.ask(name)

    def beat(self, silent: int) -> None:
        self.now += self.settings.interval
        for name in [name for name in self.state.leases if name != self.names[silent]]:
            self.send(oracle_state.Beat(name, self.settings))

    def leave(self, pick: int) -> None:
        then = self.random.choice(("closes", "stops")) if self.random.random() < 0.06 else "goes on"
        self.send(oracle_state.Leave(self.names[pick], ("reason", "went"), then))  # type: ignore[arg-type]
        self.names[pick] += "'"  # a node that has left comes back under another name

    def close(self, _: int) -> None:
        self.send(oracle_state.Close("by hand", self.settings.ttl, 0))

    def wait(self, _: int) -> None:
        self.now += self.random.choice((1, 700, 2500, 9000))


def recorded(seen: Sequence[tuple[int, oracle_state.State]]) -> list[Event]:
    events: list[Event] = []
    for now, state in seen:
        for e in state.events[len(events) :]:
            common = {"event": e.event, "epoch": str(e.epoch), "size": str(e.size), "node": e.node}
            fields = zip(e.fields[::2], e.fields[1::2], strict=True)
            event = decode(f"{now}-{len(events)}", common | dict(fields))
            assert set(e.fields[::2]) <= {field.name for field in dataclasses.fields(event)}, "each field is defined"
            events.append(event)
    return events


def with_steps(events: Sequence[Event]) -> list[Event]:
    """The events of a run whose workers made a step as soon as each round was complete."""
    extended: list[Event] = []
    for event in events:
        extended.append(event)
        if isinstance(event, Completed):
            extended.append(Progressed(id=event.id + "1", time=event.time, epoch=event.epoch, node=event.node, step=0))
    return extended


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


def spans(history: History, name: str) -> list[tuple[str, float, float, int, int | None]]:
    """State, start and end in seconds after START, epoch and rank."""
    return [
        (span.state, round(span.start - START, 3), round(span.end - START, 3), span.epoch, span.rank)
        for node in history.nodes
        if node.name == name
        for span in node.spans
    ]


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

    @pytest.mark.parametrize("scene", SCENES)
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


def fault(what: Event, *, then: bool = True, since_ms: int = 5000) -> list[Event]:
    """One of two nodes, or its workers, fails at 50 s, 30 s after the first step; then lost steps are redone."""
    story = Story()
    a, b = story.node("a"), story.node("b")
    story.join(0, [a, b])
    story.complete(10, [a, b], start=10)
    story.add(50, replace(what, node=b))
    if then:
        rest = [a] if isinstance(what, Lost) else [a, b]
        story.regroup(50.5, rest)
        story.complete(52, rest, steps=False)
        story.add(55, Started(node=a, rank=0, last_step=40, since_progress_ms=since_ms))
        story.add(60, Progressed(node=a, step=11, last_step=40))
        story.add(75, Progressed(node=a, step=41, last_step=40))
    return story.events()


class TestEffectiveTrainingTime:
    def test_it_is_the_nodes_training_time_over_their_whole_time(self) -> None:
        story = Story()
        a, b = story.node("a"), story.node("b")
        story.join(0, [a, b])
        story.complete(10, [a, b])
        story.lose(70, b, 10000)  # it trained until 60
        story.regroup(71, [a])
        story.complete(80, [a])
        history = replay(story.events(), START + 100)
        assert history.ettr == pytest.approx((50 + 20 + 50) / (100 + 70))

    def test_a_spare_counts_only_while_no_round_stands(self) -> None:
        story = Story()
        a, b = story.node("a"), story.node("b")
        story.join(0, [a])
        story.complete(10, [a], "max_nodes")
        story.join(20, [b])  # a spare until the fault at 60, then it is waited for
        story.lose(70, a, 10000)
        story.complete(80, [b])
        history = replay(story.events(), START + 100)
        assert history.ettr == pytest.approx((50 + 20) / (70 + 40))

    def test_training_begins_with_the_first_step(self) -> None:
        story = Story()
        a = story.node("a")
        story.join(0, [a])
        story.complete(10, [a], steps=False)
        story.add(20, Started(node=a, rank=0))
        story.add(30.5, Progressed(node=a, step=1, since_progress_ms=500))
        history = replay(story.events(), START + 50)
        assert history.ettr == pytest.approx(20 / 50)
        assert history.seconds["starting"] == pytest.approx(20)

    def test_it_is_unknown_for_a_script_that_reports_no_steps(self) -> None:
        story = Story()
        a = story.node("a")
        story.join(0, [a])
        story.complete(10, [a], steps=False)
        story.add(20, Started(node=a, rank=0))
        history = replay(story.events(), START + 50)
        assert history.ettr is None
        assert history.seconds["starting"] == pytest.approx(10)
        assert history.seconds["unknown"] == pytest.approx(30)

    def test_redone_steps_are_no_training(self) -> None:
        history = replay(fault(Failed(age_ms=0, idle_before_ms=0)), START + 100)
        assert [span[:3] for span in spans(history, "a")] == [
            ("waiting", 0, 10),
            ("starting", 10, 20),
            ("training", 20, 50),
            ("regrouping", 50, 52),
            ("starting", 52, 60),
            ("redone", 60, 75),
            ("training", 75, 100),
        ]
        assert history.ettr == pytest.approx((30 + 25) / 100)

    @pytest.mark.parametrize(
        "what",
        [
            Failed(age_ms=1000, idle_before_ms=9000, exit_code=1),  # an exit 9 s after the last step
            Failed(age_ms=10_000, idle_before_ms=0, idle_ms=10_000),  # a hang, reported as a failure first
            Hung(idle_ms=10_000),
            Lost(cause="lease", silent_ms=10_000),
        ],
        ids=lambda event: event.event,
    )
    def test_training_ends_at_the_last_step_before_a_fault(self, what: Event) -> None:
        history = replay(fault(what, then=False), START + 51)
        trained = sum(span.end - span.start for span in history.nodes[0].spans if span.state == "training")
        assert trained == pytest.approx(20)

    def test_training_ends_at_the_last_step_that_the_next_round_reports(self) -> None:
        history = replay(fault(Lost(cause="lease", silent_ms=2000), since_ms=10_000), START + 100)
        assert [span[:3] for span in spans(history, "b")] == [
            ("waiting", 0, 10),
            ("starting", 10, 20),
            ("training", 20, 45),
            ("regrouping", 45, 50),
        ]

    def test_a_late_report_of_a_step_counts_for_no_other_round(self) -> None:
        story = Story()
        a = story.node("a")
        story.join(0, [a])
        story.complete(10, [a], steps=False)
        story.regroup(20, [a])
        story.complete(30, [a], steps=False)
        story.add(31, Progressed(node=a, step=5, since_progress_ms=5000))
        assert replay(story.events(), START + 50).seconds["training"] == 0

    def test_it_is_unknown_for_a_single_moment(self) -> None:
        assert replay(three_nodes()[:1]).ettr is None

    @pytest.mark.parametrize("scene", SCENES)
    def test_it_is_between_0_and_1(self, scene: str) -> None:
        history = replay(SCENES[scene]())
        assert history.ettr is None or 0 <= history.ettr <= 1
        assert history.ettr == by_definition(history)

    @pytest.mark.parametrize("sizes", [(1, 2), (1, 4), (3, 8)], ids=str)
    def test_it_matches_its_definition(self, sizes: tuple[int, int]) -> None:
        spares = 0
        for seed in range(SEQUENCES // 3):
            events = with_steps(recorded(Walk(seed, sizes).seen))
            for first, last in ((0, len(events)), (0, len(events) // 2), (len(events) // 3, len(events))):
                whole = replay(events[first:last] or events, events[-1].time + 7)
                for history in (whole, whole.since(whole.start + (whole.end - whole.start) / 3)):
                    assert history.ettr == by_definition(history), seed
                    spares += any(span.state == "waiting" for node in history.nodes for span in node.spans)
        assert spares


def by_definition(history: History) -> Any:
    """The ratio computed from its definition: every span of every node against every round that stood."""
    stood = []
    for this, later in zip_longest(history.rounds, history.rounds[1:]):
        end = (later and later.completed_at) or history.end
        stood.append((this.completed_at or history.start, end if this.fault_at is None else this.fault_at))
    spans = [span for node in history.nodes for span in node.spans]
    spare = sum(
        max(0.0, min(span.end, end) - max(span.start, start))
        for span in spans
        for start, end in stood
        if span.state == "waiting"
    )
    counted = sum(span.end - span.start for span in spans if span.state != "unknown") - spare
    trained = sum(span.end - span.start for span in spans if span.state == "training")
    is_known = counted > 1e-6 and history.reports_steps  # else there were only spares, or no round
    return pytest.approx(trained / counted) if is_known else history.ettr


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
