"""What the dashboard says of a run: its page, made from events, and the changes that browsers get."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from redelastic.dashboard import view
from redelastic.dashboard.feed import Topic, merge_patch
from redelastic.dashboard.view import Speed, fold
from redelastic.monitoring.events import Closed, Event, Failed, Hung, Lost
from redelastic.monitoring.history import replay
from redelastic.monitoring.records import Node, Run
from redelastic.monitoring.report import describe
from tests.support.scenes import START, Story, many_nodes

SILENT = "not known: all nodes fell silent"


values = st.recursive(
    st.booleans() | st.integers(-5, 5) | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    lambda inner: st.dictionaries(st.text("abc", max_size=2), inner, max_size=4),
    max_leaves=12,
)


documents = st.dictionaries(st.text("abc", max_size=2), values, max_size=5)


def patched(target: Any, patch: Any) -> Any:
    """RFC 7396, word for word."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = patched(result.get(name), value)
    return result


class TestFeed:
    @given(documents, documents)
    def test_a_patch_makes_the_new_document_of_the_old(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        assert patched(old, merge_patch(old, new)) == new
        assert bool(merge_patch(old, new)) == (json.dumps(old, sort_keys=True) != json.dumps(new, sort_keys=True))

    def test_whoever_is_slow_is_given_the_whole_document(self) -> None:
        async def story() -> None:
            topic = Topic()
            topic.publish({"a": 1, "b": 1})
            quick, slow = topic.follow(), topic.follow()
            for follower in (quick, slow):
                assert await anext(follower) == 'event: document\ndata: {"a":1,"b":1}\n\n'
            topic.publish({"a": 2, "b": 1})
            assert await anext(quick) == 'event: patch\ndata: {"a":2}\n\n'
            topic.publish({"a": 2, "b": 2})
            assert await anext(quick) == 'event: patch\ndata: {"b":2}\n\n'
            assert await anext(slow) == 'event: document\ndata: {"a":2,"b":2}\n\n'

        asyncio.run(story())


def page_of(events: Sequence[Event], now: float | None = None, **more: Any) -> dict[str, Any]:
    """The page of a run of which only its events are known, and ``more`` of its fields."""
    history = replay(events, now)
    run = Run(
        "r", events[-1].epoch, events[-1].size, 1, 1, 1.0, None, None, False, None, 6.0, 0, 0, {}, [], (), history.end
    )
    run = replace(run, **more)
    report = describe(run, events, history.end, history)
    return view.overview(run, report, history, None) | view.details(run, report, history, history.start)


def there(node: str, lease: float) -> Node:
    return Node(node, "member", 0, lease, 6 - lease, "", {"name": "n", "host": "", "state": ""})


class TestView:
    def test_what_each_of_many_nodes_does_is_one_line(self) -> None:
        story = Story()
        nodes = [story.node(f"n{i}") for i in range(50)]
        story.join(0, nodes, within=1)
        story.complete(2, nodes, start=5)
        folded = list(fold(story.events()).values())
        assert [(line["event"], line.get("count")) for line in folded] == [
            ("joined", 50),
            ("completed", None),
            ("started", 50),
            ("progressed", None),
        ]

    def test_a_merged_event_is_shown_for_each_of_its_nodes(self) -> None:
        story = Story()
        nodes = [story.node(f"n{i:03d}") for i in range(200)]
        story.join(0, nodes, within=1)
        story.complete(2, nodes, start=5)
        for i, node in enumerate(nodes[:150]):
            story.lose(60 + i / 1000, node)
        events = story.events()
        together = [event for event in events if isinstance(event, Lost) and event.nodes]
        page = page_of(events, START + 90)
        lanes = page["timeline"]["lanes"]
        assert lanes.keys() == set(nodes)
        assert all(next(reversed(lane["spans"].values()))[2] > 0 for node, lane in lanes.items() if node in nodes[:150])
        marks = page["timeline"]["marks"].values()
        assert {(event, node, fault) for _, event, node, _, fault in marks} == {("lost", n, True) for n in nodes[:150]}
        lines = [line for line in page["events"].values() if line["event"] == "lost"]
        assert sum(line.get("count", 1) for line in lines) == 150
        assert [page["events"][event.id]["count"] for event in together] == [64, 64, 5], "the first one broke the round"
        assert all(page["events"][event.id]["detail"] for event in together), "their names can be asked for"
        assert page["fault"]["count"] == 5

    def test_a_hang_and_an_exit_are_one_mark_each(self) -> None:
        story = Story()
        node, hangs = story.node("n"), story.node("hangs")
        story.complete(1, [node, hangs])
        story.add(20, Hung(node=hangs, rank=1, idle_ms=8000, hung=1))
        story.add(20, Failed(node=hangs, rank=1, idle_ms=8000))
        story.complete(21, [node, hangs])
        story.add(40, Failed(node=node, rank=0, exit_code=1))
        marks = page_of(story.events(), START + 50)["timeline"]["marks"].values()
        assert sorted((event, name) for _, event, name, _, _ in marks) == [("failed", node), ("hung", hangs)]

    def test_a_closed_run_has_ended_once_its_last_node_is_silent(self) -> None:
        story = Story()
        node = story.node("n")
        story.join(0, [node])
        story.complete(1, [node], start=1)
        for lease in (2.0, -2.0):
            page = page_of(story.events(), START + 60, nodes=[there(node, lease)], closed=Closed(cause="asked"))
            assert page.get("until") == (None if lease > 0 else START + 60)

    def test_a_run_whose_nodes_all_fell_silent_has_failed(self) -> None:
        story = Story()
        nodes = [story.node(name) for name in "abc"]
        story.join(0, nodes)
        story.complete(1, nodes, start=1)
        silent = [there(node, lease) for node, lease in zip(nodes, (-4.0, -2.0, -3.0), strict=True)]
        page = page_of(story.events(), START + 60, nodes=silent)
        fault = {"time": START + 58, "event": "dead", "fault": True, "node": "", "reason": SILENT}
        assert (page["phase"], page["failed"], page["fault"]) == ("dead", True, fault)
        assert page["failure"] == {"round": 1, "time": START + 58, "lines": [["cause", SILENT]]}

        story.regroup(10, nodes)
        story.add(9, Failed(node=nodes[0], local_rank=0, rank=0, exit_code=1))
        page = page_of(story.events(), START + 60, nodes=silent)
        assert page["fault"]["event"] == "failed", "it is known why"
        assert page["failure"]["lines"][0][1].startswith("a-")

        story.complete(20, nodes, start=1)
        page = page_of(story.events(), START + 60, nodes=silent)
        assert (page["fault"], page["failure"]["round"]) == (fault, 2), "of the last round it is not"

    def test_a_timeline_is_bounded_and_shows_all_of_its_last_part(self) -> None:
        def ends(events: list[Event]) -> list[float]:
            return [span.end for node in replay(events).nodes for span in node.spans]

        few = many_nodes(30, 4.0, 40)
        whole = page_of(few)["timeline"]
        assert sum(len(lane["spans"]) for lane in whole["lanes"].values()) == len(ends(few)) > 2000
        assert "cut" not in whole
        events = many_nodes(30, 40.0, 300)
        assert len(ends(events)) > view.SPANS
        shown = page_of(events)["timeline"]
        since = shown["origin"] + shown["start"]
        kept = sum(len(lane["spans"]) for lane in shown["lanes"].values())
        assert 0.8 * view.SPANS < kept <= view.SPANS
        assert kept == sum(end > since + 0.01 for end in ends(events)), "nothing of that time is missing"
        assert shown["cut"]
        assert len(json.dumps(shown)) < 1 << 20

    def test_speed_is_over_what_was_seen_of_a_round(self) -> None:
        def run(time: float, epoch: int = 1) -> Run:
            return Run("r", epoch, 1, 1, 1, 1.0, None, None, False, None, 6.0, 0, 0, {}, [], (), time)

        speed = Speed()
        assert speed.update(run(START), 100) is None
        assert speed.update(run(START + 10), 120) == 2.0
        assert speed.update(run(START + 20), 120) == 1.0, "it falls while nothing happens"
        assert speed.update(run(START + 21, 2), 110) is None, "steps are redone"
        assert speed.update(run(START + 22, 2), 111) == 1.0
