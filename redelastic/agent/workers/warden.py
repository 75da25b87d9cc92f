"""The warden: ends the processes of an agent's workers once the agent is gone, however that happened.

A process belongs to the tree of an agent's workers if any of these holds:

- it is a worker, or its parent belongs;
- it has the agent's token in its environment: that survives fork, exec, setsid and the death of every ancestor;
- it is in a session that a process of the tree opened;
- it belonged when the agent last looked, about once a second;
- it is an orphan that the agent adopted, which it can do where the whole process is its own.

So a process escapes only where nothing is adopted, and only by leaving its parent, session and environment between two
looks.

The agent runs this file by its path, in a process of its own, with the standard library alone: it stays small.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Final, NamedTuple

LIMIT: Final = 30.0  # within which killed processes have to be gone, in seconds: one with a busy GPU takes its time
CHASE: Final = 1.0  # how long new processes are stopped before any is killed, in seconds
PROBES: Final = 50  # looks at the newest process after each look at all of them, a few ten microseconds apart
EMPTY_LOOKS: Final = 20  # that end a kill on a host where new processes never cease to come
INTERVAL: Final = 0.2  # in which the warden asks whether its parent is still the agent, in seconds


class Process(NamedTuple):
    """A process as a table of all has it."""

    pid: int
    parent: int
    group: int
    session: int
    start: float  # on the clock of the operating system, in whatever unit: it tells two processes with one pid apart
    alive: bool  # not a zombie


def read(path: str) -> bytes:
    """A file of the kernel's; nothing if it is not there, or not for us."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # pathlib would double the warden's memory
            return file.read()
    except OSError:  # the process has gone, or is none of ours to read
        return b""


HAS_PROC = bool(read("/proc/self/stat"))


def processes() -> dict[int, Process]:
    """All processes that this one can see, by pid."""
    if not HAS_PROC:
        return _processes_by_psutil()
    table = {}
    for name in reversed(os.listdir("/proc")):  # noqa: PTH208  # the newest first: they may not be there for long
        if name.isdecimal():
            _, _, stat = read(f"/proc/{name}/stat").rpartition(b")")  # the name before it may hold anything
            fields = stat.split()
            if fields:
                pid, (parent, group, session), threads = int(name), map(int, fields[1:4]), int(fields[17])
                alive = fields[0] not in b"ZX" or threads > 1  # its main thread alone may have ended
                table[pid] = Process(pid, parent, group, session, int(fields[19]), alive)
    return table


def _processes_by_psutil() -> dict[int, Process]:
    import psutil  # noqa: PLC0415  # the warden has it not, and runs where there is /proc

    table = {}
    for found in psutil.process_iter(["ppid", "create_time", "status"]):
        with contextlib.suppress(OSError):
            group, session = os.getpgid(found.pid), os.getsid(found.pid)
            parent, start, status = (found.info[name] for name in ("ppid", "create_time", "status"))
            table[found.pid] = Process(found.pid, parent, group, session, start, status != psutil.STATUS_ZOMBIE)
    return table


def find(
    table: dict[int, Process],
    token: str,
    known: dict[int, float],
    sessions: Collection[int] = (),
    *,
    strangers: Collection[int],
    agent_session: int,
) -> dict[int, Process]:
    """The processes of the tree, zombies too.

    Args:
        table: all processes.
        token: of the agent.
        known: the start of each process, by pid, that is known to belong.
        sessions: known to belong.
        strangers: pids that do not belong, whatever speaks for them.
        agent_session: the session of the agent, in which not all belongs.
    """
    children, comrades = defaultdict(list), defaultdict(list)
    for process in table.values():
        children[process.parent].append(process)
        comrades[process.session].append(process)
    no_evidence = {agent_session, 0}  # 0: a session from outside this pid namespace
    # A session whose leader is somebody new is another one that got its number.
    ours = {pid for pid in sessions if pid not in table or known.get(pid) == table[pid].start} - no_evidence
    needle = token.encode()
    members: dict[int, Process] = {}
    for process in table.values():
        if (
            known.get(process.pid) == process.start
            or process.session in ours
            or (process.group and needle in read(f"/proc/{process.pid}/environ"))  # a kernel thread has no group
        ):
            reached = [process]
            while reached:
                member = reached.pop()
                if member.pid not in members and member.pid not in strangers:
                    members[member.pid] = member
                    reached += children[member.pid]
                    reached += comrades[member.session] if member.session not in no_evidence else []
    return members


def _signal(table: dict[int, Process], members: dict[int, Process], number: signal.Signals) -> None:
    """Signal ``members``: whole process groups where they can be, since no fork can slip through between."""
    mixed = {process.group for process in table.values() if process.pid not in members} | {0, 1}
    targets = {process.pid if process.group in mixed else -process.group for process in members.values()}
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(target, number)


def _newest() -> str:
    """The pid of the newest process or thread; empty without /proc."""
    return (read("/proc/loadavg").split() or [b""])[-1].decode()


def _ambush(token: str) -> bool:
    """Stop the newest process if it is one of the tree; returns whether it was.

    One that forks, ends, and has its child do the same in a group of its own is gone before a table of all is read.
    """
    for _ in range(PROBES if HAS_PROC else 0):
        newest = _newest()
        if token.encode() in read(f"/proc/{newest}/environ"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(newest), signal.SIGSTOP)
            return True
    return False


def end(token: str, look: Callable[[], tuple[dict[int, Process], dict[int, Process]]]) -> tuple[set[int], set[int]]:
    """Kill the tree as ``look`` finds it in a table of all processes, until it finds nothing more.

    What is new is stopped first, and looked at again: a stopped process does not fork, and still is its children's
    parent. Only when nothing new turns up any more, or has done so for too long, all are killed.

    Returns:
        The pids killed, and those that are left after ``LIMIT``.
    """
    started = time.monotonic()
    met: set[tuple[int, float]] = set()
    empty_looks = 0
    while True:
        newest = _newest()
        table, members = look()
        left = {(process.pid, process.start) for process in members.values() if process.alive}
        seconds = time.monotonic() - started
        empty_looks = 0 if left else empty_looks + 1
        # Where nothing was started meanwhile, none can have slipped past the look.
        ended = not left and (newest == _newest() or empty_looks == EMPTY_LOOKS)
        if ended or seconds > LIMIT:
            return {pid for pid, _ in met}, {pid for pid, _ in left}
        chase = not left <= met and seconds < CHASE
        _signal(table, members, signal.SIGSTOP if chase else signal.SIGKILL)
        met |= left
        if not _ambush(token) and not chase:
            time.sleep(min(0.1, 0.005 + seconds / 10))


def watch(token: str, agent: int, agent_session: int) -> None:
    """The warden's life: it hears of the agent's processes on its standard input, and ends them when the agent is gone.

    That is so when this process gets another parent. The end of the input alone says nothing: an agent may close it,
    and a forked worker may keep it open.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(0, False)
    known: dict[int, float] = {}
    heard, listening = b"", True
    gone = False
    while not gone:
        select.select([0] if listening else [], [], [], INTERVAL)
        gone = os.getppid() != agent  # asked before the last words are read
        with contextlib.suppress(BlockingIOError):
            while listening:
                said = os.read(0, 65536)
                listening = bool(said)
                *lines, heard = (heard + said).split(b"\n")
                known.update((int(pid), int(start)) for pid, start in map(bytes.split, lines))

    def look() -> tuple[dict[int, Process], dict[int, Process]]:
        table = processes()
        members = find(table, token, known, strangers={os.getpid()}, agent_session=agent_session)
        known.update((process.pid, process.start) for process in members.values())
        return table, members

    end(token, look)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
