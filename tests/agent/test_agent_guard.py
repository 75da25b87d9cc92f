"""The agent keeps a warden: it says once why one died, and tries another one at longer and longer intervals."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from redelastic.agent.workers import guard as guard_module
from redelastic.agent.workers import warden
from redelastic.agent.workers.guard import LONGEST_PAUSE, SETTLED, Guard
from tests.support.worker_processes import lives, until


class Clock:
    """The guard's clock, which the test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(guard_module, "time", made)
    return made


Replace = Callable[[str], None]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Replace:
    """Has wardens run another program from now on."""

    def replace(source: str) -> None:
        program = tmp_path / "warden.py"
        program.write_text(source)
        monkeypatch.setattr(warden, "__file__", str(program))

    return replace


@pytest.fixture
def guard(clock: Clock) -> Iterator[Guard]:  # noqa: ARG001  # its clock
    made = Guard("token", bytes)
    yield made
    made.close()


def dies(guard: Guard) -> None:
    assert guard.pid is not None
    process = psutil.Process(guard.pid)
    until(lambda: not lives(process), "the warden's end")


BROKEN = "import sys; sys.exit('no module named spam')"


@pytest.mark.fault(
    "a warden that dies at once", "one warning says why; new ones are tried at longer and longer intervals"
)
def test_why_a_warden_died_is_told_once(
    guard: Guard, clock: Clock, replace: Replace, caplog: pytest.LogCaptureFixture
) -> None:
    replace(BROKEN)
    starts = []
    last = None
    for _ in range(int(5 * LONGEST_PAUSE)):
        guard.brief(())
        if guard.pid is not None and guard.pid != last:
            starts.append(clock.now)
            last = guard.pid
            dies(guard)
        clock.now += 1
    pauses = [later - earlier for earlier, later in pairwise(starts)]
    noticed_after = 1  # a briefing a second
    assert pauses[:7] == [noticed_after + pause for pause in (0, 1, 2, 4, 8, 16, 32)]
    assert set(pauses[7:]) == {noticed_after + LONGEST_PAUSE}
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "exited with 1" in record.message
    assert "workers would survive this process if it got SIGKILL" in record.message
    assert record.message.endswith("no module named spam")


def test_a_warden_that_was_killed_is_told_of_and_replaced_at_once(
    guard: Guard, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        guard.brief(())
        clock.now += SETTLED
        assert guard.pid is not None
        first = guard.pid
        psutil.Process(first).kill()
        dies(guard)
        caplog.clear()
        guard.brief(())
        assert guard.pid not in (first, None)
        assert "was ended by SIGKILL" in caplog.text


def test_a_warden_that_cannot_be_started_is_told_of_once(
    guard: Guard, clock: Clock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(tmp_path / "nowhere"))
        for _ in range(5):
            guard.brief(())
            clock.now += LONGEST_PAUSE
    [record] = caplog.records
    assert "No warden could be started" in record.message
    guard.brief(())
    assert guard.pid is not None, "it goes on trying"
