"""What a node knows of its run: which news counts in its round, and how long it waits for a loss."""

from __future__ import annotations

import threading
import time
from typing import Final

import pytest

from redelastic.monitoring.events import Lost
from redelastic.rendezvous.replies import Beat
from redelastic.rendezvous.view import Drain, Round, View
from redelastic.rendezvous.watch import Watch

LIMIT: Final = 30.0


@pytest.mark.parametrize("away", [0.25, 0.75], ids=["it is back in time", "its time is up first"])
def test_a_wait_for_a_loss_restarts_when_redis_comes_back(away: float) -> None:
    """Leases restart then, too."""
    watch = Watch("run", "a")
    watch.update(View.enter, Round(1, 0, 2, "host", 1, 0, 0, again=False))
    ended = []
    waiting = threading.Thread(target=lambda: ended.append((watch.wait_for_loss(0.5, LIMIT), time.monotonic())))
    watch.apply_outage(OSError("gone"))
    waiting.start()
    time.sleep(away)
    assert not ended
    back = time.monotonic()
    watch.apply_return()
    waiting.join(LIMIT)
    [(lost, at)] = ended
    assert not lost
    assert at >= back + 0.5


def test_a_wait_for_a_loss_ends_though_redis_stays_away() -> None:
    watch = Watch("run", "a")
    watch.update(View.enter, Round(1, 0, 2, "host", 1, 0, 0, again=False))
    watch.apply_outage(OSError("gone"))
    assert not watch.wait_for_loss(0.1, 0.1)


def test_a_drain_counts_in_the_round_that_last_announced_it() -> None:
    """The node was asked to drain in one round, and has entered the next one all the same."""
    view = View("a")
    entry = {"event": "drain", "node": "b", "reason": "preempted", "timeout": "30000"}
    for place, epoch in (("5-0", "1"), ("7-0", "2"), ("8-0", "1")):
        view = view.apply_wake_up(place, entry | {"epoch": epoch})
    view = view.enter(Round(2, 0, 2, "host", 1, 0, 0, again=True))
    assert [(drain.node, drain.place) for drain in view.drains] == [("b", (7, 0))]


def test_a_drain_outlives_the_nodes_id_and_begins_once() -> None:
    view = View("a").begin_drain(Drain("a", "SIGTERM", 30.0)).begin_drain(Drain("a", "by hand", 5.0)).become("b")
    assert [(drain.node, drain.reason) for drain in view.drains] == [("b", "SIGTERM")]


def test_a_drain_that_a_signal_handler_begins_within_a_change_is_kept() -> None:
    """The change was made from the view before that drain."""
    watch = Watch("run", "a")

    def change(view: View) -> View:
        watch.begin_drain("SIGTERM", 30)  # as a handler does that interrupts this thread here
        return view.ask()

    watch.update(change)
    for view in (watch.view, watch.update(View.leave), watch.update(View.become, "b")):
        assert view.drain
        assert view.drain.reason == "SIGTERM"


@pytest.mark.parametrize(
    ("standing", "epoch", "waiting", "fenced"),
    [("member", 1, 0, False), ("member", 2, 1, True), ("fenced", 2, 1, True), ("unknown", 0, 0, False)],
)
def test_a_beats_verdict_on_the_round_that_a_node_holds(standing: str, epoch: int, waiting: int, fenced: bool) -> None:
    """A server that has lost its data knows no such node, and does not judge it."""
    held = Round(1, 0, 2, "host", 1, 0, 0, again=False)
    view = View("a").enter(held).apply_beat("a", held, Beat(standing, epoch, "", 0, "", -1, 0, "", 0))
    assert (view.nodes_waiting, view.fenced, view.member_lost) == (waiting, fenced, fenced)


def test_a_beats_reply_to_an_older_identity_or_round_is_no_verdict() -> None:
    old, new = (Round(epoch, 0, 2, "host", 1, 0, 0, again=False) for epoch in (1, 2))
    view, reply = View("b").enter(old).enter(new), Beat("fenced", 2, "", 0, "{}", -1, 1, "9 why", 0)
    for asked_as, asked_in in (("a", new), ("b", old), ("b", None)):
        after = view.apply_beat(asked_as, asked_in, reply)
        assert not after.nodes_waiting
        assert after.is_stopped, "that the run was stopped concerns every node"
        assert bool(after.drain) == (asked_as == "b")


def test_a_loss_is_logged_once_though_its_wake_up_follows_the_next_round(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watch = Watch("run", "a")
    entry = {"event": "broken", "epoch": "1", "lost": "1"}
    b, c = (entry | {"cause": Lost(node=node, cause="lease").as_cause()} for node in "bc")
    watch.update(View.enter, Round(1, 0, 3, "host", 1, 0, 0, again=False))
    watch.update(View.apply_wake_up, "5-0", b)
    watch.update(View.enter, Round(2, 0, 1, "host", 1, 0, 2, again=True))
    for change in (b, c, b, c):  # after an outage the wake-ups are read again
        watch.update(View.apply_wake_up, "5-0", change)
    assert caplog.messages == [f"Round 1 of run 'run' is broken: {node} lost its lease." for node in "bc"]
    assert not watch.view.nodes_waiting
