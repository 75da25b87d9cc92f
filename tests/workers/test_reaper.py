"""What an agent in its own process leaves: it adopts orphans, and its reaper ends everything when it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from redelastic.redis.endpoint import URL_VARIABLE
from redelastic.workers.processes import TOKEN_VARIABLE
from redelastic.workers.reaper import has_token, processes, read
from tests.support.job_user import CANARY
from tests.support.liveness import lives
from tests.support.worker_processes import (
    DAEMON,
    DEADLINE,
    DEAF,
    LIFE,
    PRELUDE,
    SECRETIVE,
    reaper_of,
    start_with_pid,
    until,
    wait_for_pids,
)

VANISHING = PRELUDE + "daemon(lambda: bare('left')); say('worker'); live()"  # as SECRETIVE, but at once


class Driven:
    """A program in a process of its own, which answers each line with one; the test owns its end."""

    def __init__(self, source: str, *arguments: str, within: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*within, sys.executable, "-c", source, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
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
from redelastic.workers import processes

passed, workers = [], []
tree = processes.ProcessTree(clock=lambda: sum(passed))
starting = tree.starting()
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
kill = lambda: tree.stop([w.pid for w in workers])
for line in sys.stdin:
    print(json.dumps(eval(line)), flush=True)
"""


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    monkeypatch.setenv(URL_VARIABLE, CANARY)
    made = Driven(AGENT, str(tmp_path))
    yield made
    made.end()


# -- an agent that owns its process adopts orphans


def test_an_orphan_that_hid_everything_at_once_is_adopted(agent: Driven, tmp_path: Path) -> None:
    own = agent.ask("popen('sleep', '90', start_new_session=True).pid")  # such as the embedded server
    agent.ask("tree.adopt_orphans()")
    later = agent.ask("popen('sleep', '90').pid")  # such as multiprocessing's resource tracker
    worker = agent.ask(f"start({VANISHING!r})")
    left = wait_for_pids(tmp_path, "left")["left"]
    until(lambda: left.ppid() == agent.process.pid, "the adoption")
    assert (os.getsid(left.pid) == worker, left.environ()) == (False, {})
    assert left.pid in agent.ask("look()")
    assert agent.ask("kill()") == sorted([worker, left.pid])
    assert not lives(left)
    assert all(map(lives, (psutil.Process(own), psutil.Process(later), reaper_of(agent.handle))))
    for pid in (own, later):
        psutil.Process(pid).kill()


def test_a_tree_that_is_closed_leaves_orphans_to_others(agent: Driven, tmp_path: Path) -> None:
    agent.ask("tree.adopt_orphans()")
    agent.ask("tree.close()")
    agent.ask(f"start({VANISHING!r})")
    left = wait_for_pids(tmp_path, "left")["left"]
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
    until(lambda: len(agent.handle.children()) == 22, "the adoption of 20, beside the reaper and the worker")
    (tmp_path / "go").touch()

    def zombies() -> int:
        return sum(child.status() == psutil.STATUS_ZOMBIE for child in agent.handle.children())

    until(lambda: zombies() == 21, "their end")
    agent.ask("starting.__enter__()")
    for _ in range(2):
        assert agent.ask("[p.pid for p in tree.look([])]") == []  # the worker's pid is not yet known
        assert zombies() == 11  # those that could be a worker may wait
        agent.ask("passed.append(2)")
    agent.ask("starting.__exit__(None, None, None)")
    for left in (11, 1):
        assert agent.ask("look()") == []
        assert zombies() == left  # whoever started a process, as a health check is, has a second to ask for its status
        agent.ask("passed.append(2)")
    assert agent.ask("kill()") == []
    assert {child.pid for child in agent.handle.children()} == {reaper_of(agent.handle).pid, worker}
    assert agent.ask("workers[0].wait()") == 7


@pytest.mark.fault("an agent that is PID 1 ends its workers, beside what docker exec has started", "that lives on")
def test_pid_1_adopts_strangers_and_ends_only_its_own(tmp_path: Path) -> None:
    """What somebody starts in its container, as by docker exec, and what workers leave become its children alike."""
    unshare = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this process may not make a process namespace")
    outer = Driven(AGENT, str(tmp_path), within=unshare)
    try:
        outer.ask("tree.adopt_orphans()")
        (pid_1,) = until(outer.handle.children, "the agent")
        command = ["nsenter", "--target", str(pid_1.pid), "--pid", "--mount", "setsid", "sh", "-c"]
        subprocess.run([*command, f"sleep {LIFE} > /dev/null 2>&1 &"], check=True)
        until(lambda: "sleep" in [child.name() for child in pid_1.children()], "the stranger, a shell until its exec")
        outer.ask(f"start({DAEMON!r})")
        names = ("worker", "left")  # each says its own, in any order; their pids there are not those here
        until(lambda: all((tmp_path / name).exists() for name in names), "that both have said their pids")
        until(lambda: len(pid_1.children()) == 4, "the adoption of both, beside the reaper and the worker")
        mine = sorted([int((tmp_path / name).read_text()) for name in names])
        outer.ask("workers[0].kill()")
        assert outer.ask("workers[0].wait()") == -signal.SIGKILL
        assert outer.ask("look()") == mine[1:]
        assert outer.ask("kill()") == mine[1:]
        assert [child.name() for child in pid_1.children() if child.name() == "sleep"] == ["sleep"]
    finally:
        outer.end()


# -- the agent itself is killed, or ends


@pytest.mark.parametrize(
    ("source", "adopt"),
    [(DAEMON, False), (DEAF, True), (SECRETIVE, False)],
    ids=["daemon", "deaf and adopted", "secretive"],
)
def test_nothing_outlives_an_agent_that_is_killed(agent: Driven, tmp_path: Path, source: str, adopt: bool) -> None:
    if adopt:
        agent.ask("tree.adopt_orphans()")
    agent.ask(f"start({source!r})")
    pids = wait_for_pids(tmp_path, "worker", "left")
    agent.ask("look()")
    if source == SECRETIVE:
        (tmp_path / "go").touch()
        said_went = int(until(lambda: (tmp_path / "went").exists() and (tmp_path / "went").read_text(), "its parent"))
        until(lambda: pids["left"].ppid() != said_went, "that it is an orphan")
    reaper = reaper_of(agent.handle)
    assert all(lives(p) for p in (*pids.values(), reaper))
    agent.end()
    until(lambda: not any(lives(p) for p in (*pids.values(), reaper)), "the end of the tree and of the reaper")


def test_nothing_outlives_an_agent_that_is_killed_before_it_looked(agent: Driven, tmp_path: Path) -> None:
    agent.ask(f"start({DAEMON!r})")
    pids = wait_for_pids(tmp_path, "worker", "left")
    agent.end()
    until(lambda: not any(map(lives, pids.values())), "the end of the tree")


def test_a_forked_function_ends_with_its_agent(agent: Driven) -> None:
    """Its environment names no agent, so the reaper knows it from the agent's last look alone."""
    child = psutil.Process(agent.ask("fork()"))
    assert child.pid in agent.ask(f"look({child.pid})")
    agent.end()
    until(lambda: not lives(child), "its end")


def test_the_reaper_spares_a_process_that_got_a_members_pid(agent: Driven) -> None:
    worker = agent.ask(f"start({PRELUDE + 'live()'!r})")
    assert agent.ask("look()") == [worker]
    began = processes()[worker].start
    assert agent.ask("[w.kill() for w in workers] and [w.wait() for w in workers]") == [-9]
    stranger = start_with_pid(worker, began, ["sleep", str(LIFE)])
    reaper = reaper_of(agent.handle)
    agent.end()
    until(lambda: not lives(reaper), "the reaper's end")
    assert lives(stranger)
    stranger.kill()
    stranger.wait()


def test_an_agent_that_closes_its_tree_dismisses_the_reaper_and_kills_nothing(agent: Driven, tmp_path: Path) -> None:
    agent.ask(f"start({DAEMON!r})")
    pids = wait_for_pids(tmp_path, "worker", "left")
    reaper = reaper_of(agent.handle)
    agent.ask("tree.close()")
    assert not reaper.is_running()
    assert pids["worker"].pid in agent.ask("look()")
    assert [child.pid for child in agent.handle.children()] == [pids["worker"].pid], "no other reaper"
    agent.process.communicate(timeout=DEADLINE)
    assert all(lives(p) for p in pids.values())
    for process in pids.values():
        process.kill()


def test_the_reaper_holds_nothing_of_the_agents_and_ignores_signals(agent: Driven) -> None:
    reaper = reaper_of(agent.handle)
    ignored = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}

    def ignores() -> bool:
        (line,) = [s for s in Path(f"/proc/{reaper.pid}/status").read_text().splitlines() if s.startswith("SigIgn")]
        return all(int(line.split()[1], 16) >> (number - 1) & 1 for number in ignored)

    until(ignores, "that it ignores signals")
    assert os.getsid(reaper.pid) != os.getsid(agent.process.pid)  # Ctrl-C does not reach it
    shown = " ".join([*reaper.cmdline(), *reaper.environ().values()])
    assert CANARY not in shown
    token, _, _ = Path(f"/proc/{reaper.pid}/fd/0").read_bytes().partition(b"\n")
    assert len(token) == 32
    assert token.decode() not in shown, "with it, another user could pass off a process as a worker's"
    held = {int(path.name): str(path.readlink()) for path in Path(f"/proc/{reaper.pid}/fd").iterdir()}
    assert held.pop(0).startswith("/memfd:redelastic")
    assert held.pop(1) == os.devnull
    assert held.pop(2).startswith("pipe:")
    assert set(held.values()) <= {"anon_inode:[pidfd]"}
    # `agent | cat`: cat ends when the agent closes its output, though agent and reaper live on.
    assert agent.process.stdin is not None
    assert agent.process.stdout is not None
    agent.process.stdin.write("os.dup2(os.open('/dev/null', os.O_WRONLY), 1)\n")
    agent.process.stdin.flush()
    assert agent.process.stdout.read() == ""
    assert lives(agent.handle)
    assert lives(reaper)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be another user")
@pytest.mark.fault("a process of another user that has the agent's token", "the agent of root leaves it alone")
def test_a_process_of_another_user_is_no_worker() -> None:
    token = "x" * 32
    environment = {**os.environ, TOKEN_VARIABLE: token}
    own, other = (subprocess.Popen(["/bin/sleep", "600"], env=environment, user=user) for user in (None, 65534))
    try:
        for process in (own, other):
            until(lambda: token.encode() in read(f"/proc/{process.pid}/environ"), "its environment")  # noqa: B023
        assert has_token(own.pid, token)
        assert not has_token(other.pid, token)
    finally:
        for process in (own, other):
            process.kill()
            process.wait()
