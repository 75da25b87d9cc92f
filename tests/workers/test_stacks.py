"""Where workers hang: the stacks of real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from redelastic.worker import STACK_SIGNAL, VARIABLE
from redelastic.workers import stacks
from redelastic.workers.board import ProgressBoard
from redelastic.workers.stacks import catches, dump_stacks, merged
from tests.support import worker_processes
from tests.support.temporary import make_temporary_files_in
from tests.support.waiting import Within
from tests.support.worker_processes import StartOnBoard

board = worker_processes.board
start = worker_processes.start_on_board
TIMEOUT = 30.0  # of a dump, in seconds: a worker that answers never uses it up
until = Within(30)


def is_in_state(pid: int, state: str) -> bool:
    return f"State:\t{state}" in Path(f"/proc/{pid}/status").read_text()


HANG = """
import time
from redelastic.worker import progress
def hang():
    progress(7)
    print("ready", flush=True)
    time.sleep(600)
hang()
"""


WAYS_TO_HANG = {
    "sleep": "time.sleep(600)",
    "pipe": "os.read(os.pipe()[0], 1)",
    "lock": "lock = threading.Lock(); lock.acquire(); lock.acquire()",
    "loop": "while True: pass",
    # C code that keeps the interpreter's lock
    "gil": "ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)",
}


@pytest.fixture
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.parametrize("way", WAYS_TO_HANG)
def test_a_hung_worker_writes_its_stacks_itself(start: StartOnBoard, board: ProgressBoard, way: str) -> None:
    code = HANG.replace("import time", "import ctypes, os, threading, time")
    pids = {r: start(code.replace("time.sleep(600)", WAYS_TO_HANG[way]), r) for r in (0, 2)}
    for _ in range(2):  # the second dump does not show the first once more
        texts = dump_stacks(board, pids, TIMEOUT)
        assert sorted(texts) == [0, 2]
        assert [text.count("in hang") for text in texts.values()] == [1, 1], texts
    assert board.read(2).step == 7, "and lives"
    assert not is_in_state(pids[2], "Z")


@pytest.mark.usefixtures("no_py_spy")
def test_workers_that_are_replaced_during_a_dump_have_no_stacks(
    start: StartOnBoard,
) -> None:
    class Replaced(ProgressBoard):
        def stacks_size(self, local_rank: int) -> int:
            self.close()
            return super().stacks_size(local_rank)

    replaced = Replaced(1)
    pid = start(HANG, of=replaced)
    assert dump_stacks(replaced, {0: pid}, TIMEOUT)[0].startswith(f"No stacks: process {pid} ")


@pytest.mark.usefixtures("no_py_spy")
def test_a_worker_that_hangs_before_its_first_call_writes_its_stacks(start: StartOnBoard, board: ProgressBoard) -> None:
    pid = start(HANG.replace("progress(7)", ""))
    assert board.read(0).pid == 0
    assert "in hang" in dump_stacks(board, {0: pid}, TIMEOUT)[0]


@pytest.mark.usefixtures("no_py_spy")
@pytest.mark.fault(
    "a worker hangs before its first progress()", "its stacks are reported, if its script imports redelastic"
)
def test_a_worker_that_imports_the_package_has_stacks(start: StartOnBoard, board: ProgressBoard) -> None:
    """The most frequent hang is in NCCL's start, before any step."""
    pid = start(HANG.replace("from redelastic.worker import progress", "import redelastic").replace("progress(7)", ""))
    assert "in hang" in dump_stacks(board, {0: pid}, TIMEOUT)[0]


def test_without_an_agent_the_package_imports_no_torch() -> None:
    code = "import sys, redelastic; print([n for n in sys.modules if n.startswith(('redelastic.', 'torch', 'mmap'))])"
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.usefixtures("no_py_spy")
def test_stacks_are_of_the_process_that_reports_progress_not_of_its_shell(
    start: StartOnBoard, board: ProgressBoard
) -> None:
    shell = start(f"{sys.executable} -c '{HANG}' & wait", command=("bash", "-c"))
    reporter = board.read(0).pid
    assert reporter not in (0, shell)
    try:
        assert "in hang" in dump_stacks(board, {0: shell}, TIMEOUT)[0]
    finally:
        os.kill(reporter, signal.SIGKILL)


@pytest.mark.usefixtures("no_py_spy")
def test_long_stacks_are_cut_and_keep_the_main_thread(start: StartOnBoard, board: ProgressBoard) -> None:
    code = """
import threading
def deep(n):
    if n: deep(n - 1)
    else: ready.release(); threading.Event().wait()
ready = threading.Semaphore(0)
for _ in range(50):
    threading.Thread(target=deep, args=(90,), daemon=True).start()
    ready.acquire()
"""
    text = dump_stacks(board, {0: start(code + HANG)}, TIMEOUT)[0]
    assert board.stacks_size(0) > 5 * stacks.MAX_BYTES
    assert text.startswith(stacks.CUT)
    assert stacks.MAX_BYTES - 200 < len(text) <= stacks.MAX_BYTES + 100
    assert "in hang" in text


def test_py_spy_dumps_a_worker_that_has_no_handler(start: StartOnBoard, board: ProgressBoard) -> None:
    if stacks.find_py_spy() is None:
        pytest.skip("py-spy is not installed")
    code = HANG.replace("from redelastic.worker import progress", "").replace("progress(7)", "")
    pid = start(code + "# password=hunter2")
    text = dump_stacks(board, {0: pid}, TIMEOUT)[0]
    if "ermission" in text:
        pytest.skip(f"py-spy may not trace here: {text}")
    assert text.startswith("Thread ")
    assert "hang (<string>" in text
    assert "hunter2" not in text


@pytest.mark.usefixtures("no_py_spy")
def test_a_worker_without_a_handler_is_not_sent_the_signal(start: StartOnBoard, board: ProgressBoard) -> None:
    pid = start("print('ready', flush=True)\nimport time\ntime.sleep(600)", None)
    text = dump_stacks(board, {0: pid}, TIMEOUT)[0]
    assert "\n" not in text
    assert re.search(rf"process {pid} \(state [RS]\) has not imported redelastic: ", text)
    assert r"pip install redelastic[stacks]" in text
    os.kill(pid, signal.SIGSTOP)  # signals arrive in order: the other one would have killed it by now
    until(lambda: is_in_state(pid, "T"))


def test_stopped_dead_and_missing_processes_are_reported_as_such(start: StartOnBoard, board: ProgressBoard) -> None:
    pids = {r: start(HANG, r) for r in (0, 1)}
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    until(lambda: is_in_state(pids[0], "T") and is_in_state(pids[1], "Z"))
    gone = subprocess.Popen(["true"])
    gone.wait()
    texts = dump_stacks(board, pids | {2: gone.pid}, TIMEOUT)
    assert "is stopped (state T)" in texts[0]
    assert "is a zombie (state Z)" in texts[1]
    assert texts[2] == f"No stacks: process {gone.pid} has ended."


def test_a_silent_worker_and_a_py_spy_that_hangs_cost_one_timeout_at_most(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: StartOnBoard, board: ProgressBoard
) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/started\nexec sleep 600\n")
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    # The worker has a handler of its own, which writes nothing.
    deaf = HANG.replace("def hang", f"import signal\nsignal.signal({STACK_SIGNAL}, lambda *_: None)\ndef hang")
    pids = {0: start(deaf, 0), 1: start(deaf, 1), 2: start(deaf, None)}
    began = time.monotonic()
    texts = dump_stacks(board, pids, 8)  # py-spy's shells have half of it to start
    assert time.monotonic() - began < 60  # without the limit it would be 600
    assert all(text.endswith("did not answer; py-spy: took too long.") for text in texts.values())
    spies = (tmp_path / "started").read_text().split()
    assert len(spies) == 3
    assert not [pid for pid in spies if Path(f"/proc/{pid}").exists()]


def test_a_py_spy_that_cannot_be_run_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: StartOnBoard, board: ProgressBoard
) -> None:
    py_spy = tmp_path / "py-spy"
    py_spy.write_text("#!/\n")  # a folder is no interpreter
    py_spy.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    pid = start("print('ready', flush=True)\nimport time\ntime.sleep(600)", None)
    assert "Permission denied" in dump_stacks(board, {0: pid}, TIMEOUT)[0]


@pytest.mark.usefixtures("no_py_spy")
def test_a_closed_board_is_no_error(start: StartOnBoard, board: ProgressBoard) -> None:
    pid = start(HANG)
    board.close()
    assert dump_stacks(board, {0: pid}, TIMEOUT)[0].startswith("No stacks")


def test_catches_tells_whether_a_signal_has_a_handler(start: StartOnBoard) -> None:
    pid = start(
        "import signal, time\n"
        "signal.signal(signal.SIGUSR1, print)\n"
        "signal.signal(signal.SIGUSR2, signal.SIG_IGN)\n"
        "print('ready', flush=True)\n"
        "time.sleep(600)"
    )
    asked = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, STACK_SIGNAL, signal.SIGINT, 64)
    assert [catches(pid, s) for s in asked] == [True, False, False, False, True, False]
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert not catches(gone.pid, signal.SIGUSR1)


def test_equal_stacks_are_shown_once() -> None:
    at = "Thread 0x{:016x} (most recent call first):\n  File 'train.py', line 7 in all_reduce"
    text = merged({0: at.format(0x7F01), 1: "in load", 2: at.format(0x7F02)}, 1000)
    assert text == f"workers 0, 2:\n{at.format(0x7F01)}\n\nworker 1:\nin load"
    assert merged({3: "in load"}, 1000) == "in load"


def test_many_long_stacks_are_cut_to_equal_shares_and_keep_their_ends() -> None:
    text = merged({rank: f"{rank}" * 5000 + f" the end of {rank}" for rank in range(8)}, 16_000)
    assert len(text) <= 16_000
    assert all(f"the end of {rank}" in text for rank in range(8))
    assert merged({0: "x" * 20_000 + "the end"}, 16_000)[-7:] == "the end"


def test_without_memfd_a_board_uses_a_file_that_is_removed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: StartOnBoard
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    make_temporary_files_in(tmp_path, monkeypatch)
    other = ProgressBoard(1)
    file = Path(other.environment(0)[VARIABLE].rpartition(":")[0]).readlink()
    assert tmp_path in file.parents
    pid = start(HANG, of=other)
    assert other.read(0).step == 7
    assert "in hang" in dump_stacks(other, {0: pid}, TIMEOUT)[0]
    assert not list(tmp_path.iterdir())
    other.close()
