"""The page's modules, on runs in which anything may be called as anything is in JavaScript, at any time."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from redelastic.dashboard import view
from redelastic.dashboard.standalone import PAGE
from redelastic.monitoring.control import UnknownRunError
from redelastic.monitoring.events import FAULTS, KINDS, Event, decode
from redelastic.monitoring.history import STATES, replay
from redelastic.monitoring.records import Run
from redelastic.monitoring.report import describe
from redelastic.redis.errors import CorruptStateError
from tests.support.fuzzing import hostile_history, hostile_run
from tests.support.hostile import LARGE_IDS, Dice

FAKE = Path(__file__).parent.parent / "support" / "fake_page.mjs"
NAMES = ("constructor", "__proto__", "toString", "hasOwnProperty", "valueOf", "5", "")


def some_run(dice: Dice) -> Run:
    """One that can be read."""
    while True:
        with contextlib.suppress(CorruptStateError, UnknownRunError):
            return hostile_run(dice)


def page_of(dice: Dice, events: list[Event]) -> dict[str, Any]:
    run, history = some_run(dice), replay(events)
    report = describe(run, events, history.end, history)
    details = view.details(run, report, history, history.start)
    return {"now": history.end} | view.overview(run, report, history, None) | details


def test_the_page_knows_every_state_of_a_node() -> None:
    script, style = ((PAGE / name).read_text() for name in ("timeline.js", "style.css"))
    assert f"const STATES = {json.dumps(STATES)};" in script
    assert [state for state in STATES if f".{state} {{ fill: var(--{state})" not in style] == []


def test_the_page_knows_what_is_a_fault() -> None:
    script = (PAGE / "dom.js").read_text()
    kinds = [kind.event for kind in FAULTS]
    assert [kind for kind in kinds if f'{kind}: ["bad", ' not in script] == []
    assert [kind for kind in ("closed", "stopped", "left") if f'{kind}: ["calm", ' not in script] == []


def named(name: str, place: str) -> list[Event]:
    """A node of that name goes through each kind of event, and through one of that name; the last is at that place."""
    node = {"node": name, "epoch": "1", "size": "1", "members": name, "rank": "0"}
    events = [decode(f"{1_700_000_000_000 + i}-0", {**node, "event": kind}) for i, kind in enumerate((*KINDS, name))]
    return [*events, decode(place, {**node, "event": "failed", "cause": name})]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.fault("names of JavaScript's own, and ids of the year 600 million, in events", "the page shows them")
def test_any_name_and_any_time(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs Node.js: apt-get install nodejs")
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "page" / "package.json").write_text('{"type": "module"}')
    pages = [page_of(Dice(0), named(name, place)) for name in NAMES for place in ("1700000100000-0", *LARGE_IDS)]
    for page, name in zip(pages, NAMES * len(LARGE_IDS), strict=False):
        page["nodes"] = {name or "x": {"name": name, "state": name, "place": 0, "until": 1}, **page["nodes"]}
    for seed in range(300):
        dice = Dice(seed)
        pages.append(page_of(dice, hostile_history(dice)))
    (tmp_path / "pages").write_text("\n".join(json.dumps(page) for page in pages))
    drawn = subprocess.run(
        [node, FAKE, tmp_path / "page", tmp_path / "pages"], capture_output=True, text=True, timeout=200, check=False
    )
    assert (drawn.returncode, drawn.stdout, drawn.stderr) == (0, f"{len(pages)}\n", "")
