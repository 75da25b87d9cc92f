"""Scans for workers' processes: what they find, and that they read all processes of the host only now and then."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from redelastic.agent.workers import warden
from redelastic.agent.workers.processes import ProcessTree
from tests.support import worker_processes
from tests.support.worker_processes import BARE_IN_SESSION, DAEMON, PRELUDE, SECRETIVE, Start, ended, said, until

tree, start, foreign = worker_processes.tree, worker_processes.start, worker_processes.foreign


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
def test_a_look_does_not_read_what_the_agents_own_helpers_do(
    tree: ProcessTree, start: Start, foreign: psutil.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, read, look_up = start("import signal\nsignal.pause()"), set(), warden.look_up

    def recorded(pid: int) -> warden.Process | None:
        read.add(pid)
        return look_up(pid)

    monkeypatch.setattr(warden, "look_up", recorded)
    tree.spared.add(foreign.pid)
    tree.look([worker.pid])
    assert worker.pid in read
    assert not read & {tree._guard.pid, foreign.pid}


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


def test_a_helper_is_not_taken_for_a_process_that_slips_away(
    tree: ProcessTree, foreign: psutil.Popen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest process may be the agent's next template, whose environment has the token too."""
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **tree.environment}) as helper:
        try:
            monkeypatch.setattr(warden, "_newest", lambda: str(helper.pid))
            until(lambda: tree.token.encode() in warden.read(f"/proc/{helper.pid}/environ"), "it has its environment")
            assert not warden._ambush(tree.token, {foreign.pid, helper.pid})
            assert warden._ambush(tree.token, {foreign.pid})
        finally:
            helper.kill()
