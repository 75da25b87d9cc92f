"""Processes that stand for workers: those that fork, hide and do not end, and those that report progress on a board."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from redelastic.workers import reaper, template
from redelastic.workers.board import ProgressBoard
from redelastic.workers.processes import ProcessTree
from tests.support.waiting import Within

DEADLINE = 30.0  # of waits for what takes well under a second, in seconds
LIFE = 90  # of a process that nobody ends, in seconds
until = Within(DEADLINE)

# Functions for the programs below. `say` publishes the caller's pid in a file, which appears only once it is whole.
PRELUDE = f"""
import os, signal, sys, time
folder = sys.argv[1]

def say(name):
    with open(os.path.join(folder, "." + name), "w") as file:
        file.write(str(os.getpid()))
    os.rename(os.path.join(folder, "." + name), os.path.join(folder, name))

def live():
    time.sleep({LIFE})
    os._exit(0)

def wait_for(name):
    while not os.path.exists(os.path.join(folder, name)):
        time.sleep(0.005)

def bare(name):
    program = "import os, sys, time; os.rename(*sys.argv[1:3]); time.sleep({LIFE})"
    say("of-" + name)
    files = [os.path.join(folder, n) for n in ("of-" + name, name)]
    os.execve(sys.executable, [sys.executable, "-I", "-S", "-c", program, *files], {{}})

def daemon(function, session=True):
    if os.fork() == 0:
        if session:
            os.setsid()
        if os.fork() == 0:
            function()
        os._exit(0)
    os.wait()
"""
DAEMON = PRELUDE + "daemon(lambda: (say('left'), live())); say('worker'); live()"
DEAF = (
    PRELUDE
    + """
for number in set(signal.valid_signals()) - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, signal.SIG_IGN)
daemon(lambda: (say("left"), live()))
say("worker")
live()
"""
)
SECRETIVE = (  # its grandchild is in its own session without an environment, and an orphan after "go"
    PRELUDE
    + """
if os.fork() == 0:
    if os.fork() == 0:
        os.setsid()
        bare("left")
    wait_for("go")
    say("went")
    os._exit(0)
say("worker")
live()
"""
)

Pids = dict[str, psutil.Process]
StartInTree = Callable[..., "subprocess.Popen[bytes]"]
StartOnBoard = Callable[..., int]


@pytest.fixture
def tree() -> Iterator[ProcessTree]:
    made = ProcessTree()
    yield made
    made.stop()
    made.close()


@pytest.fixture
def start_in_tree(tree: ProcessTree, tmp_path: Path) -> Iterator[StartInTree]:
    """Starts workers of ``tree`` as torch does; their stdout is closed when the last of their processes ends."""
    made: list[subprocess.Popen[bytes]] = []

    def begin(source: str) -> subprocess.Popen[bytes]:
        made.append(
            subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", source, str(tmp_path)],
                env=os.environ | tree.environment,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        )
        return made[-1]

    yield begin
    tree.stop()
    for worker in made:
        worker.kill()
        worker.communicate()


@pytest.fixture
def board() -> Iterator[ProgressBoard]:
    """The progress board of three workers."""
    made = ProgressBoard(3)
    yield made
    made.close()


@pytest.fixture
def start_on_board(board: ProgressBoard) -> Iterator[StartOnBoard]:
    """Starts a script as a worker, waits until it prints "ready", and returns its process id.

    The script gets a slot of ``board``, or of the board given as ``of``; with None for its local rank it gets none.
    """
    made: list[subprocess.Popen[str]] = []

    def begin(
        code: str,
        local_rank: int | None = 0,
        *,
        of: ProgressBoard = board,
        command: tuple[str, ...] = (sys.executable, "-c"),
    ) -> int:
        environment = {} if local_rank is None else of.environment(local_rank)
        made.append(subprocess.Popen([*command, code], env=os.environ | environment, stdout=subprocess.PIPE, text=True))
        stdout = made[-1].stdout
        assert stdout is not None
        assert stdout.readline() == "ready\n"
        return made[-1].pid

    yield begin
    for worker in made:
        worker.kill()
        worker.communicate()


def reaper_of(agent: psutil.Process, token: str = "") -> psutil.Process:
    """The reaper that an agent has started, for the process tree with ``token`` if one is given."""

    def found() -> psutil.Process | None:
        for child in agent.children():
            with contextlib.suppress(psutil.Error):
                command = child.cmdline()
                stdin = Path(f"/proc/{child.pid}/fd/0")
                if "reaper.py" in " ".join(command) and stdin.read_bytes().startswith(token.encode()):
                    return child
        return None

    reaper: psutil.Process = until(found, "the reaper")
    return reaper


def wait_for_pids(folder: Path, *names: str) -> Pids:
    """Wait until processes have said their pids under these names; returns the processes."""
    until(lambda: all((folder / name).exists() for name in names), f"the pids of {names}")
    return {name: psutil.Process(int((folder / name).read_text())) for name in names}


def kill_and_reap(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()


def expect_forks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, a template that does not fork a worker within a fifth of a second is given up.

    Not before: on a busy machine, the first fork of a template that works may take longer.
    """
    monkeypatch.setattr(template, "FORK_TIMEOUT", 0.2)


def start_with_pid(pid: int, began: float, command: list[str]) -> psutil.Popen:
    """Start a process with the pid of a dead one, which began at ``began``.

    The kernel's start times have ticks of 10 ms: a process begun in the same tick would be taken for the dead one.
    """
    last = Path("/proc/sys/kernel/ns_last_pid")
    for _ in range(200):
        with last.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two tests would take back each other's number
            newest = file.read()
            try:
                last.write_text(str(pid - 1))
            except OSError as e:
                pytest.skip(f"the next pid cannot be chosen here: {e}")
            child = psutil.Popen(command, start_new_session=True)
            last.write_text(newest)  # else the next processes would get pids of other tests' dead processes
        if child.pid == pid and reaper.processes()[pid].start != began:
            return child
        child.kill()
        child.wait()
    pytest.fail(f"200 times, another process got pid {pid} first")
