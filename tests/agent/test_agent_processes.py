"""The processes of an agent's workers, in a process that embeds the agent: none escapes a stop, no other is hit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from worker_processes import (
    BARE_IN_SESSION,
    DAEMON,
    DEADLINE,
    DEAF,
    LIFE,
    PRELUDE,
    SECRETIVE,
    lives,
    reuse,
    said,
    until,
)

from redelastic.agent.workers import warden
from redelastic.agent.workers.guard import TOKEN_VARIABLE
from redelastic.agent.workers.processes import ProcessTree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    made = ProcessTree()
    yield made
    made.kill()
    made.close()


Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tree: ProcessTree, tmp_path: Path) -> Iterator[Start]:
    """Starts workers of ``tree``, as torch starts them; their standard output ends with the last of their processes."""
    made: list[subprocess.Popen[bytes]] = []

    def start(source: str) -> subprocess.Popen[bytes]:
        made.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", source, str(tmp_path)],
                env=os.environ | tree.environment,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return made[-1]

    yield start
    tree.kill()
    for worker in made:
        worker.kill()
        worker.communicate()


@pytest.fixture
def foreign() -> Iterator[psutil.Popen]:
    """A child of the embedding process that is nobody's worker."""
    child = psutil.Popen(["sleep", str(LIFE)], start_new_session=True)
    yield child
    child.kill()
    child.wait()


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
    assert "not gone 0.1 s after SIGKILL" in caplog.text


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


# -- SIGTERM before SIGKILL

UPLOADER = (  # in a session of its own; SIGTERM has it finish what it does
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


def ended(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def test_what_is_left_gets_sigterm_and_the_time_to_finish(
    tree: ProcessTree, start: Start, tmp_path: Path, foreign: psutil.Popen
) -> None:
    worker = start(UPLOADER)
    left = said(tmp_path, "worker", "left")["left"]
    ended(worker)
    (tmp_path / "go").touch()
    assert tree.stop([worker.pid], grace=DEADLINE) == [left.pid]
    assert (tmp_path / "finished").exists()
    assert lives(foreign)


def test_what_does_not_heed_sigterm_is_killed_when_its_time_is_up(
    tree: ProcessTree, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    worker = start(DEAF)
    left = said(tmp_path, "worker", "left")["left"]
    ended(worker)
    assert tree.stop([worker.pid], grace=0.2) == [left.pid]
    assert not lives(left)
    assert f"did not heed SIGTERM within 0.2 s: {left.pid}." in caplog.text


def test_a_process_gets_sigterm_once(tree: ProcessTree, start: Start, tmp_path: Path) -> None:
    worker = start(
        PRELUDE
        + """
def count(number, frame):
    os.write(1, b"T")

signal.signal(signal.SIGTERM, count)
say("worker")
while True:
    signal.pause()
"""
    )
    said(tmp_path, "worker")
    tree.stop([worker.pid], grace=3 * warden.RELOOK)
    assert worker.stdout is not None
    assert worker.stdout.read() == b"T"


def test_a_stop_does_not_wait_where_nothing_is_left(tree: ProcessTree, start: Start, tmp_path: Path) -> None:
    assert tree.stop([], grace=10 * DEADLINE) == []
    worker = start(DAEMON)
    pids = said(tmp_path, "worker", "left")
    ended(worker)
    assert tree.stop([worker.pid], grace=10 * DEADLINE) == [pids["left"].pid]


def test_a_chain_that_forks_on_and_on_does_not_outlive_its_time(tree: ProcessTree, start: Start) -> None:
    worker = start(
        PRELUDE
        + f"""
end = time.monotonic() + {LIFE}
while time.monotonic() < end:
    if os.fork():
        os._exit(0)  # the child goes on
    os.setsid()
    os.write(1, b".")
os.write(1, b"nobody killed it")
"""
    )
    assert worker.stdout is not None
    tree.look([worker.pid])
    assert len(worker.stdout.read(50)) == 50, "it does not fork"
    worker.wait()
    tree.stop([], grace=0.2)
    assert set(worker.stdout.read()) <= set(b"."), "it lived to its end"


def test_what_is_left_may_end_by_itself(tree: ProcessTree, start: Start, tmp_path: Path) -> None:
    worker = start(PRELUDE + "daemon(lambda: (say('left'), wait_for('go'), say('uploaded'), os._exit(0)))")
    left = said(tmp_path, "left")["left"]
    worker.wait()
    asked = []

    def is_hurried() -> bool:
        asked.append(lives(left))
        (tmp_path / "go").touch()
        return False

    tree.wait([worker.pid], time.monotonic() + DEADLINE, is_hurried)
    assert asked[0], "it is waited for"
    assert (tmp_path / "uploaded").exists()
    assert tree.kill() == []


def test_who_is_hurried_waits_for_nobody(
    tree: ProcessTree, start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    start(DAEMON)
    left = said(tmp_path, "worker", "left")["left"]
    tree.wait([], time.monotonic() + 10 * DEADLINE, lambda: "which get SIGTERM in" in caplog.text)
    assert lives(left)
    assert f"{left.pid} (python" in caplog.text, "it is named"


# -- what a look costs


@pytest.fixture
def no_look_at_all(tree: ProcessTree, start: Start) -> Iterator[None]:  # noqa: ARG001  # what that ends is looked for
    """It is an error to look at all processes of the host."""
    tree.look([])

    def look() -> dict[int, warden.Process]:
        raise AssertionError("this looks at all processes of the host")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(warden, "processes", look)
        yield


@pytest.mark.skipif(not warden.LISTS_CHILDREN, reason="needs /proc/<pid>/task/<tid>/children")
@pytest.mark.usefixtures("no_look_at_all")
def test_a_look_does_not_look_at_others_processes(
    tree: ProcessTree, start: Start, tmp_path: Path, foreign: psutil.Popen
) -> None:
    worker = start(SECRETIVE)
    pids = said(tmp_path, "worker", "left")
    found = {p.pid for p in tree.look([worker.pid])}
    assert found >= {p.pid for p in pids.values()}
    assert foreign.pid not in found
    assert tree._guard.pid not in found
    (tmp_path / "go").touch()
    until((tmp_path / "went").exists, "the parent's end")
    ended(worker)
    until(lambda: [p.pid for p in tree.look([])] == [pids["left"].pid], "what was seen is known, and what ended is not")


@pytest.mark.skipif(not warden.LISTS_CHILDREN, reason="needs /proc/<pid>/task/<tid>/children")
@pytest.mark.usefixtures("no_look_at_all")
def test_a_child_of_any_thread_is_found(tree: ProcessTree, start: Start, tmp_path: Path) -> None:
    worker = start(
        PRELUDE
        + """
import subprocess, threading
threading.Thread(target=lambda: (subprocess.Popen(["sleep", "90"]), say("forked"), live()), daemon=True).start()
live()
"""
    )
    said(tmp_path, "forked")
    assert len(tree.look([worker.pid])) == 2


@pytest.mark.parametrize("cause", ["its time has come", "this kernel does not list children"])
def test_what_has_left_its_parent_is_found_when_all_processes_are_looked_at(
    tree: ProcessTree, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    tree.look([])
    worker = start(DAEMON)
    pids = said(tmp_path, "worker", "left")
    if warden.LISTS_CHILDREN:
        assert [p.pid for p in tree.look([worker.pid])] == [worker.pid]
    if cause == "its time has come":
        monkeypatch.setattr(tree, "_full_look_at", 0.0)
    else:
        monkeypatch.setattr(warden, "LISTS_CHILDREN", False)
    assert {p.pid for p in tree.look([worker.pid])} == {p.pid for p in pids.values()}


def test_a_session_is_remembered_from_one_look_at_all_processes_to_the_next(
    tree: ProcessTree, start: Start, tmp_path: Path
) -> None:
    """Though the worker that opened it is gone, and what it left has nothing else that speaks for it."""
    tree.look([])
    worker = start(PRELUDE + "wait_for('go')\n" + BARE_IN_SESSION)
    tree.look([worker.pid])
    (tmp_path / "go").touch()
    left = said(tmp_path, "worker", "left")["left"]
    ended(worker)
    tree.look([])
    tree.look([])
    assert [p.pid for p in tree.look([], full=True)] == [left.pid]


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
