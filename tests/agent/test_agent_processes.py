"""The processes of an agent's workers, in a process that embeds the agent: none escapes a stop, no others are hit."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from redelastic.agent.workers import warden
from redelastic.agent.workers.guard import TOKEN_VARIABLE
from redelastic.agent.workers.processes import ProcessTree
from tests.support import worker_processes
from tests.support.worker_processes import (
    BARE_IN_SESSION,
    DAEMON,
    DEAF,
    LIFE,
    PRELUDE,
    SECRETIVE,
    Start,
    lives,
    reuse,
    said,
    until,
)

tree, start, foreign = worker_processes.tree, worker_processes.start, worker_processes.foreign


# -- a stop, in a process that embeds the agent


@pytest.mark.parametrize("source", [DAEMON, DEAF], ids=["daemon", "deaf"])
def test_what_a_dead_worker_left_behind_is_found_and_killed(
    tree: ProcessTree, start: Start, tmp_path: Path, foreign: psutil.Popen, source: str
) -> None:
    worker = start(source)
    pids = said(tmp_path, "worker", "left")
    assert {p.pid for p in tree.look([worker.pid])} >= {p.pid for p in pids.values()}
    os.killpg(worker.pid, signal.SIGTERM)  # as torch does
    worker.kill()
    worker.wait()
    assert lives(pids["left"])
    assert tree.kill() == [pids["left"].pid]
    assert not lives(pids["left"])
    assert tree.kill() == []
    assert lives(foreign)


def test_a_session_belongs_to_its_tree_when_its_leader_is_gone(tree: ProcessTree, start: Start, tmp_path: Path) -> None:
    worker = start(PRELUDE + "wait_for('go')\n" + BARE_IN_SESSION)
    assert [p.pid for p in tree.look([worker.pid])] == [worker.pid]
    (tmp_path / "go").touch()
    left = said(tmp_path, "worker", "left")["left"]  # it was not there at the last look
    worker.kill()
    worker.wait()
    assert (left.environ(), left.ppid() == worker.pid) == ({}, False)
    assert tree.look([]) == []
    assert [p.pid for p in tree.look([], full=True)] == [left.pid]
    assert tree.kill() == [left.pid]
    assert not lives(left)


def test_what_was_seen_once_is_known_for_ever(tree: ProcessTree, start: Start, tmp_path: Path) -> None:
    worker = start(SECRETIVE)
    left = said(tmp_path, "left")["left"]
    assert left.pid in {p.pid for p in tree.look([worker.pid])}
    (tmp_path / "go").touch()
    until((tmp_path / "went").exists, "the parent's end")
    worker.kill()
    worker.wait()
    until(lambda: left.ppid() not in (worker.pid, int((tmp_path / "went").read_text())), "that it is an orphan")
    assert (os.getsid(left.pid), left.environ()) == (left.pid, {})
    assert [p.pid for p in tree.look([])] == [left.pid]
    assert tree.kill() == [left.pid]
    assert not lives(left)


@pytest.mark.parametrize(
    ("leave", "bare"),
    [("pass", True), ("os.setsid()", False), ("os.setpgid(0, 0)", False)],
    ids=["same-group", "new-session", "new-group"],
)
def test_no_process_of_a_chain_that_forks_on_and_on_escapes(
    tree: ProcessTree, start: Start, leave: str, bare: bool
) -> None:
    worker = start(
        PRELUDE
        + f"""
if {bare} and {TOKEN_VARIABLE!r} in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {{}})
end = time.monotonic() + {LIFE}
while time.monotonic() < end:
    if os.fork():
        os._exit(0)  # the child goes on
    {leave}
    os.write(1, b".")
os.write(1, b"nobody killed it")
"""
    )
    assert worker.stdout is not None
    tree.look([worker.pid])
    assert len(worker.stdout.read(50)) == 50, "it does not fork"
    worker.wait()  # the first of the chain has gone long ago
    tree.kill()
    assert set(worker.stdout.read()) <= set(b"."), "it lived to its end"  # the output ends when nobody holds it


def test_children_that_are_born_during_the_kill_do_not_escape(tree: ProcessTree, start: Start) -> None:
    worker = start(
        PRELUDE
        + f"""
if {TOKEN_VARIABLE!r} in os.environ:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {{}})
for _ in range(400):
    if os.fork() == 0:
        os.setsid()  # nothing but its parent speaks for it
        os.write(1, b".")
        time.sleep({LIFE})
        os.write(1, b"nobody killed it")
        os._exit(0)
    time.sleep(0.001)
time.sleep({LIFE})
"""
    )
    assert worker.stdout is not None
    worker.stdout.read(20)
    assert len(tree.kill([worker.pid])) > 20
    assert set(worker.stdout.read()) <= set(b"."), "one lived to its end"
    worker.wait()


def test_the_foreign_children_of_an_embedding_process_are_none_of_the_tree(
    tree: ProcessTree, start: Start, tmp_path: Path, foreign: psutil.Popen
) -> None:
    worker = start(DAEMON)
    pids = said(tmp_path, "worker", "left")
    assert {p.pid for p in tree.look([worker.pid])} == {p.pid for p in pids.values()}
    assert set(tree.kill([worker.pid])) == {p.pid for p in pids.values()}
    assert worker.wait() == -signal.SIGKILL  # its status was left to whoever started it
    assert lives(foreign)
    assert tree._guard.pid is not None
    assert lives(psutil.Process(tree._guard.pid))


def test_a_function_that_was_forked_is_known_by_its_pid_alone(tree: ProcessTree, foreign: psutil.Popen) -> None:
    pid = os.fork()
    if pid == 0:
        time.sleep(LIFE)
        os._exit(0)
    assert [p.pid for p in tree.look([pid])] == [pid]
    assert tree.kill([pid]) == [pid]
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert lives(foreign)


def test_the_same_process_is_the_same_object_at_each_look(tree: ProcessTree, start: Start) -> None:
    worker = start(DAEMON)
    first = {p.pid: p for p in tree.look([worker.pid])}[worker.pid]
    second = {p.pid: p for p in tree.look([worker.pid])}[worker.pid]
    assert first is second


def test_a_worker_of_an_agent_that_is_itself_a_worker_belongs_to_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "outer")
    inner = ProcessTree()
    assert inner.environment == {TOKEN_VARIABLE: f"outer {inner.token}"}
    assert inner._guard.pid is not None
    warden = psutil.Process(inner._guard.pid)
    until(lambda: warden.cmdline() and inner.token in warden.cmdline(), "its start")
    assert TOKEN_VARIABLE not in warden.environ()
    inner.close()
    assert not lives(warden)


def test_what_does_not_die_is_named(
    tree: ProcessTree, start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(DAEMON)
    with monkeypatch.context() as broken:
        broken.setattr(warden, "LIMIT", 0.1)
        broken.setattr(warden, "_signal", lambda *_: None)
        tree.kill([worker.pid])
    assert f"{worker.pid} (python" in caplog.text
    assert "still there 0.1 s after SIGKILL" in caplog.text


def test_without_proc_psutil_finds_the_descendants_and_sessions(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(warden, "HAS_PROC", False)
    tree = ProcessTree()
    assert tree._guard.pid is None
    worker = start(BARE_IN_SESSION)  # it has the token of another tree
    pids = said(tmp_path, "worker", "left")
    assert {p.pid for p in tree.look([worker.pid])} == {p.pid for p in pids.values()}
    worker.kill()
    worker.wait()
    assert tree.kill() == [pids["left"].pid]
    assert not lives(pids["left"])


# -- pids that the system gave to somebody else


def test_a_process_that_got_a_members_pid_is_not_taken_for_it(tree: ProcessTree, start: Start) -> None:
    worker = start(PRELUDE + "live()")
    assert [p.pid for p in tree.look([worker.pid])] == [worker.pid]
    began = warden.processes()[worker.pid].start
    worker.kill()
    worker.wait()
    stranger = reuse(worker.pid, began, ["sleep", str(LIFE)])
    assert stranger.pid in {p.pid for p in tree._members.values()}  # its pid is remembered
    assert tree.kill() == []
    assert lives(stranger)
    stranger.kill()
    stranger.wait()


def test_the_pid_of_a_worker_that_somebody_else_has_by_now_is_no_evidence(tree: ProcessTree) -> None:
    shell = subprocess.run(
        ["sh", "-c", f"setsid sleep {LIFE} > /dev/null 2>&1 & echo $!"], check=True, capture_output=True, text=True
    )
    stranger = psutil.Process(int(shell.stdout))  # an orphan, and no child of ours
    assert tree.look([stranger.pid]) == []
    assert tree.kill([stranger.pid]) == []
    assert lives(stranger)
    stranger.kill()
