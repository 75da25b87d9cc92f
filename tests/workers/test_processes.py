"""The processes of an agent's workers, in a process that embeds the agent: a stop ends all of them, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from redelastic.workers import reaper
from redelastic.workers.processes import TOKEN_VARIABLE, ProcessTree
from tests.support import worker_processes
from tests.support.liveness import lives
from tests.support.worker_processes import (
    DAEMON,
    DEADLINE,
    DEAF,
    LIFE,
    PRELUDE,
    SECRETIVE,
    StartInTree,
    kill_and_reap,
    reaper_of,
    start_with_pid,
    until,
    wait_for_pids,
)

tree, start = worker_processes.tree, worker_processes.start_in_tree
BARE_IN_SESSION = PRELUDE + "daemon(lambda: bare('left'), session=False); say('worker'); live()"


@pytest.fixture
def foreign() -> Iterator[psutil.Popen]:
    """A child of the embedding process that is nobody's worker."""
    child = psutil.Popen(["sleep", str(LIFE)], start_new_session=True)
    yield child
    child.kill()
    child.wait()


# -- what belongs


def test_the_tree_is_killed_and_nothing_else(
    tree: ProcessTree, start: StartInTree, tmp_path: Path, foreign: psutil.Popen
) -> None:
    worker = start(DAEMON)
    helper = psutil.Popen(["sleep", str(LIFE)], env={**os.environ, **tree.environment}, start_new_session=True)
    tree.spare(helper.pid)
    pids = wait_for_pids(tmp_path, "worker", "left")
    assert [p.pid for p in tree.look([worker.pid])] == [worker.pid], "a look follows only children"
    assert set(tree.stop([worker.pid])) == {p.pid for p in pids.values()}
    assert not lives(pids["left"])
    assert worker.wait() == -signal.SIGKILL, "its status was left to whoever started it"
    assert tree.stop() == []
    assert all(map(lives, (foreign, helper, reaper_of(psutil.Process(), tree.token))))
    helper.kill()
    helper.wait()


def test_a_child_of_any_thread_is_found(tree: ProcessTree, start: StartInTree, tmp_path: Path) -> None:
    worker = start(
        PRELUDE
        + """
import subprocess, threading
threading.Thread(target=lambda: (subprocess.Popen(["sleep", "90"]), say("forked"), live()), daemon=True).start()
live()
"""
    )
    wait_for_pids(tmp_path, "forked")
    assert len(tree.look([worker.pid])) == 2


def test_a_dead_workers_session_belongs(tree: ProcessTree, start: StartInTree, tmp_path: Path) -> None:
    worker = start(BARE_IN_SESSION)
    left = wait_for_pids(tmp_path, "worker", "left")["left"]
    kill_and_reap(worker)
    assert (left.environ(), left.ppid() == worker.pid) == ({}, False)
    assert tree.stop([worker.pid]) == [left.pid]
    assert not lives(left)


def test_what_was_seen_once_is_known_for_ever(tree: ProcessTree, start: StartInTree, tmp_path: Path) -> None:
    worker = start(SECRETIVE)
    left = wait_for_pids(tmp_path, "left")["left"]
    assert left.pid in {p.pid for p in tree.look([worker.pid])}
    (tmp_path / "go").touch()
    until((tmp_path / "went").exists, "the parent's end")
    kill_and_reap(worker)
    until(lambda: left.ppid() not in (worker.pid, int((tmp_path / "went").read_text())), "that it is an orphan")
    assert (os.getsid(left.pid), left.environ()) == (left.pid, {})
    until(lambda: [p.pid for p in tree.look([])] == [left.pid], "that the parent is gone")
    assert tree.stop() == [left.pid]
    assert not lives(left)


def test_a_function_that_was_forked_is_known_by_its_pid_alone(tree: ProcessTree, foreign: psutil.Popen) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(LIFE)
        os._exit(0)
    assert [p.pid for p in tree.look([pid])] == [pid]
    assert tree.stop([pid]) == [pid]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert lives(foreign)


def test_a_worker_of_an_agent_that_is_itself_a_worker_belongs_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "outer")
    inner = ProcessTree()
    assert inner.environment == {TOKEN_VARIABLE: f"outer {inner.token}"}
    reaper = reaper_of(psutil.Process(), inner.token)
    assert TOKEN_VARIABLE not in reaper.environ()
    inner.close()
    assert not lives(reaper)


# -- pids that the system gave to another process


def test_a_process_that_got_a_members_pid_is_not_taken_for_it(tree: ProcessTree, start: StartInTree) -> None:
    worker = start(PRELUDE + "live()")
    assert [p.pid for p in tree.look([worker.pid])] == [worker.pid]
    began = reaper.processes()[worker.pid].start
    kill_and_reap(worker)
    stranger = start_with_pid(worker.pid, began, ["sleep", str(LIFE)])
    assert tree.stop() == []
    assert lives(stranger)
    stranger.kill()
    stranger.wait()


def test_a_workers_pid_that_another_process_has_by_now_is_no_evidence(tree: ProcessTree) -> None:
    shell = subprocess.run(
        ["sh", "-c", f"setsid sleep {LIFE} > /dev/null 2>&1 & echo $!"], check=True, capture_output=True, text=True
    )
    stranger = psutil.Process(int(shell.stdout))  # an orphan, and no child of this process
    assert tree.look([stranger.pid]) == []
    assert tree.stop([stranger.pid]) == []
    assert lives(stranger)
    stranger.kill()


# -- SIGTERM before SIGKILL


def test_what_is_left_gets_sigterm_and_the_time_to_finish(
    tree: ProcessTree, start: StartInTree, tmp_path: Path, foreign: psutil.Popen
) -> None:
    worker = start(
        PRELUDE
        + """
def finish(number, frame):
    wait_for("go")
    say("finished")
    os._exit(0)

def upload():
    signal.signal(signal.SIGTERM, finish)
    say("left")
    live()

daemon(upload)
say("worker")
"""
    )
    left = wait_for_pids(tmp_path, "worker", "left")["left"]
    kill_and_reap(worker)
    (tmp_path / "go").touch()
    assert tree.stop([worker.pid], grace=DEADLINE) == [left.pid]
    assert (tmp_path / "finished").exists()
    assert lives(foreign)


def test_what_ignores_sigterm_is_killed_when_its_time_is_up(
    tree: ProcessTree, start: StartInTree, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(DEAF)
    left = wait_for_pids(tmp_path, "worker", "left")["left"]
    kill_and_reap(worker)
    assert tree.stop([worker.pid], grace=0.2) == [left.pid]
    assert not lives(left)
    assert f"did not exit within 0.2 s of SIGTERM: {left.pid}." in caplog.text


def test_a_process_gets_sigterm_once(
    tree: ProcessTree, start: StartInTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = start(
        PRELUDE
        + """
def count(number, frame):
    os.write(1, b"T")

signal.signal(signal.SIGTERM, count)
say("worker")
wait_for("go")
"""
    )
    wait_for_pids(tmp_path, "worker")
    looks, look = [], reaper.processes

    def look_and_end_it_at_the_third() -> dict[int, reaper.Process]:
        looks.append(look())
        if len(looks) == 3:
            (tmp_path / "go").touch()
        return looks[-1]

    monkeypatch.setattr(reaper, "processes", look_and_end_it_at_the_third)
    tree.stop([worker.pid], grace=DEADLINE)
    assert worker.stdout is not None
    assert worker.stdout.read() == b"T"


@pytest.mark.fault("a worker fails that shares tensors by file_system", "nothing of it stays in /dev/shm")
def test_torchs_helper_for_shared_memory_may_end_by_itself(
    start: StartInTree, tree: ProcessTree, tmp_path: Path
) -> None:
    """It removes the files of the dead once it is alone; SIGTERM would end it before."""
    (tmp_path / "torch_shm_manager").symlink_to(sys.executable)
    source = "import os, sys; os.rename(*sys.argv[1:]) if sys.stdin.read() == '' else None"
    (tmp_path / "files").touch()
    worker = start(
        PRELUDE
        + f"""
import subprocess
read, write = os.pipe()
helper = [os.path.join(folder, "torch_shm_manager"), "-I", "-S", "-c", {source!r}]
subprocess.Popen([*helper, os.path.join(folder, "files"), os.path.join(folder, "removed")], stdin=read)
os.close(read)
say("worker")
live()
"""
    )
    wait_for_pids(tmp_path, "worker")
    tree.look([worker.pid])
    assert tree.stop([worker.pid], grace=DEADLINE) == [worker.pid]
    assert (tmp_path / "removed").exists()


def test_a_stop_does_not_wait_where_nothing_is_left(tree: ProcessTree, start: StartInTree, tmp_path: Path) -> None:
    assert tree.stop([], grace=10 * DEADLINE) == []
    worker = start(DAEMON)
    pids = wait_for_pids(tmp_path, "worker", "left")
    kill_and_reap(worker)
    assert tree.stop([worker.pid], grace=10 * DEADLINE) == [pids["left"].pid]


def test_what_does_not_die_is_named(
    tree: ProcessTree, start: StartInTree, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(DAEMON)
    with monkeypatch.context() as deaf:
        deaf.setattr(reaper, "KILL_TIMEOUT", 0.0)
        deaf.setattr(os, "kill", lambda *_: None)  # as with a process that hangs in the kernel
        tree.stop([worker.pid])
    assert f"{worker.pid} (python" in caplog.text
    assert "still there 0 s after SIGKILL" in caplog.text


# -- after a success


def test_what_is_left_may_end_by_itself(tree: ProcessTree, start: StartInTree, tmp_path: Path) -> None:
    worker = start(PRELUDE + "daemon(lambda: (say('left'), wait_for('go'), say('uploaded'), os._exit(0)))")
    left = wait_for_pids(tmp_path, "left")["left"]
    worker.wait()
    asked = []

    def is_hurried() -> bool:
        asked.append(lives(left))
        (tmp_path / "go").touch()
        return False

    tree.wait([worker.pid], time.monotonic() + DEADLINE, is_hurried)
    assert asked[0], "it is waited for"
    assert (tmp_path / "uploaded").exists()
    assert tree.stop() == []


def test_an_agent_in_a_hurry_names_what_is_left_and_waits_no_longer(
    tree: ProcessTree, start: StartInTree, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(DAEMON)
    left = wait_for_pids(tmp_path, "worker", "left")["left"]
    tree.wait([], time.monotonic() + 10 * DEADLINE, lambda: "which will get SIGTERM in" in caplog.text)
    assert lives(left)
    assert f"{left.pid} (python" in caplog.text, "it is named"
