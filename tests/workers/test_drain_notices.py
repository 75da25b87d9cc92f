"""How a node is asked to drain: by signals, which may come twice for one request, and by a file on a lost mount."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import SignalException

from redelastic.workers.drains import DrainFile
from redelastic.workers.signals import SAME_REQUEST_SECONDS, drain_on_signals


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_sigterm_that_comes_twice_at_once_is_one_request(clock: Clock) -> None:
    drained: list[str] = []
    with drain_on_signals(drained.append, clock):
        signal.raise_signal(signal.SIGTERM)
        clock.now += 0.02
        signal.raise_signal(signal.SIGTERM)
        clock.now += SAME_REQUEST_SECONDS - 0.03
        signal.raise_signal(signal.SIGTERM)
        assert drained == ["SIGTERM"] * 3


def test_a_second_sigterm_is_a_request_of_its_own_later(clock: Clock) -> None:
    drained: list[str] = []
    with drain_on_signals(drained.append, clock):
        signal.raise_signal(signal.SIGTERM)
        for _ in range(3):  # a sender that repeats it has to succeed at last
            clock.now += SAME_REQUEST_SECONDS / 2
            if clock.now - 1000 <= SAME_REQUEST_SECONDS:
                signal.raise_signal(signal.SIGTERM)
        with pytest.raises(SignalException, match="got SIGTERM a second time"):
            signal.raise_signal(signal.SIGTERM)


def test_sigusr1_never_ends_a_node(clock: Clock) -> None:
    drained: list[str] = []
    with drain_on_signals(drained.append, clock):
        signal.raise_signal(signal.SIGUSR1)
        clock.now += 10
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGTERM)  # the first one
        assert drained == ["SIGUSR1", "SIGUSR1", "SIGTERM"]


# -- the file


@pytest.mark.parametrize(
    ("text", "timeout"),
    [("", 30.0), ("soon", 30.0), ("1", 0.0), (f"{time.time() + 1e6}", 30.0)],
    ids=["empty", "no time", "past", "far off"],
)
def test_a_drain_file_may_have_a_deadline(tmp_path: Path, text: str, timeout: float) -> None:
    drained: list[tuple[str, float]] = []
    file = DrainFile(tmp_path / "notice", 30.0, lambda *request: drained.append(request))
    file.look()
    assert drained == []
    (tmp_path / "notice").write_text(text)
    file.look()
    assert drained == [(f"the file {tmp_path / 'notice'} exists", timeout)]


@pytest.mark.fault("the drain file is out of reach, as on a lost mount", "one warning; the agent keeps looking for it")
def test_a_drain_file_out_of_reach_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "mount"
    folder.symlink_to(folder)  # as on a lost mount: each look is an error, for root too
    drained: list[tuple[str, float]] = []
    file = DrainFile(folder / "notice", 30.0, lambda *request: drained.append(request))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            file.look()
    [record] = caplog.records
    assert record.exc_info is None
    assert "The drain file cannot be checked" in record.getMessage()
    assert str(folder / "notice") in record.getMessage()
    folder.unlink()
    folder.mkdir()
    (folder / "notice").touch()
    file.look()
    assert len(drained) == 1


FORKS = """
import os, signal
from redelastic.signals import handling

with handling([signal.SIGTERM, signal.SIGUSR1], print), handling([signal.SIGTERM], repr):
    if not (child := os.fork()):
        os._exit(sum(signal.getsignal(number) is not signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGUSR1)))
    assert os.waitpid(child, 0)[1] == 0, "the child has handlers"
    assert signal.getsignal(signal.SIGTERM) is repr
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


def test_a_forked_worker_has_none_of_the_agents_handlers() -> None:
    """Else the agent would take its own handler for one with which the worker saves."""
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
