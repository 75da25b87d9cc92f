"""The reaper: once its agent is gone, for whatever reason, it kills the agent's workers and what they started.

A process belongs to the tree of an agent's workers if any of these holds:

- it is a worker, or the child of a process of the tree;
- it is of the agent's user, and its environment has the agent's token, which survives fork, exec, setsid and the death
  of every ancestor;
- it shares a session with a process of the tree, unless that is the agent's session;
- it belonged when the agent last looked (:meth:`redelastic.workers.processes.ProcessTree.look`);
- it is an orphan that the agent adopted, as it can if the whole process is its own; but not if the agent is PID 1 of a
  container, which adopts everybody's orphans.

A fork bomb can escape: its processes may end, and leave new ones, faster than they are found.

The agent runs this file by path, in a process of its own, with only the standard library, to keep it small.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import struct
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Final, NamedTuple

KILL_TIMEOUT: Final = 30.0  # for killed processes to be gone, in seconds: one with a busy GPU takes its time
LOOK_INTERVAL: Final = 1.0  # between two looks for new processes while known ones are ending, in seconds
PARENT_CHECK_INTERVAL: Final = 0.2  # between checks for the agent on a kernel without pidfd, in seconds
RECORD: Final = struct.Struct("=qq")  # of a briefing: pid and start of a process of the tree


class Process(NamedTuple):
    """A process, as ``/proc`` shows it."""

    pid: int
    parent: int
    session: int
    start: int  # in ticks since the host's start: it tells apart two processes with the same pid
    alive: bool  # not a zombie

    @property
    def identity(self) -> tuple[int, int]:
        """A key that no other process has, now or later."""
        return self.pid, self.start


class Ended(NamedTuple):
    """The outcome of ending a tree, as pids."""

    asked: set[int]  # that got SIGTERM
    killed: set[int]  # that got SIGKILL
    left: set[int]  # that are still alive


def read(path: str) -> bytes:
    """Read a kernel file; empty if it is missing, or not readable."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # pathlib would double the reaper's memory
            return file.read()
    except OSError:  # the process is gone, or belongs to another user
        return b""


def look_up(pid: int) -> Process | None:
    """One process; None if it does not exist."""
    _, _, stat = read(f"/proc/{pid}/stat").rpartition(b")")  # the name before it may hold anything
    fields = stat.split()
    if not fields:
        return None
    alive = fields[0] not in b"ZX" or int(fields[17]) > 1  # other threads may live on after the main one
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), alive)


def processes() -> dict[int, Process]:
    """All processes visible to this one, by pid."""
    found = (look_up(int(name)) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
    return {process.pid: process for process in found if process}


def children(pid: int) -> list[Process]:
    """The children of a process; the kernel may omit one while another exits, until the next look."""
    found: list[Process] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            pids = map(int, read(f"/proc/{pid}/task/{thread}/children").split())
            found += [child for child in map(look_up, pids) if child]
    return found


def has_token(pid: int, token: str) -> bool:
    """Whether a process of this user has the agent's token in its environment, where other users may put it too."""
    with contextlib.suppress(OSError):  # it is gone
        return token.encode() in read(f"/proc/{pid}/environ") and os.stat(f"/proc/{pid}").st_uid == os.geteuid()  # noqa: PTH116
    return False


def is_torch_shm_manager(pid: int) -> bool:
    """Whether a process is torch's ``torch_shm_manager``, by the name that the kernel has cut to 15 bytes."""
    return read(f"/proc/{pid}/comm").startswith(b"torch_shm_manag")


def find(
    table: Mapping[int, Process], token: str, known: Mapping[int, int], strangers: Collection[int], agent_session: int
) -> dict[int, Process]:
    """Find the processes of the tree, including zombies.

    Args:
        table: all processes.
        token: of the agent.
        known: start of each process known to belong, by pid.
        strangers: pids that do not belong, whatever the evidence.
        agent_session: the agent's, in which not every process belongs to the tree.
    """
    offspring, sessions = defaultdict(list), defaultdict(list)
    for process in table.values():
        offspring[process.parent].append(process)
        sessions[process.session].append(process)
    for no_evidence in (agent_session, 0):  # 0: a session from outside this pid namespace
        sessions[no_evidence] = []
    reached = [
        process
        for process in table.values()
        if known.get(process.pid) == process.start or has_token(process.pid, token)
    ]
    for dead in known.keys() - table.keys():
        reached += sessions[dead]  # it may have opened one, which outlives it
    members: dict[int, Process] = {}
    while reached:
        process = reached.pop()
        if process.pid not in members and process.pid not in strangers:
            members[process.pid] = process
            reached += offspring[process.pid] + sessions[process.session]
    return members


def end(look: Callable[[], Iterable[Process]], grace: float = 0.0) -> Ended:
    """End the processes that ``look`` finds, and look again, until it finds none that lives.

    Within ``grace`` seconds of the first look each process gets one SIGTERM, and may exit by itself; after that,
    SIGKILL. This gives up ``KILL_TIMEOUT`` seconds later. torch's ``torch_shm_manager`` gets no SIGTERM: two seconds
    after the last process that shared memory with it, it removes what they have left in ``/dev/shm``, and exits.
    """
    asked: set[tuple[int, int]] = set()
    killed: set[tuple[int, int]] = set()
    kill_at: float | None = None
    while True:
        left = [process for process in look() if process.alive]
        now = time.monotonic()
        if kill_at is None:
            kill_at = now + grace  # not from before the look, which may take longer than a short grace on a busy host
        if not left or now > kill_at + KILL_TIMEOUT:
            return Ended({pid for pid, _ in asked}, {pid for pid, _ in killed}, {process.pid for process in left})
        number, signalled = (signal.SIGTERM, asked) if now < kill_at else (signal.SIGKILL, killed)
        for process in left:
            if process.identity not in signalled and not (signalled is asked and is_torch_shm_manager(process.pid)):
                signalled.add(process.identity)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, number)
        wait(left, min(now + LOOK_INTERVAL, kill_at) if now < kill_at else now + LOOK_INTERVAL)


def wait(processes: Iterable[Process], until: float) -> list[Process]:
    """Wait for the processes' ends, or until ``until`` on the monotonic clock; returns the ones that still live."""
    pause = 0.002
    while (left := [process for process in processes if _lives(process)]) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    return left


def _lives(process: Process) -> bool:
    now = look_up(process.pid)
    return now is not None and now.alive and now.start == process.start


def watch(agent: int, agent_session: int) -> None:
    """Wait until the agent is gone, then end the tree.

    Its standard input is the file in which the agent keeps its token, on a line, and then the tree as of its last look:
    a ``RECORD`` for each process. On a command line every user could read the token.
    """
    token = _briefing()[0].decode()
    if not token:
        sys.exit("no token")  # else every process would have it
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    _wait_for_death(agent)
    _, briefing = _briefing()
    known = dict(RECORD.iter_unpack(briefing[: len(briefing) // RECORD.size * RECORD.size]))  # one may be half-written

    def look() -> Iterable[Process]:
        members = find(processes(), token, known, {os.getpid()}, agent_session)
        known.update(process.identity for process in members.values())
        return members.values()

    end(look)


def _briefing() -> tuple[bytes, bytes]:
    """The token and the records in the standard input."""
    token, _, records = os.pread(0, os.fstat(0).st_size, 0).partition(b"\n")
    return token, records


def _wait_for_death(agent: int) -> None:
    """Wait until this process has another parent; the kernel may have given the agent's pid to another process."""
    handles: list[int] = []
    with contextlib.suppress(AttributeError, OSError):  # Linux before 5.3; or it is gone already
        handles = [os.pidfd_open(agent)]
    while os.getppid() == agent:
        select.select(handles, [], [], None if handles else PARENT_CHECK_INTERVAL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]))
