"""The agent keeps a reaper: it says once why one died, and starts another at most every 10 s."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from redelastic.workers.processes import RESTART_INTERVAL, ReaperClient
from tests.support.liveness import lives
from tests.support.worker_processes import until


class Clock:
    """The client's clock, which the test moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reaper(clock: Clock) -> Iterator[ReaperClient]:
    made = ReaperClient("token", clock)
    yield made
    made.close()


def brief_until_it_is_dead(reaper: ReaperClient) -> None:
    reaper.brief(())
    if reaper.pid is not None:
        process = psutil.Process(reaper.pid)
        until(lambda: not lives(process), "the reaper's end")
        reaper.brief(())


@pytest.mark.fault("a reaper that dies at once", "one warning says why; another is tried every 10 s")
@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("#!/bin/sh\necho no module named spam >&2\nexit 1\n", "exited with 1"),
        ("", "No reaper could be started"),
    ],
    ids=["broken", "not executable"],
)
def test_reapers_that_fail_are_reported_once(
    *,
    reaper: ReaperClient,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    program: str,
    reason: str,
) -> None:
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o700 if program else 0o600)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(python))
        for _ in range(3):
            brief_until_it_is_dead(reaper)
            clock.now += RESTART_INTERVAL - 1
            reaper.brief(())
            assert reaper.pid is None, "the next one has to wait"
            clock.now += 1
    [record] = caplog.records
    assert reason in record.message
    assert "workers would survive this process if it got SIGKILL" in record.message
    assert record.message.endswith("\nno module named spam" if program else "SIGKILL.")
    reaper.brief(())
    assert reaper.pid is not None, "the client goes on trying"


def test_a_reaper_that_was_killed_is_reported_and_replaced_at_once(
    reaper: ReaperClient, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        reaper.brief(())
        assert reaper.pid is not None
        first = psutil.Process(reaper.pid)
        first.kill()
        until(lambda: not lives(first), "the reaper's end")  # noqa: B023  # called at once
        clock.now += RESTART_INTERVAL
        caplog.clear()
        reaper.brief(())
        assert reaper.pid not in (first.pid, None)
        assert "was ended by SIGKILL" in caplog.text
