"""Arbitrary values in what people and supervisors read: the output is harmless and well formed."""

from __future__ import annotations

import contextlib
import html.parser
import io
import json
import os
import socket
import unicodedata
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from redelastic.cli.output import moment
from redelastic.cli.status.view import Screen
from redelastic.dashboard.standalone import page
from redelastic.host.health_endpoint import _Handler, _Server, _StatusCollector
from redelastic.host.telemetry import STATUS_LIMIT, bounded
from redelastic.monitoring.control import UnknownRunError
from redelastic.monitoring.history import replay
from redelastic.monitoring.report import describe
from redelastic.monitoring.wording import clean, duration, size
from redelastic.redis.errors import CorruptStateError
from redelastic.worker import SLOT_BYTES
from redelastic.workers.board import HangWatch, ProgressBoard
from tests.support.fuzzing import INPUTS, hostile_event, hostile_history, hostile_run, try_all
from tests.support.hostile import Dice

pytestmark = pytest.mark.timeout(3600 if "REDELASTIC_FUZZ" in os.environ else 120)


def is_harmless(out: str) -> bool:
    return not any(unicodedata.category(sign) in {"Cc", "Cf", "Cs", "Zl", "Zp"} for sign in out.replace("\n", ""))


def fuzz_status_view(dice: Dice) -> None:
    with contextlib.suppress(UnknownRunError, CorruptStateError):
        out = io.StringIO()
        console = Console(file=out, width=dice.choice((40, 80, 200)), highlight=False, markup=False, emoji=False)
        Screen(console, rows=25, workers=True).print(describe(hostile_run(dice), [hostile_event(dice)], 1.7e9))
        assert is_harmless(out.getvalue())


def fuzz_words(dice: Dice) -> None:
    assert is_harmless(clean(dice.word()))
    number = dice.choice((0, 1, -1, 1e17, 0.5))
    assert is_harmless(duration(number) + size(number) + moment(number, full=True))


class Reader(html.parser.HTMLParser):
    """Collects the tags of a page."""

    tags: list[str]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        del attrs
        self.tags.append(tag)


def fuzz_pages(dice: Dice) -> None:
    reader = Reader()
    reader.tags = []
    reader.feed(page(dice.word(), replay(hostile_history(dice))))
    assert reader.tags.count("script") == 2
    assert not {"svg", "img"} & {*reader.tags}


def fuzz_bounded_status(dice: Dice) -> None:
    text = bounded(dice.status() | ({"name": dice.word() * 50} if dice.random() < 0.1 else {}))
    assert len(text.encode()) <= STATUS_LIMIT
    json.loads(text)


class NodeOf:
    """What the health endpoint asks of an agent."""

    def __init__(self, dice: Dice) -> None:
        self.dice = dice

    def stalled(self) -> str:
        return self.dice.word()

    unready = stalled

    def status(self) -> dict[str, Any]:
        status = self.dice.status()
        return (
            status
            | {name: self.dice.word() for name in ("node", "run_id", "state")}
            | {"workers": [status], "gpus": [status]}
        )


def fuzz_metrics(dice: Dice) -> None:
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_StatusCollector(NodeOf(dice)))
    try:
        text = generate_latest(registry).decode()
    except (UnicodeEncodeError, OverflowError):  # the client gets "500 … failed"
        return
    names = {family.name for family in text_string_to_metric_families(text)}
    assert all(name.startswith("redelastic_") for name in names)


REQUESTS: Final = (
    b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
    b"HEAD /readyz?x HTTP/1.0\r\n\r\n",
    b"GET /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nabcde",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
)


def fuzz_requests(dice: Dice) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(dice.spoil_raw(dice.choice(REQUESTS))[:60_000])
        ours.shutdown(socket.SHUT_WR)
        node = NodeOf(dice)
        server = SimpleNamespace(node=node, registry=SimpleNamespace(collect=lambda: ()), is_local=dice.random() < 0.5)
        server.has_asked = lambda _: None
        with contextlib.suppress(ConnectionError):
            _Handler(theirs, ("test", 0), cast("_Server", server))
        theirs.close()
        answer = ours.recv(1 << 16)
    assert answer.count(b"Content-Type:") <= 1  # no header is injected


def fuzz_slots(dice: Dice) -> None:
    """Workers write these slots; they run the user's own code, which may write anything."""
    board = ProgressBoard(1)
    for field in range(1, SLOT_BYTES // 8):
        board.slots[0][field] = dice.choice((0, -1, 1, 2**63 - 1, -(2**63), dice.randrange(2**63)))
    json.dumps(board.read(0).step)
    HangWatch(board, 1, 1, set()).look([0])
    board.close()


PURE: Final[dict[Callable[[Dice], None], int]] = {  # and their share of the inputs
    fuzz_status_view: 1,
    fuzz_words: 6,
    fuzz_pages: 2,
    fuzz_bounded_status: 4,
    fuzz_metrics: 1,
    fuzz_requests: 2,
    fuzz_slots: 2,
}


@pytest.mark.fault("hostile values in Redis, options and requests", "only redelastic's own errors are raised")
@pytest.mark.parametrize("target", PURE, ids=lambda target: target.__name__[5:])
def test_only_redelastics_own_errors_are_raised(target: Callable[[Dice], None], measured: Callable[..., None]) -> None:
    count = max(20, INPUTS * PURE[target] // 110)
    try_all(target, count)
    measured("inputs", count, "")
