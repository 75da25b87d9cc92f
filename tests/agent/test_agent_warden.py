"""What an agent in its own process leaves: it adopts orphans, and its warden ends everything when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from redelastic.agent.workers.processes import ProcessTree
from redelastic.agent.workers.warden import processes
from tests.support.worker_processes import (
    DAEMON,
    DEADLINE,
    DEAF,
    LIFE,
    PRELUDE,
    SECRETIVE,
    VANISHING,
    lives,
    reuse,
    said,
    until,
)


class Driven:
    """A program in a process of its own, which answers each line with one; the test owns its end."""

    def __init__(self, source: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", source, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.handle = psutil.Process(self.process.pid)

    def ask(self, question: str) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


AGENT = """
import json, os, subprocess, sys
from redelastic.agent.workers import processes

tree, workers = processes.ProcessTree(), []
all_processes = processes.warden.processes
popen = lambda *command, **options: subprocess.Popen(command, stdout=subprocess.DEVNULL, **options)

def start(source):
    command = [sys.executable, "-I", "-S", "-c", source, sys.argv[1]]
    workers.append(popen(*command, env={**os.environ, **tree.environment}, start_new_session=True))
    return workers[-1].pid

def fork():
    pid = os.fork()
    if pid == 0:
        import time
        time.sleep(90)
        os._exit(0)
    return pid

look = lambda *more: [p.pid for p in tree.look([*(w.pid for w in workers), *more])]
kill = lambda: tree.kill([w.pid for w in workers])
warden = lambda: tree._guard.pid
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


@pytest.fixture
def new_agent(tmp_path: Path) -> Iterator[Callable[[], Driven]]:
    made: list[Driven] = []

    def make() -> Driven:
        made.append(Driven(AGENT, str(tmp_path)))
        return made[-1]

    yield make
    for agent in made:
        agent.end()


@pytest.fixture
def agent(new_agent: Callable[[], Driven]) -> Driven:
    return new_agent()


# -- an agent that owns its process adopts orphans


def test_an_orphan_that_hid_everything_at_once_is_adopted(agent: Driven, tmp_path: Path) -> None:
    own = agent.ask("popen('sleep', '90', start_new_session=True).pid")  # such as the embedded server
    assert agent.ask("tree.adopt_orphans()") is None
    later = agent.ask("popen('sleep', '90').pid")  # such as multiprocessing's resource tracker
    worker = agent.ask(f"start({VANISHING!r})")
    left = said(tmp_path, "left")["left"]
    until(lambda: left.ppid() == agent.process.pid, "the adoption")
    assert (os.getsid(left.pid) == worker, left.environ()) == (False, {})
    agent.ask("setattr(processes.warden, 'processes', None)")  # a look at others' processes is not needed for that
    assert left.pid in agent.ask("look()")
    agent.ask("setattr(processes.warden, 'processes', all_processes)")
    assert agent.ask("kill()") == sorted([worker, left.pid])
    assert not lives(left)
    assert all(lives(psutil.Process(pid)) for pid in (own, later, agent.ask("warden()")))
    for pid in (own, later):
        psutil.Process(pid).kill()


def test_a_tree_that_is_closed_leaves_orphans_to_others(agent: Driven, tmp_path: Path) -> None:
    agent.ask("tree.adopt_orphans()")
    agent.ask("tree.close()")
    agent.ask(f"start({VANISHING!r})")
    left = said(tmp_path, "left")["left"]
    ancestors = {process.pid for process in agent.handle.parents()}
    until(lambda: left.ppid() in ancestors, "one of them has adopted it")
    left.kill()


def test_adopted_zombies_are_reaped_and_workers_are_left_to_whoever_started_them(agent: Driven, tmp_path: Path) -> None:
    agent.ask("tree.adopt_orphans()")
    source = """
for number in range(20):
    if os.fork() == 0:
        if os.fork() == 0:
            if number % 2:
                os.setsid()
            wait_for("go")
            os._exit(0)
        os._exit(0)
    os.wait()
say("worker")
os._exit(7)
"""
    worker = agent.ask(f"start({PRELUDE + source!r})")
    until(lambda: len(agent.handle.children()) == 22, "the adoption of 20, beside the warden and the worker")
    (tmp_path / "go").touch()

    def zombies() -> int:
        return sum(child.status() == psutil.STATUS_ZOMBIE for child in agent.handle.children())

    until(lambda: zombies() == 21, "their end")
    assert agent.ask("[p.pid for p in tree.look([])]") == []  # the worker's pid is not yet known to the telemetry
    assert zombies() == 11  # those that could be a worker may wait
    assert agent.ask("kill()") == []
    assert [child.pid for child in agent.handle.children()] == [agent.ask("warden()"), worker]
    assert agent.ask("workers[0].wait()") == 7


# -- the agent itself is killed, or ends


def test_the_warden_spares_who_got_the_pid_of_a_member(agent: Driven) -> None:
    worker = agent.ask(f"start({PRELUDE + 'live()'!r})")
    assert agent.ask("look()") == [worker]
    began = processes()[worker].start
    assert agent.ask("[w.kill() for w in workers] and [w.wait() for w in workers]") == [-9]
    stranger = reuse(worker, began, ["sleep", str(LIFE)])
    warden = psutil.Process(agent.ask("warden()"))
    agent.end()
    until(lambda: not lives(warden), "the warden's end")
    assert lives(stranger)
    stranger.kill()
    stranger.wait()


@pytest.mark.parametrize("adopt", [False, True], ids=["embedded", "own-process"])
@pytest.mark.parametrize("source", [DAEMON, DEAF, SECRETIVE], ids=["daemon", "deaf", "secretive"])
def test_nothing_outlives_an_agent_that_is_killed(agent: Driven, tmp_path: Path, source: str, adopt: bool) -> None:
    if adopt:
        agent.ask("tree.adopt_orphans()")
    agent.ask(f"start({source!r})")
    pids = said(tmp_path, "worker", "left")
    assert set(agent.ask("look()")) >= {p.pid for p in pids.values()}
    if source == SECRETIVE:
        (tmp_path / "go").touch()
        said_went = int(until(lambda: (tmp_path / "went").exists() and (tmp_path / "went").read_text(), "its parent"))
        until(lambda: pids["left"].ppid() != said_went, "that it is an orphan")
    warden = psutil.Process(agent.ask("warden()"))
    assert all(lives(p) for p in (*pids.values(), warden))
    agent.end()
    until(lambda: not any(lives(p) for p in (*pids.values(), warden)), "the end of the tree and of the warden")


def test_nothing_outlives_an_agent_that_is_killed_before_it_looked(agent: Driven, tmp_path: Path) -> None:
    agent.ask(f"start({DAEMON!r})")
    pids = said(tmp_path, "worker", "left")
    warden = psutil.Process(agent.ask("warden()"))
    agent.end()
    until(lambda: not any(lives(p) for p in (*pids.values(), warden)), "the end of the tree and of the warden")


def test_a_forked_worker_that_holds_the_wardens_pipe_does_not_hide_the_agents_death(agent: Driven) -> None:
    child = psutil.Process(agent.ask("fork()"))
    pipe = Path(f"/proc/{agent.ask('warden()')}/fd/0").readlink()
    held = [path.readlink() for path in Path(f"/proc/{child.pid}/fd").iterdir()]
    assert pipe in held
    assert child.pid in agent.ask(f"look({child.pid})")
    warden = psutil.Process(agent.ask("warden()"))
    agent.end()
    until(lambda: not lives(child) and not lives(warden), "the end of both")


def test_a_warden_that_was_killed_is_replaced_and_the_new_one_knows_all(agent: Driven, tmp_path: Path) -> None:
    agent.ask(f"start({SECRETIVE!r})")
    left = said(tmp_path, "worker", "left")["left"]
    agent.ask("look()")
    (tmp_path / "go").touch()
    until((tmp_path / "went").exists, "that it is an orphan")
    first = psutil.Process(agent.ask("warden()"))
    first.kill()
    until(lambda: not lives(first), "the warden's end")
    assert left.pid in agent.ask("look()")
    second = psutil.Process(agent.ask("warden()"))
    assert second != first
    assert not first.is_running()  # not even a zombie
    agent.end()
    until(lambda: not lives(left) and not lives(second), "the end of both")


def test_an_agent_that_ends_without_a_word_leaves_nothing(agent: Driven, tmp_path: Path) -> None:
    agent.ask(f"start({DAEMON!r})")
    pids = said(tmp_path, "worker", "left")
    warden = psutil.Process(agent.ask("warden()"))
    agent.process.communicate(timeout=DEADLINE)
    assert agent.process.returncode == 0
    until(lambda: not any(lives(p) for p in (*pids.values(), warden)), "the end of the tree and of the warden")


def test_an_agent_that_closes_its_tree_dismisses_the_warden_and_kills_nothing(agent: Driven, tmp_path: Path) -> None:
    agent.ask(f"start({DAEMON!r})")
    pids = said(tmp_path, "worker", "left")
    warden = psutil.Process(agent.ask("warden()"))
    agent.ask("tree.close()")
    assert not warden.is_running()
    agent.ask("look()")
    assert agent.ask("tree._guard.pid") is None
    agent.process.communicate(timeout=DEADLINE)
    assert all(lives(p) for p in pids.values())
    for process in pids.values():
        process.kill()


def test_the_warden_holds_nothing_of_the_agents_and_heeds_no_signal(agent: Driven) -> None:
    warden = psutil.Process(agent.ask("warden()"))
    until(lambda: warden.parent() == agent.handle, "its start")
    ignored = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

    def ignores() -> bool:
        (line,) = [s for s in Path(f"/proc/{warden.pid}/status").read_text().splitlines() if s.startswith("SigIgn")]
        return all(int(line.split()[1], 16) >> (number - 1) & 1 for number in ignored)

    until(ignores, "that it ignores signals")
    assert os.getsid(warden.pid) != os.getsid(agent.process.pid)  # Ctrl-C does not reach it
    held = {int(path.name): str(path.readlink()) for path in Path(f"/proc/{warden.pid}/fd").iterdir()}
    assert held.pop(1) == os.devnull
    assert all(held.pop(number).startswith("pipe:") for number in (0, 2))
    assert set(held.values()) <= {"anon_inode:[pidfd]"}
    # `agent | cat`: cat ends when the agent closes its output, though agent and warden live on.
    assert agent.process.stdin is not None
    assert agent.process.stdout is not None
    agent.process.stdin.write("os.dup2(os.open('/dev/null', os.O_WRONLY), 1)\n")
    agent.process.stdin.flush()
    assert agent.process.stdout.read() == ""
    assert lives(agent.handle)
    assert lives(warden)


def test_a_tree_without_a_warden_says_what_that_means(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    tree = ProcessTree()
    assert "No warden could be started" in caplog.text
    assert tree.look([]) == []
    tree.close()
