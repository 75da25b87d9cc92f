"""What one tenant writes must not keep a tool busy: any text in any field costs time in proportion to its length."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
from rich.console import Console

from redelastic.cli.output import event_table
from redelastic.dashboard.standalone import page
from redelastic.dashboard.view import EVENTS, fold
from redelastic.monitoring.events import KINDS, MAX_TEXT, Event, decode, decode_cause
from redelastic.monitoring.history import replay
from redelastic.monitoring.records import decode_status
from redelastic.monitoring.sentences import cause, event_document
from redelastic.monitoring.wording import clean, short
from tests.support.long_tests import quick_rows

PARTS: Final = (
    *("-1", "a-", "-1-", "1", " ", "a-1-0123456789ab ", "a-1-0123456789ab", "a-1-0123456789a", "\x1b[2J", "[red]", "<"),
    *("\n", "\u0663", "\u202e", '"', "\\", "[", "{", "é-1-", "0-0-"),
)
FEW: Final = MAX_TEXT // 16  # characters
GROWTH: Final = 16 * 4  # of the time, for sixteen times the text; were the time quadratic, it would be 256


def events_of(text: str) -> list[Event]:
    """An event of each kind, with this text in each of its fields."""
    return [
        decode(f"{i}-0", dict.fromkeys(kind.__dataclass_fields__, text) | {"event": name})
        for i, (name, kind) in enumerate(KINDS.items())
    ]


def words(text: str) -> None:
    short(clean(text))


def documents(text: str) -> None:
    json.dumps([event_document(event) for event in events_of(text)])


def causes(text: str) -> None:
    cause(decode_cause(json.dumps(["failed", text, "message", text])))
    decode_status(text, json.dumps({"name": text, "workers": [{"state": text}]}).encode())


def lines(text: str) -> None:
    fold(events_of(text))


def files(text: str) -> None:
    page("run", replay(events_of(text)))


def tables(text: str) -> None:
    console = Console(file=io.StringIO(), width=10_000, highlight=False, markup=False, emoji=False)
    console.print(event_table([event_document(event) for event in events_of(text)]))


def seconds(shown: Callable[[str], None], text: str) -> float:
    """The time on a processor that it takes this thread."""
    began = time.thread_time()
    shown(text)
    return time.thread_time() - began


@pytest.mark.fault("texts of one tenant that are long, and all alike", "no tool is kept busy by them")
@pytest.mark.parametrize(
    ("part", "shown"),
    [
        *((part, shown) for shown in (words, documents, causes) for part in PARTS),
        *(row for shown in (lines, files, tables) for row in quick_rows([(part, shown) for part in PARTS], 5)),
    ],
    ids=lambda value: ascii(value) if isinstance(value, str) else value.__name__,
)
def test_any_text_costs_linear_time(shown: Callable[[str], None], part: str) -> None:
    text = part * MAX_TEXT
    few = min(seconds(shown, text[:FEW]) for _ in range(3))
    assert any(seconds(shown, text[: 16 * FEW]) < GROWTH * max(few, 1e-4) for _ in range(3))


class Counted(Sequence[Event]):
    """Events that are not alike, of which it counts those that were looked at."""

    def __init__(self, n: int) -> None:
        self.n, self.looked = n, 0

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        self.looked += 1
        return decode(f"{i}-0", {"event": "outage", "epoch": str(i)})

    def __reversed__(self) -> Iterator[Event]:
        return map(self.__getitem__, range(self.n - 1, -1, -1))


def test_of_many_events_only_the_last_are_folded() -> None:
    events = Counted(10_000)
    assert list(fold(events)) == [f"{i}-0" for i in range(10_000 - EVENTS, 10_000)]
    assert events.looked <= EVENTS + 1
