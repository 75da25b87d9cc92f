"""Every interleaving of a few nodes, on the oracle: the model explored, breadth first and at random."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import pytest

from tests.proofs.model import Model
from tests.proofs.oracle_state import Settings
from tests.support.long_tests import LONG, quick_first

WORLDS: Final = int(os.environ.get("REDELASTIC_MODEL_WORLDS", "6000" if LONG else "1000"))  # looked at in each case
WALKS: Final = 300 if LONG else 50
CASES: Final[dict[str, tuple[str, Settings]]] = {
    "3 nodes, 1:2, one spare": ("abc", Settings(1, 2)),
    "3 nodes, 1:3, replacement": ("abc", Settings(1, 3, replacement=5000)),
    "2 nodes, 1:2": ("ab", Settings(1, 2)),
    "3 nodes, 2:3": ("abc", Settings(2, 3)),
    "2 nodes, 2:2": ("ab", Settings(2, 2)),
    "2 nodes, 1:1, one spare": ("ab", Settings(1, 1)),
    "3 nodes, 1:3": ("abc", Settings(1, 3)),
    "3 nodes, 2:2, one spare": ("abc", Settings(2, 2)),
}
EVERY_CASE: Final = pytest.mark.parametrize("case", quick_first(CASES, 2))


@EVERY_CASE
def test_every_interleaving_keeps_the_guarantees(case: str, record_property: Callable[[str, object], None]) -> None:
    names, settings = CASES[case]
    worlds, longest = Model(settings).explore(names, WORLDS)
    record_property("worlds", worlds)
    assert longest >= (6 if LONG else 5)


@EVERY_CASE
def test_long_stories_keep_the_guarantees(case: str) -> None:
    names, settings = CASES[case]
    for seed in range(WALKS):
        Model(settings).walk(names, seed, events=40)


@EVERY_CASE
def test_no_round_waits_for_a_heartbeat(case: str) -> None:
    names, settings = CASES[case]
    Model(settings, heartbeats=False).explore(names, WORLDS)


@pytest.mark.parametrize(
    "case", quick_first(["3 nodes, 1:3, replacement", "2 nodes, 1:2", "2 nodes, 1:1, one spare", "3 nodes, 2:3"])
)
def test_every_interleaving_of_roll_calls_keeps_the_guarantees(case: str) -> None:
    names, settings = CASES[case]
    Model(settings, roll_calls=True).explore(names, WORLDS)


@EVERY_CASE
def test_failing_workers_keep_the_guarantees(case: str) -> None:
    names, settings = CASES[case]
    for seed in range(WALKS // 5):
        Model(settings, failures=True).walk(names, seed, events=40)


@pytest.mark.parametrize("case", quick_first(["3 nodes, 1:2, one spare", "3 nodes, 1:3", "2 nodes, 1:2"]))
@pytest.mark.parametrize(
    "admission", [(0, 5000), (2500, 5000), (-1, 0)], ids=["damped", "damped and saved", "its own save"]
)
def test_new_nodes_that_wait_for_admission_are_admitted(case: str, admission: tuple[int, int]) -> None:
    names, settings = CASES[case]
    Model(settings, heartbeats=False, admission=admission).explore(names, WORLDS)
    for seed in range(WALKS // 5):
        Model(settings, failures=True, admission=admission).walk(names, seed, events=40)
