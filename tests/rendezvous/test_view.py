"""What a node knows of its run: how long it waits for a loss, and which drains count in its round."""

from __future__ import annotations

import threading
import time
from typing import Final

import pytest

from redelastic.monitoring.events import Lost
from redelastic.rendezvous.view import Round, View

LIMIT: Final = 30.0


@pytest.mark.parametrize("away", [0.25, 0.75], ids=["it is back in time", "its time is up first"])
def test_who_waits_for_a_loss_begins_anew_when_redis_comes_back(away: float) -> None:
    """Leases begin anew then, too."""
    view = View("run")
    view.become("a")
    view.apply_round(Round(1, 0, 2, "host", 1, 0, 0, again=False))
    ended = []
    waiting = threading.Thread(target=lambda: ended.append((view.wait_for_loss(0.5, LIMIT), time.monotonic())))
    view.apply_outage(OSError("gone"))
    waiting.start()
    time.sleep(away)
    assert not ended
    back = time.monotonic()
    view.apply_return()
    waiting.join(LIMIT)
    [(lost, at)] = ended
    assert not lost
    assert at >= back + 0.5


def test_who_waits_for_a_loss_has_patience_with_redis_for_so_long() -> None:
    view = View("run")
    view.apply_round(Round(1, 0, 2, "host", 1, 0, 0, again=False))
    view.apply_outage(OSError("gone"))
    assert not view.wait_for_loss(0.1, 0.1)


def test_a_drain_counts_in_the_round_that_last_told_of_it() -> None:
    """Its node was asked in one round, and has entered the next one all the same."""
    view = View("run")
    told = {"event": "drain", "node": "b", "reason": "preempted", "timeout": "30000"}
    view.apply_wake_ups([("5-0", told | {"epoch": "1"})])
    view.apply_wake_ups([("7-0", told | {"epoch": "2"}), ("8-0", told | {"epoch": "1"})])
    view.apply_round(Round(2, 0, 2, "host", 1, 0, 0, again=True))
    assert [(drain.node, drain.place) for drain in view.drains] == [("b", (7, 0))]


def test_a_loss_that_completes_the_next_round_is_told_once_though_its_wake_up_comes_after(
    caplog: pytest.LogCaptureFixture,
) -> None:
    view = View("run")
    view.become("a")
    told = {"event": "broken", "epoch": "1", "lost": "1"}
    lost = [("5-0", told | {"cause": Lost(node=node, cause="lease").as_cause()}) for node in "bc"]
    view.apply_round(Round(1, 0, 3, "host", 1, 0, 0, again=False))
    view.apply_wake_ups(lost[:1])
    view.apply_round(Round(2, 0, 1, "host", 1, 0, 2, again=True))
    for _ in range(2):  # after an outage the wake-ups are read anew
        view.apply_wake_ups(lost)
    assert caplog.messages == [f"Round 1 of run 'run' is broken: {node} lost its lease." for node in "bc"]
    assert not view.nodes_waiting
