"""What a script reports to its agent: real processes write, a real board reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from redelastic import worker
from redelastic.agent import AgentOptions
from redelastic.workers.board import ProgressBoard
from redelastic.workers.group import Workers
from tests.support import worker_processes
from tests.support.flight_recorder import records_gloo
from tests.support.waiting import Within
from tests.support.worker_scripts import Dialogue, run

board = worker_processes.board
until = Within(60)


def test_the_board_shows_calls_and_the_last_step(board: ProgressBoard) -> None:
    run("for step in range(100, 150): progress(step)", board.environment(1))
    report = board.read(1)
    assert (report.calls, report.step, report.asks, report.saved) == (50, 149, False, False)
    silent = board.read(0)
    assert (silent.calls, silent.step, silent.pid) == (0, None, 0)


@pytest.mark.parametrize("step", [0, -7, 2**63 - 1, -(2**63)])
def test_any_64_bit_integer_is_a_step(board: ProgressBoard, step: int) -> None:
    run(f"progress({step})", board.environment(0))
    assert board.read(0).step == step


@pytest.mark.parametrize("step", [True, np.int64(1), np.uint8(1), torch.tensor(1), torch.ones(1, dtype=torch.int32)])
def test_integers_of_numpy_and_torch_are_steps(step: int) -> None:
    worker.progress(0)
    worker.progress(step)
    assert worker._slot[worker.STEP] == 1


@pytest.mark.parametrize("step", [1.0, "7", None, np.float32(1), torch.tensor(1.5), torch.arange(2), b"x" * 1000])
def test_a_step_that_is_no_integer_is_refused(step: int) -> None:
    with pytest.raises(TypeError, match=r"takes an integer step, not .{1,80}\.$"):
        worker.progress(step)


def test_a_step_of_more_than_64_bits_is_refused() -> None:
    with pytest.raises(ValueError, match="63 bits plus a sign, not 64 bits"):
        worker.progress(2**63)


def test_without_an_agent_calls_do_nothing() -> None:
    assert run("progress(1); print(should_checkpoint(), os.listdir('/proc/self/fd'))", {worker.VARIABLE: ""}) == run(
        "print(False, os.listdir('/proc/self/fd'))", {worker.VARIABLE: ""}
    )


def test_the_agents_files_survive_a_script_that_closes_its_own(board: ProgressBoard) -> None:
    """Else Python would write its stacks into the next file that gets the descriptor's number."""
    code = """
os.closerange(3, 256)
opened = os.open(os.devnull, os.O_WRONLY)
print(opened, [int(n) > 256 for n in os.listdir("/proc/self/fd") if int(n) > opened + 1])
"""
    assert run(code, board.environment(0)) == "3 [True]"


def test_the_import_loads_no_large_module() -> None:
    assert run("print([m for m in ('torch', 'redis', 'logging', 'asyncio') if m in sys.modules])", {}) == "[]"


def test_calls_of_many_threads_are_all_counted(board: ProgressBoard) -> None:
    code = """
import threading
sys.setswitchinterval(1e-5)
threads = [threading.Thread(target=lambda: [progress(i) for i in range(20_000)]) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
progress(1)
"""
    run(code, board.environment(0))
    assert board.read(0).calls == 160_001


def test_calls_are_counted_while_the_first_one_opens_the_slot(board: ProgressBoard) -> None:
    code = """
import threading
from redelastic import worker
find = worker._open
other = threading.Thread(target=lambda: progress(2))
def find_meanwhile():
    if not other.ident:
        other.start()
        other.join(0.2)  # it waits for this call to return
    return find()
worker._open = find_meanwhile
progress(1)
other.join()
"""
    run(code, board.environment(0))
    assert board.read(0).calls == 2


# -- a checkpoint is requested


def test_a_request_is_returned_once_and_saved_at_the_next_progress(board: ProgressBoard) -> None:
    code = """
def turn(action):
    print(action(), flush=True)
    sys.stdin.readline()
turn(should_checkpoint)
turn(lambda: progress(1))
turn(should_checkpoint)
turn(should_checkpoint)
turn(lambda: progress(2))
turn(should_checkpoint)
turn(should_checkpoint)
turn(lambda: progress(3))
"""
    with Dialogue(code, board.environment(0)) as script:
        assert script.answer() == "False"
        assert board.read(0).asks
        board.request_checkpoint()
        assert not board.read(0).saved
        assert script.next() == "None"  # progress before the script has seen the request
        assert not board.read(0).saved
        assert [script.next(), board.read(0).saved] == ["True", False]
        assert [script.next(), board.read(0).saved] == ["False", False]
        assert [script.next(), board.read(0).saved] == ["None", True]
        board.request_checkpoint()
        board.request_checkpoint()
        assert not board.read(0).saved, "the save was for the earlier request"
        assert [script.next(), board.read(0).saved] == ["True", False]
        assert [script.next(), board.read(0).saved] == ["False", False]
        assert [script.next(), board.read(0).saved] == ["None", True]


def test_a_save_that_goes_on_after_progress_is_awaited(board: ProgressBoard) -> None:
    code = """
from threading import Thread
def turn(action):
    print(action(), flush=True)
    sys.stdin.readline()
def fail():
    try:
        with begin_save():
            raise OSError("disk full")
    except OSError as e:
        return e
turn(should_checkpoint)
first, second = begin_save(), begin_save()
turn(lambda: progress(1))
turn(first.complete)
thread = Thread(target=second.complete)
turn(lambda: (thread.start(), thread.join()))
turn(fail)
turn(begin_save().complete)
"""
    board.request_checkpoint()
    with Dialogue(code, board.environment(0)) as script:
        assert script.answer() == "True"
        script.next()
        assert not board.read(0).saved, "both saves are in flight"
        script.next()
        assert not board.read(0).saved, "the second save is in flight"
        script.next()
        assert board.read(0).saved
        assert script.next() == "disk full"
        assert not board.read(0).saved, "a save that fails is no checkpoint"
        script.next()
        assert board.read(0).saved, "a later save replaces it"


def test_a_save_that_the_script_begins_by_itself_is_awaited() -> None:
    workers = Workers(2, AgentOptions(), 0.1, set(), lambda: None)
    code = """
def turn(action):
    print(action(), flush=True)
    sys.stdin.readline()
before = begin_save()
turn(lambda: progress(1))
turn(before.complete)
own = begin_save()
turn(lambda: progress(2))
turn(own.complete)
"""
    with Dialogue(code, workers.environment(0)) as script, Dialogue("sys.stdin.read()", {}) as other:
        assert script.answer() == "None"
        workers.started({0: script.process.pid, 1: other.process.pid})
        workers.await_own_save(leads=False)
        script.next()
        assert not workers.have_saved(), "that save began before the wait"
        script.next()
        assert not workers.have_saved(), "the save is in flight"
        script.next()
        assert workers.have_saved(), "the other worker has never begun a save"
        workers.await_own_save(leads=True)
        assert not workers.have_saved()
        workers.ask_to_save(by_signal=False)
        assert workers.have_saved(), "no worker can be asked, which counts as saved"
    workers.close()


@records_gloo
def test_a_worker_looks_whether_a_collective_goes_on(board: ProgressBoard, tmp_path: Path) -> None:
    code = f"""
import torch.distributed as dist
rank = int(sys.stdin.readline())
dist.init_process_group("gloo", store=dist.FileStore("{tmp_path}/store"), rank=rank, world_size=2)
dist.barrier()
progress(0)
(dist.barrier if rank == 0 else sys.stdin.readline)()
"""
    with Dialogue(code, board.environment(0)) as waits, Dialogue(code, board.environment(1)) as computes:
        waits.say("0")
        computes.say("1")
        until(lambda: board.read(0).waits and board.read(1).looks)
        before = board.read(0)
        until(lambda: board.read(0).looks >= before.looks + 5)
        after = board.read(0)
        assert after.waits - before.waits >= after.looks - before.looks - 1, "all but one that is half counted"
        assert board.read(1).waits == 0


@records_gloo
@pytest.mark.fault(
    "a process group is used for the first time",
    "its worker's thread does not look at torch's flight recorder before: that could crash the worker",
)
def test_the_flight_recorder_is_left_alone_while_a_group_has_yet_to_be_used(board: ProgressBoard) -> None:
    code = """
import torch.distributed as dist
from redelastic import worker
def turn(action):
    action()
    print(flush=True)
    sys.stdin.readline()
worker.LOOK_INTERVAL_MS = 0
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
turn(lambda: progress(0))
turn(dist.barrier)
made = []
turn(lambda: made.append(dist.new_group()))
turn(lambda: dist.barrier(*made))
turn(dist.destroy_process_group)
"""

    def looks() -> int:
        """How many there have been, once the thread has had the time for some more: it looks after each answer."""
        for _ in range(20):
            board.ask_for_records(0)
            until(lambda: board.records(0, 1 << 20) is not None)
        return board.read(0).looks

    with Dialogue(code, board.environment(0)) as script:
        script.answer()
        assert looks() == 0
        script.next()
        until(looks)
        script.next()
        before = looks()
        assert looks() == before, "the second group has yet to be used"
        script.next()
        until(lambda: looks() > before)
        script.next()
        before = looks()
        assert looks() == before, "no group is left"


def test_a_successor_does_not_inherit_saves_or_phases(board: ProgressBoard) -> None:
    board.request_checkpoint()
    code = "with phase('export', timeout=9): should_checkpoint(); begin_save(); progress(1); os._exit(0)"
    run(code, board.environment(0))
    assert not board.read(0).saved
    assert board.read(0).phase == "export"
    run("progress(2)", board.environment(0))
    assert board.read(0).saved
    assert (board.read(0).phase, board.read(0).limit) == ("", None)


# -- phases


def test_phases_have_names_and_limits_and_may_be_nested(board: ProgressBoard) -> None:
    code = """
def turn():
    print(flush=True)
    sys.stdin.readline()
with phase("export", timeout=3600):
    turn()
    with phase("\u00e9" * 30, timeout=0.5):
        turn()
    progress(7)
    turn()
turn()
"""
    with Dialogue(code, board.environment(0)) as script:
        script.answer()
        report = board.read(0)
        assert (report.phase, report.limit, report.calls, report.step) == ("export", 3600, 0, None)
        assert report.at is not None
        script.next()
        assert (board.read(0).phase, board.read(0).limit) == ("\u00e9" * 20, 0.5), "cut at 40 bytes"
        script.next()
        assert (board.read(0).phase, board.read(0).limit, board.read(0).step) == ("export", 3600, 7)
        script.next()
        assert (board.read(0).phase, board.read(0).limit) == ("", None)


def test_a_phase_that_is_left_after_its_parent_leaves_nothing_behind(board: ProgressBoard) -> None:
    code = """
parent, child = phase("fit", timeout=100), phase("after the training", timeout=200)
parent.__enter__(), child.__enter__(), parent.__exit__(None, None, None)
print(flush=True)
sys.stdin.readline()
child.__exit__(None, None, None)
print(flush=True)
sys.stdin.readline()
"""
    with Dialogue(code, board.environment(0)) as script:
        script.answer()
        assert (board.read(0).phase, board.read(0).limit) == ("after the training", 200)
        script.next()
        assert (board.read(0).phase, board.read(0).limit) == ("", None)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_phase_without_a_limit_is_refused(timeout: float) -> None:
    with (
        pytest.raises(ValueError, match=r"phase\(\) takes a positive timeout in seconds, not "),
        worker.phase("export", timeout=timeout),
    ):
        pass


# -- which process reports for the worker


# -- failures
