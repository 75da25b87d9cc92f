"""The effective training time ratio of a run, from its events."""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any

import pytest

from redelastic.monitoring.events import (
    Event,
    Failed,
    Hung,
    Lost,
    Progressed,
    Started,
)
from redelastic.monitoring.history import History, replay
from tests.support.replays import SEQUENCES, Walk, recorded, spans, with_steps
from tests.support.scenes import SCENES, START, Story, three_nodes


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
