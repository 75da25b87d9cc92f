"""The kinds of events: what is written of one is what is read, and what someone else wrote harms nobody."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from redelastic.monitoring.collectives import Collective
from redelastic.monitoring.events import (
    KINDS,
    Barred,
    Closed,
    Drain,
    Event,
    Failed,
    Hung,
    Left,
    Log,
    Lost,
    Missing,
    Outage,
    Outlier,
    Refused,
    Stopped,
    Unreached,
    decode,
    decode_cause,
    is_fault,
)
from redelastic.monitoring.sentences import cause, detail_of, event_document, sentence

VALUES: dict[str, Any] = {
    "cause": "lease",
    "because": "max_nodes",
    "signal": "SIGKILL",
    "stream": "wake",
    "logs": {0: "/logs/0"},
    "last": {0: (Collective("0", "default_pg", 7, "all_reduce", "Float[4]", is_done=False),), 1: None},
}
NODE = "gpu-1-77-0123456789ab"


def full(kind: type[Event]) -> Event:
    """An event of this kind, all of whose fields are known; a count is 0."""
    made: Any = kind
    choices = {"left": "drained", "closed": "restarts", "stopped": "progress"}
    event: Event = made(id="5000-1", time=5.0, epoch=2, size=3, node=NODE, breaks=True)
    known: dict[str, Any] = {}
    for field in fields(event):
        if field.name in VALUES:
            known[field.name] = choices.get(event.event, VALUES[field.name])
        elif field.metadata:
            default = field.default
            known[field.name] = (
                0 if default is None else True if default is False else ("a", "b") if default == () else "words"
            )
            assert default is not MISSING
    return replace(event, **known)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_what_is_written_is_read(kind: type[Event]) -> None:
    event = full(kind)
    pairs = ["breaks", "1", *event.pairs()]
    entry = dict(zip(pairs[::2], pairs[1::2], strict=True))
    entry |= {"event": event.event, "epoch": "2", "size": "3", "node": NODE}
    assert decode("5000-1", entry) == event
    of_record = decode_cause(event.as_cause())
    assert of_record == replace(event, id="", time=0, epoch=0, size=0, breaks=False)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_each_has_words_and_is_json(kind: type[Event]) -> None:
    made: Any = kind
    for event in (full(kind), made(node=NODE)):
        assert "None" not in sentence(event) + cause(event) + detail_of(event)
        assert json.loads(json.dumps(event_document(event)))["event"] == event.event
    assert sentence(full(kind))


@pytest.mark.parametrize(
    "kind", [Lost, Failed, Hung, Refused, Barred, Unreached, Missing, Outlier], ids=lambda kind: kind.__name__
)
def test_what_goes_wrong_is_a_fault(kind: type[Event]) -> None:
    assert is_fault(full(kind))


@pytest.mark.parametrize(
    ("event", "wrong"),
    [
        (Left(cause="failed"), True),
        (Left(cause="drained"), False),
        (Left(cause="restarts"), False),  # its workers start anew
        (Closed(cause="finished"), False),
        (Closed(cause="failed"), True),
        (Stopped(cause="asked"), False),
        (Stopped(cause="restarts"), True),
        (Stopped(cause="progress"), True),
        (Drain(), False),
        (Outage(), False),
        (Event(event="what a later version records"), False),
        (None, False),
    ],
)
def test_an_end_is_a_fault_if_a_fault_led_to_it(event: Event | None, wrong: bool) -> None:
    assert is_fault(event) == wrong
    assert event is None or event_document(event)["fault"] == wrong


def test_a_log_tells_when_its_worker_failed() -> None:
    log = Log(time=1_700_000_000.5, rank=3, age_ms=1250, path="/logs/3")
    assert sentence(log) == "rank 3 failed at 22:13:19.250 UTC; its log: /logs/3"
    assert sentence(replace(log, age_ms=None)) == "rank 3, its log: /logs/3"


@pytest.mark.parametrize("text", ["why", "{}", "[1]", '["lost"]', '["lost", 3]', "[" * 100_000, '["x", "y", "z"]'])
def test_a_cause_that_someone_else_wrote_is_unknown(text: str) -> None:
    found = decode_cause(text)
    assert found is not None
    assert found.event not in KINDS
    assert cause(found)


def test_a_field_of_another_type_is_not_known() -> None:
    entry = {"event": "lost", "node": NODE, "cause": "boredom", "silent_ms": "1e9", "epoch": "x", "breaks": "yes"}
    assert decode("x", entry) == Lost(id="x", node=NODE)
