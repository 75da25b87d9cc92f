"""SIGTERM before SIGKILL: what workers leave behind may finish while there is time."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from redelastic.agent.workers import warden
from redelastic.agent.workers.processes import ProcessTree
from tests.support import worker_processes
from tests.support.worker_processes import DAEMON, DEADLINE, DEAF, LIFE, PRELUDE, Start, ended, lives, said

tree, start, foreign = worker_processes.tree, worker_processes.start, worker_processes.foreign

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
    assert f"did not exit within 0.2 s of SIGTERM: {left.pid}." in caplog.text


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
    tree.wait([], time.monotonic() + 10 * DEADLINE, lambda: "which will get SIGTERM in" in caplog.text)
    assert lives(left)
    assert f"{left.pid} (python" in caplog.text, "it is named"
