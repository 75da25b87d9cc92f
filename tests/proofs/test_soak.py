"""A soak: nodes join, leave, die, freeze and are drained while Redis has faults, at random; I1 to I9 are judged.

Longer: ``python -m tests.proofs.soak --seed 7 --minutes 60 --server-faults``.
The checker is tested here too: it has to see each violation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.proofs.soak.__main__ import main
from tests.proofs.soak.checker import check
from tests.proofs.soak.history import Event
from tests.proofs.soak.node import DEFECTS, with_text
from tests.proofs.soak.schedule import Action, Episode, episodes, plan
from tests.proofs.soak.session import soak, stage
from tests.proofs.soak.story import Story
from tests.support.fault_matrix import Measured
from tests.support.long_tests import quick_first

pytestmark = pytest.mark.timeout(300)


@pytest.mark.fault("nodes start, leave, die, freeze, drain; Redis has faults: at random for minutes", "I1 to I9 hold")
@pytest.mark.parametrize(
    ("seed", "minutes"),
    [(15, 0.1), pytest.param(15, 1.0, marks=pytest.mark.long), pytest.param(24, 1.0, marks=pytest.mark.long)],
)
def test_some_time_of_everything(seed: int, minutes: float, tmp_path: Path, measured: Measured) -> None:
    said: list[str] = []
    verdicts = soak(seed, minutes, 6, server_faults=True, folder=tmp_path, say=said.append)
    assert not [violation for verdict in verdicts for violation in verdict.violations], "\n".join(said)
    assert sum(verdict.rounds for verdict in verdicts) > 5 * minutes, said
    assert sum(verdict.adds for verdict in verdicts) > 50 * minutes, said
    for verdict in verdicts:
        for seconds in verdict.detected:
            measured("death known", seconds)
        for seconds in verdict.regrouped:
            measured("regrouped", seconds)


# -- short soaks of scripts with a defect: the checker has to report the guarantee that the defect breaks


THREE: Final = (
    *(Action(0.0, what, name) for what in ("start", "asked") for name in ("n1", "n2")),
    *(Action(0.3, what, "n3") for what in ("start", "asked")),
)
TWO_AND_TWO_SPARES: Final = (
    *(Action(0.0, what, name) for what in ("start", "entered") for name in ("n1", "n2")),
    *(Action(0.0, what, name) for what in ("start", "asked") for name in ("n3", "n4")),
)


def drill(
    *actions: Action, starts: tuple[Action, ...] = THREE, seconds: float = 3.0, loss: float = 0.0, **options: Any
) -> Episode:
    """An episode of up to four nodes; the first one is slow to stop its workers."""
    nodes = {name: {"lag": 0.5 if name == "n1" else 0.0, "loss": loss} for name in ("n1", "n2", "n3", "n4")}
    options = {"min_nodes": 1, "max_nodes": 4} | options
    return Episode("drill", seconds=seconds, actions=(*starts, *actions), nodes=nodes, **options)


ANOTHER: Final = Action(2.5, "start", "n4")
DRILLS: Final = {
    "I1: completes over members": drill(ANOTHER),
    "I1: completes while a round is put back": drill(
        *(ANOTHER, Action(2.5, "asked", "n4"), Action(2.5, "freeze", "n1")),
        *(Action(2.8, "flush"), Action(2.8, "entered", "n4"), Action(2.8, "thaw", "n1")),
        seconds=4.0,
        interval=0.6,
        lease=2.4,  # the first node is silent for less than that
    ),
    "I2: all are rank 0": drill(seconds=1.0),
    "I3: max_nodes is not kept": drill(Action(0.5, "kill", "n1"), starts=TWO_AND_TWO_SPARES, seconds=1.0, max_nodes=2),
    "I4: stores are not fenced": drill(ANOTHER),
    "I5: closing is forgotten": drill(closing="node"),
    "I6: the last call never ends": drill(seconds=0.5, last_call=0.5),
    "I7: leases do not end": drill(Action(2.5, "kill", "n3")),
    "I8: requests count twice": drill(loss=0.2),
    "I7: the dead have answered": drill(Action(2.0, "kill", "n3"), Action(2.1, "call", "n1")),
    "I9: answers do not count": drill(Action(2.0, "call", "n2")),
    "I9: an outage evicts": drill(Action(2.0, "stop"), Action(4.0, "cont"), seconds=4.5),
}


def drilled(defect: str, folder: Path) -> list[Event]:
    with stage(folder, defect) as play:
        return play(DRILLS[defect], patience=1.5)


def test_the_scripts_have_a_place_for_each_defect() -> None:
    assert [old for changes in DEFECTS.values() for old, _ in changes if not with_text(old)] == []


@pytest.mark.parametrize("defect", quick_first(DEFECTS))
def test_a_defect_in_the_scripts_is_reported(defect: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    while Story(history := drilled(defect, tmp_path_factory.mktemp("drill"))).stood_still:
        pass  # the checker excuses a machine that stood still
    verdict = check(history)
    assert defect[:2] in {violation.guarantee for violation in verdict.violations}, verdict


# -- the schedule


def test_a_seed_gives_the_same_schedule_again() -> None:
    assert plan(7, 3, 8, server_faults=True) == plan(7, 3, 8, server_faults=True)
    assert plan(7, 3, 8, server_faults=True) != plan(8, 3, 8, server_faults=True)
    short, long = (list(episodes(7, minutes, 8, server_faults=True)) for minutes in (2, 20))
    assert short == long[: len(short)]


def test_a_long_soak_does_everything() -> None:
    planned = list(episodes(7, 60, 8, server_faults=True))
    nodes = {"start", "leave", "kill", "freeze", "thaw", "drain", "call"}
    server = {"down", "up", "forget", "stop", "cont", "scripts", "clients", "flush"}
    assert {action.what for episode in planned for action in episode.actions} == nodes | server
    alone = list(episodes(7, 60, 8, server_faults=False))
    assert {action.what for episode in alone for action in episode.actions} == nodes


# -- the checker, on short histories: "time who what name=value…"

KILLED: Final = """
0.0 chaos episode name=story min_nodes=2 max_nodes=4 interval=0.3 lease=1.2 patience=2 last_call=1 replacement=0
0.0 chaos start node=n1
0.0 chaos start node=n2
0.0 chaos start node=n3
0.1 n1 asks
0.1 n2 asks
0.1 n3 asks
1.2 n1 entered epoch=1 rank=0 size=3 master=h:1 node=a
1.2 n2 entered epoch=1 rank=1 size=3 master=h:1 node=b
1.2 n3 entered epoch=1 rank=2 size=3 master=h:1 node=c
1.3 n1 met epoch=1 peers=a,b,c
1.4 n1 adds epoch=1 add=1
1.5 n1 added epoch=1 add=1 value=1
1.6 n2 adds epoch=1 add=1
1.7 n2 added epoch=1 add=1 value=2
5.0 chaos kill node=n3
6.1 n1 broken epoch=1 why=c
6.1 n2 broken epoch=1 why=c
6.2 n1 asks
6.2 n2 asks
6.3 n1 entered epoch=2 rank=0 size=2 master=h:1 node=a
6.3 n2 entered epoch=2 rank=1 size=2 master=h:1 node=b
6.4 n1 adds epoch=1 add=2
6.5 n1 fenced epoch=1 add=2
6.6 n1 met epoch=2 peers=a,b
7.0 chaos calm
15.0 chaos closing
15.1 chaos closed
15.1 chaos start node=late
15.2 late asks
15.3 late refused
15.3 n1 heard
15.3 n2 heard
15.4 n1 leaving why=heard
15.4 n2 leaving why=heard
18.0 chaos ends
18.1 chaos record event=completed epoch=1
18.1 chaos record event=completed epoch=2
18.1 chaos record event=closed epoch=2
"""


Changes = dict[str, str]  # the beginning of a line -> what replaces it


def history(changes: Changes) -> list[dict[str, Any]]:
    """The history KILLED with some of its lines replaced."""
    lines = KILLED.strip().splitlines()
    for old, new in changes.items():
        [place] = [i for i, line in enumerate(lines) if line.startswith(old)]
        lines[place : place + 1] = new.split("; ") if new else []
    events = [_event(*line.split()) for line in lines]
    return sorted(events, key=lambda event: event["t"])


def _event(t: str, by: str, what: str, *more: str) -> dict[str, Any]:
    values: dict[str, Any] = dict(pair.split("=") for pair in more)
    numbers = {name: float(value) for name, value in values.items() if value.replace(".", "").isdecimal()}
    peers = {"peers": values["peers"].split(",")} if "peers" in values else {}
    whole = {name: int(number) for name, number in numbers.items() if number == int(number)}
    return {"t": float(t), "by": by, "what": what} | values | numbers | whole | peers


KILL: Final = "5.0 chaos kill node=n3"
DIES: Final = "6.95 chaos kill node=n3"
KEPT: Final[dict[str, Changes]] = {
    "killed": {},
    "left": {KILL: "5.0 n3 leaving why=SIGTERM"},
    "frozen": {KILL: f"5.0 chaos freeze node=n3; 6.9 chaos thaw node=n3; 6.9 n3 broken epoch=1; {DIES}"},
    "starved": {KILL: f"6.8 n3 stalled since=5.0 until=6.8; 6.9 n3 broken epoch=1; {DIES}"},
    "made room for another": {KILL: "5.9 n4 asks; 6.0 n3 leaving why=SIGTERM; 6.25 chaos kill node=n4"},
    "Redis forgot its counter": {
        "1.5 n1": "1.5 n1 added epoch=1 add=1 value=2; 3.0 chaos flush; 3.1 chaos done action=flush",
    },
    "silent in a roll call": {
        KILL: "5.0 chaos freeze node=n3; 5.1 n1 calls epoch=1 call=1; 5.7 n1 broken epoch=1; 5.75 n2 broken epoch=1",
        "6.1 n1": "",
        "6.1 n2": "5.8 chaos thaw node=n3; 5.81 n3 broken epoch=1; 6.95 chaos kill node=n3",
    },
    "all answered a roll call": {
        KILL: f"4.0 n1 calls epoch=1 call=1; 4.1 n1 answered epoch=1 call=1; {KILL}",
    },
    "a late reader": {"6.3 n2": "7.9 n2 entered epoch=2 rank=1 size=2 master=h:1 node=b"},
    "frozen when it entered": {
        "1.2 n3": "1.15 chaos freeze node=n3",
        KILL: "6.4 chaos thaw node=n3; 6.5 n3 entered epoch=1 rank=2 size=3 master=h:1 node=c",
        "7.0": "6.6 n3 broken epoch=1; 6.7 chaos kill node=n3; 7.0 chaos calm",
    },
    "an add in doubt": {
        "1.4 n1": "1.35 n1 adds epoch=1 add=9; 1.36 n1 unsure epoch=1 add=9; 1.4 n1 adds epoch=1 add=1",
        "1.7 n2": "1.7 n2 added epoch=1 add=1 value=3",
    },
}
FIRST: Final = KILLED.strip().splitlines()[0]
BROKEN: Final[list[tuple[str, str, Changes]]] = [
    ("I1", "a member lives", {KILL: ""}),
    ("I1", "a member was frozen for a moment", {KILL: "5.0 chaos freeze node=n3; 5.4 chaos thaw node=n3"}),
    (
        "I1",
        "a member has not asked yet",
        {"6.2 n2": "6.4 n2 asks", "6.3 n2": "6.5 n2 entered epoch=2 rank=1 size=2 master=h:1 node=b"},
    ),
    ("I2", "two of one rank", {"1.2 n2": "1.2 n2 entered epoch=1 rank=0 size=3 master=h:1 node=b"}),
    ("I2", "a rank too high", {"1.2 n3": "1.2 n3 entered epoch=1 rank=3 size=3 master=h:1 node=c"}),
    ("I2", "another size", {"1.2 n2": "1.2 n2 entered epoch=1 rank=1 size=4 master=h:1 node=b"}),
    ("I2", "another master", {"1.2 n2": "1.2 n2 entered epoch=1 rank=1 size=3 master=h:2 node=b"}),
    (
        "I2",
        "a member that does not exist",
        {
            "6.3 n1": "6.3 n1 entered epoch=2 rank=0 size=3 master=h:1 node=a",
            "6.3 n2": "6.3 n2 entered epoch=2 rank=1 size=3 master=h:1 node=b",
        },
    ),
    ("I2", "other peers", {"6.6 n1": "6.6 n1 met epoch=2 peers=a,c"}),
    ("I3", "too many", {"0.0 chaos episode": FIRST.replace("max_nodes=4", "max_nodes=2")}),
    ("I3", "too few", {"0.0 chaos episode": FIRST.replace("min_nodes=2", "min_nodes=3")}),
    ("I4", "an epoch again", {"6.3 n1": "6.3 n1 entered epoch=1 rank=0 size=2 master=h:1 node=a"}),
    (
        "I4",
        "an older epoch for a newcomer",
        {"7.0": "7.0 chaos calm; 7.1 n5 asks; 7.2 n5 entered epoch=1 rank=2 size=3 master=h:1 node=e"},
    ),
    (
        "I4",
        "an older epoch on record",
        {"18.1 chaos record event=completed epoch=2": "18.1 chaos record event=completed epoch=1"},
    ),
    ("I4", "a write to an older round", {"6.5 n1 fenced": "6.5 n1 added epoch=1 add=2 value=3"}),
    ("I5", "a round for a late node", {"15.3 late": "15.3 late entered epoch=3 rank=0 size=2 master=h:1 node=e"}),
    ("I5", "a node that never hears", {"15.3 n2": "", "15.4 n2": ""}),
    ("I5", "closed by nobody", {"15.3 n2": "", "15.4 n2": "14.0 n2 refused"}),
    ("I5", "a round on record after it", {"18.1 chaos record event=closed": "18.05 chaos record event=closed epoch=2"}),
    ("I6", "no round for waiting nodes", {"6.3 n1": "", "6.3 n2": "", "6.4": "", "6.5": "", "6.6": ""}),
    ("I7", "a member that does not learn it", {"6.1 n2": "", "6.2 n2": "", "6.3 n2": ""}),
    ("I7", "the dead answered", {KILL: f"{KILL}; 5.1 n1 calls epoch=1 call=1; 5.2 n1 answered epoch=1 call=1"}),
    ("I8", "two adds with one reply", {"1.7 n2": "1.7 n2 added epoch=1 add=1 value=1"}),
    ("I8", "an add that counts twice", {"1.7 n2": "1.7 n2 added epoch=1 add=1 value=3"}),
    (
        "I9",
        "Redis was away",
        {
            KILL: "5.0 chaos stop; 5.9 chaos cont",
            "6.2 n2": "6.15 n3 broken epoch=1; 6.2 n2 asks; 6.2 n3 asks; 6.21 chaos kill node=n3",
        },
    ),
    ("contract", "an error", {"7.0": "7.0 chaos calm; 7.1 n1 error error=ValueError"}),
]


STOOD_STILL: Final[dict[str, tuple[bool, Changes]]] = {
    "no": (False, {}),
    "a node": (True, {KILL: "5.4 n2 stalled since=5.1 until=5.4"}),
    "a node that was frozen": (
        False,
        {KILL: "5.0 chaos freeze node=n2; 5.4 chaos thaw node=n2; 5.5 n2 stalled since=4.9 until=5.5"},
    ),
    "another node than was frozen": (
        True,
        {KILL: "5.0 chaos freeze node=n2; 5.4 chaos thaw node=n2; 5.5 n3 stalled since=4.9 until=5.5"},
    ),
    "Redis": (True, {KILL: "5.4 chaos slow since=5.1 until=5.4"}),
    "Redis that was stopped": (False, {KILL: "5.0 chaos stop; 5.4 chaos cont; 5.5 chaos slow since=4.9 until=5.5"}),
}


@pytest.mark.parametrize("what", STOOD_STILL)
def test_standing_still_is_distinguished_from_being_stopped(what: str) -> None:
    expected, changes = STOOD_STILL[what]
    assert Story(history(changes)).stood_still is expected


@pytest.mark.parametrize("changes", KEPT.values(), ids=KEPT)
def test_a_history_that_keeps_the_promises_passes(changes: Changes) -> None:
    assert check(history(changes)).violations == []


@pytest.mark.parametrize(("guarantee", "what", "changes"), BROKEN, ids=[f"{g} {what}" for g, what, _ in BROKEN])
def test_a_history_that_breaks_a_promise_is_caught(guarantee: str, what: str, changes: Changes) -> None:
    violations = check(history(changes)).violations
    assert guarantee in {violation.guarantee for violation in violations}, (what, violations)


@pytest.mark.parametrize(("changes", "says"), [({}, "all promises kept"), (BROKEN[0][2], "I1 at 6.3")])
def test_a_recorded_history_is_judged_again(
    changes: Changes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = tmp_path / "history.jsonl"
    recorded.write_text("".join(json.dumps(event) + "\n" for event in history(changes)))
    with pytest.raises(SystemExit) as ended:
        main(["--check", str(recorded)])
    assert ended.value.code == (1 if changes else 0)
    assert says in capsys.readouterr().out


def test_figures_match_the_history() -> None:
    verdict = check(history({}))
    assert [round(s, 3) for s in verdict.detected] == [1.1, 1.1]
    assert [round(s, 3) for s in verdict.regrouped] == [0.2]
