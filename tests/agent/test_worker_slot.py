"""Which process writes into a worker's slot: forks, successors, strangers, and an agent that is gone."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redelastic import worker
from redelastic.workers.board import ProgressBoard
from tests.support import worker_processes
from tests.support.waiting import Within
from tests.support.worker_scripts import Dialogue, run

board = worker_processes.board
until = Within(60)


def test_a_forked_child_is_not_the_worker(board: ProgressBoard) -> None:
    board.request_checkpoint()
    code = """
def child():
    if os.fork() == 0:
        progress(99)
        os._exit(should_checkpoint())
    return os.waitstatus_to_exitcode(os.wait()[1])
heard = child()  # before the worker has reported
progress(1)
print(heard, child(), should_checkpoint())
"""
    assert run(code, board.environment(0)) == "0 0 True"
    assert (board.read(0).calls, board.read(0).step) == (1, 1)


def test_a_spawned_child_is_not_the_worker_but_a_successor_is(board: ProgressBoard) -> None:
    code = """
import subprocess
progress(1)
child = "from redelastic.worker import *; progress(99); print(should_checkpoint())"
done = subprocess.run([sys.executable, "-c", child], check=True, capture_output=True, text=True)
print(done.stdout, os.getpid())
"""
    board.request_checkpoint()
    heard, pid = run(code, board.environment(0)).split()
    assert (heard, board.read(0).calls, board.read(0).step) == ("False", 1, 1)
    assert board.read(0).pid == int(pid)
    run("progress(5)", board.environment(0))  # as the second command of a shell script that is the worker
    assert (board.read(0).calls, board.read(0).step) == (2, 5)


def test_a_worker_that_the_agent_forks_has_its_own_slot(board: ProgressBoard) -> None:
    # torch's agent starts functions so: it sets the environment after the fork. Here it is also another agent's worker.
    code = f"""
progress(1)
if os.fork() == 0:
    os.environ.update({board.environment(1)!r})
    progress(2)
    os._exit(0)
assert os.wait()[1] == 0
"""
    run(code, board.environment(0))
    assert [(board.read(r).calls, board.read(r).step) for r in (0, 1)] == [(1, 1), (1, 2)]


def test_a_killed_agent_leaves_no_file_and_its_worker_goes_on(tmp_path: Path) -> None:
    training = """
import sys
from redelastic.worker import progress, should_checkpoint
progress(1)
should_checkpoint()
for line in sys.stdin:
    progress(2)
    print(should_checkpoint(), flush=True)
"""
    code = f"""
import signal, subprocess, tempfile
from redelastic.workers.board import ProgressBoard
tempfile.tempdir = {str(tmp_path)!r}
board = ProgressBoard(1)
subprocess.Popen([sys.executable, "-c", {training!r}], env=os.environ | board.environment(0))
while not board.read(0).asks: pass
board.request_checkpoint()
print(board.environment(0)[{worker.VARIABLE!r}], flush=True)
signal.pause()
"""
    with Dialogue(code, {}) as agent:
        name = agent.answer()
        assert Path(name.rpartition(":")[0]).exists()
        agent.process.send_signal(signal.SIGKILL)
        assert agent.process.wait() == -signal.SIGKILL
        assert not Path(name.rpartition(":")[0]).exists()
        assert agent.next() == "True", "the worker, on the agent's stdin and stdout, reads the request"
        assert agent.next() == "False"
        assert run("progress(1); print(should_checkpoint())", {worker.VARIABLE: name}) == "False", (
            "no slot is left for a later process"
        )
    assert not list(tmp_path.iterdir())


def test_a_file_that_has_the_boards_descriptor_is_not_written(tmp_path: Path) -> None:
    old = ProgressBoard(1)
    environment = old.environment(0)
    number = int(environment[worker.VARIABLE].rpartition(":")[0].rpartition("/")[2])
    old.close()
    log = tmp_path / "log"
    log.write_bytes(b"x" * 500)
    file = os.open(log, os.O_RDWR)
    os.dup2(file, number)
    try:
        assert log.samefile(environment[worker.VARIABLE].rpartition(":")[0])
        assert run("progress(1); print(should_checkpoint())", environment) == "False"
    finally:
        for opened in {file, number}:
            os.close(opened)
    assert log.read_bytes() == b"x" * 500


@pytest.mark.parametrize("name", ["/:1", "{file}:1", "{file}:x"])
def test_an_unusable_slot_is_reported_once_and_is_no_error(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_bytes(b"too short")
    code = "from redelastic.worker import *; progress(1); progress(2); print(should_checkpoint())"
    for closed in ("", "2>&-"):
        done = subprocess.run(
            ["bash", "-c", f"exec {sys.executable} -c '{code}' {closed}"],
            env=os.environ | {worker.VARIABLE: name.format(file=tmp_path / "file")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "False\n")
        assert done.stderr.count("\n") == (0 if closed else 1)
        assert closed or "the agent cannot see the progress" in done.stderr
    assert (tmp_path / "file").read_bytes() == b"too short"


@pytest.mark.fault("a worker runs in a container of its own", "it says that the agent cannot see its progress")
def test_a_worker_in_another_process_namespace_reports_that_it_is_unseen(board: ProgressBoard) -> None:
    unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not make a process namespace")
    code = "from redelastic.worker import *; progress(1); progress(2); print(should_checkpoint())"
    command = [*unshare, sys.executable, "-c", code]
    env = os.environ | board.environment(0)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n")
    assert re.fullmatch(
        r"redelastic: the agent cannot see the progress of process \d+: it runs in another process namespace\n",
        done.stderr,
    )


def test_a_board_that_is_closed_can_still_be_read(board: ProgressBoard) -> None:
    code = "progress(1); print(flush=True); sys.stdin.readline(); progress(2); print(flush=True); sys.stdin.readline()"
    with Dialogue(code, board.environment(0)) as script:
        script.answer()
        board.close()
        assert board.read(0).step == 1
        script.next()
        assert board.read(0).step == 2


def test_reading_while_the_worker_writes_sees_whole_numbers(board: ProgressBoard) -> None:
    # 0 and -1 differ in every byte: a step that is neither was read half written.
    code = "print(flush=True)\nwhile True: progress(0); progress(-1)"
    with Dialogue(code, board.environment(0)) as script:
        script.answer()
        seen: set[int | None] = set()

        def has_both() -> bool:
            seen.update(board.read(0).step for _ in range(200_000))
            return seen >= {0, -1}

        until(has_both, "reads before and after a write")
    assert seen - {None} == {0, -1}
