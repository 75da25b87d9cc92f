"""Which workers hang, by a clock of the test's; and the files of a board."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from redelastic.worker import AT, CALLS, LIMIT
from redelastic.workers.board import HangWatch, ProgressBoard
from tests.support import worker_processes
from tests.support.waiting import Within

board = worker_processes.board
start = worker_processes.start_on_board
TIMEOUT = 30.0  # of a dump, in seconds: a worker that answers never uses it up
until = Within(30)


def is_in_state(pid: int, state: str) -> bool:
    return f"State:\t{state}" in Path(f"/proc/{pid}/status").read_text()


# -- HangWatch


class Workers:
    """A board whose workers and clock are the test's, and an agent that looks at it ten times a second."""

    def __init__(
        self,
        board: ProgressBoard,
        timeout: float,
        start_timeout: float | None = None,
        reporters: set[int] | None = None,
    ) -> None:
        self.board, self.now = board, 1000.0
        earlier = {0, 1, 2} if reporters is None else reporters
        start = timeout if start_timeout is None else start_timeout
        self.watch = HangWatch(board, timeout, start, earlier, clock=lambda: self.now)
        self.running = {0, 1, 2}

    def call(self, *local_ranks: int) -> None:
        for local_rank in local_ranks:
            self.board.slots[local_rank][AT] = round(self.now * 1e9)
            self.board.slots[local_rank][CALLS] += 1

    def after(self, seconds: float) -> dict[int, float]:
        for _ in range(round(seconds * 10)):
            self.now += 0.1
            hung = self.watch.look(self.running)
        return hung


def test_a_worker_hangs_that_makes_no_progress_for_longer_than_the_timeout(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=5)
    workers.call(0, 1, 2)
    assert workers.after(4) == {}
    workers.call(0)
    assert workers.after(0.9) == {}
    hung = workers.after(0.6)
    assert sorted(hung) == [1, 2]
    assert hung[1] == pytest.approx(5.5)
    workers.call(1)
    assert sorted(workers.after(0.1)) == [2], "a worker that goes on does not hang any more"
    assert sorted(workers.after(5.5)) == [0, 1, 2]


def test_the_first_call_may_take_longer(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2, start_timeout=10)
    workers.call(2)
    assert workers.after(1.9) == {}
    assert sorted(workers.after(1)) == [2]
    workers.call(1, 2)
    assert workers.after(1.9) == {}
    assert sorted(workers.after(1)) == [1, 2]
    for _ in range(2):
        workers.call(1, 2)
        assert workers.after(1.5) == {}
    workers.call(1, 2)
    assert sorted(workers.after(1.5)) == [0]


def test_a_phase_has_a_limit_of_its_own(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2, start_timeout=4, reporters=set())
    workers.running = {0, 1}
    workers.call(0)
    for slot in board.slots[:2]:  # one that has reported progress, and one that never does
        slot[AT], slot[LIMIT] = round(workers.now * 1e9), 6000
    assert workers.after(5.9) == {}
    assert sorted(workers.after(0.3)) == [0, 1]
    for slot in board.slots[:2]:
        slot[AT], slot[LIMIT] = round(workers.now * 1e9), 0
    assert workers.after(1.9) == {}
    assert sorted(workers.after(0.3)) == [0], "after its phase"


def test_without_hang_detection_no_phase_hangs(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=float("inf"))
    board.slots[0][AT], board.slots[0][LIMIT] = round(workers.now * 1e9), 1000
    assert workers.after(60) == {}


def test_a_call_that_was_made_before_the_first_look_counts(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2, start_timeout=10)
    workers.call(0)
    workers.after(0.1)
    assert sorted(workers.after(2.1)) == [0]


def test_a_worker_that_has_never_called_does_not_hang(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2, start_timeout=4, reporters=set())
    workers.call(0)
    assert workers.after(3.9) == {0: pytest.approx(3.9)}
    assert workers.watch.silent == []
    workers.call(0)
    assert workers.after(1) == {}
    assert workers.watch.silent == [1, 2]
    workers.call(0, 1)  # late, and from now on it is watched
    assert workers.after(1.9) == {}
    assert workers.watch.silent == [2]
    assert sorted(workers.after(1)) == [0, 1]
    assert workers.watch.reporters == {0, 1}


def test_a_worker_that_has_called_in_an_earlier_round_may_hang_before_its_first_call(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2, start_timeout=4, reporters={1})
    assert workers.after(3.9) == {}
    assert sorted(workers.after(0.3)) == [1]
    assert workers.watch.silent == [0, 2]


def test_idle_time_counts_from_the_call_and_not_from_the_look(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2)
    workers.watch = HangWatch(board, 2, 2, {0}, interval=1, clock=lambda: workers.now)
    workers.running = {0}
    workers.now += 0.3
    workers.call(0)
    workers.now += 0.6
    assert workers.watch.look({0}) == {}
    assert workers.watch.idle[0] == pytest.approx(0.6)
    assert workers.watch.due_in == pytest.approx(1.4)
    workers.now += 1.41
    assert workers.watch.look({0}) == {0: pytest.approx(2.01)}


@pytest.mark.parametrize("off", [-1e6, 1e6], ids=["behind", "ahead"])
def test_a_call_by_another_clock_is_taken_as_made_since_the_last_look(board: ProgressBoard, off: float) -> None:
    """A worker in a time namespace of its own has another clock."""
    workers = Workers(board, timeout=2)
    workers.running = {0}
    workers.after(0.1)
    workers.call(0)
    board.slots[0][AT] += round(off * 1e9)
    workers.after(0.1)
    assert 0 <= workers.watch.idle[0] <= 0.11


def test_a_worker_that_has_ended_does_not_hang(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=2)
    workers.running = {1, 2}
    assert sorted(workers.after(3)) == [1, 2]


def test_time_in_which_the_agent_was_frozen_does_not_count(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=5)
    workers.after(3)
    workers.now += 3600
    assert workers.after(1.9) == {}
    assert sorted(workers.after(0.3)) == [0, 1, 2]


def test_looks_that_are_a_little_late_count(board: ProgressBoard) -> None:
    workers = Workers(board, timeout=5)
    for _ in range(6):
        workers.now += 0.9
        hung = workers.watch.look(workers.running)
    assert sorted(hung) == [0, 1, 2]


# -- ProgressBoard


def test_a_board_gives_back_all_it_took() -> None:
    open_files = Path("/proc/self/fd")
    gc.collect()  # else files that other tests have left may be closed meanwhile
    before = len(list(open_files.iterdir()))
    board = ProgressBoard(8)
    assert len(list(open_files.iterdir())) > before
    board.close()
    board.close()
    del board
    assert len(list(open_files.iterdir())) == before


# -- stacks


@pytest.mark.fault("a worker truncates the file of its progress", "it is refused; its agent lives on")
def test_a_worker_cannot_end_its_agent_by_truncating_its_slot() -> None:
    """The agent is a process of its own here, since SIGBUS would end it."""
    script = """
import os
from redelastic.worker import VARIABLE
from redelastic.workers.board import ProgressBoard
board = ProgressBoard(1)
path = board.environment(0)[VARIABLE].split(":")[0]
for size in (0, 1, 1 << 20):
    try:
        os.truncate(path, size)
    except PermissionError:
        print("refused")
board.read(0)
board.request_checkpoint()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, 3 * "refused\n", "")
