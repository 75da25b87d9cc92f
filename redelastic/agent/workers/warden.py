"""The warden: once an agent is gone, for whatever reason, ends its workers' processes and tells Redis.

A process belongs to the tree of an agent's workers if any of these holds:

- it is a worker, or its parent belongs;
- its environment has the agent's token, which survives fork, exec, setsid and the death of every ancestor;
- it is in a session that a process of the tree opened;
- it belonged when the agent last looked (:meth:`redelastic.agent.workers.processes.ProcessTree.look`);
- it is an orphan that the agent adopted, as it can if the whole process is its own.

So a process escapes only if the agent adopts nothing, and only by leaving its parent, session and environment between
two looks.

Only when all of them are gone does the warden make the node leave its run, with the last words that the agent left it:
a node's place must never be free while its workers live (I1). If some are not gone in time, it says nothing.

The agent runs this file by path, in a process of its own, with only the standard library, to keep it small.
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

LIMIT: Final = 30.0  # for killed processes to be gone, in seconds: one with a busy GPU takes its time
CHASE: Final = 1.0  # how long new processes are stopped before any is killed, in seconds
PROBES: Final = 50  # looks at the newest process after each look at all of them, some tens of microseconds apart
EMPTY_LOOKS: Final = 20  # that end a kill on a host where new processes keep coming
INTERVAL: Final = 0.2  # between two looks for the agent on a kernel without pidfd, in seconds
RELOOK: Final = 1.0  # between two looks for new processes during the grace period after SIGTERM, in seconds
DELIVERY: Final = 5.0  # for the last words, in seconds
WORDS: Final = b"words"  # starts the line of the briefing that has the last words; other lines are a pid and a start


class Process(NamedTuple):
    """A process, as the table of all processes lists it."""

    pid: int
    parent: int
    group: int
    session: int
    start: float  # on the operating system's clock, in any unit: it tells apart two processes with the same pid
    alive: bool  # not a zombie


class Ended(NamedTuple):
    """How a tree was ended: pids."""

    asked: set[int]  # that got SIGTERM
    killed: set[int]  # that got SIGKILL
    left: set[int]  # that are still alive


def read(path: str) -> bytes:
    """Read a kernel file; empty if it is missing, or not readable."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  # pathlib would double the warden's memory
            return file.read()
    except OSError:  # the process is gone, or not ours to read
        return b""


HAS_PROC = bool(read("/proc/self/stat"))
LISTS_CHILDREN = os.path.exists("/proc/thread-self/children")  # noqa: PTH110  # not every kernel is built with it


def processes() -> dict[int, Process]:
    """All processes visible to this one, by pid."""
    if not HAS_PROC:
        return _processes_by_psutil()
    newest_first = reversed(os.listdir("/proc"))  # noqa: PTH208  # these may be gone soon
    found = (look_up(int(name)) for name in newest_first if name.isdecimal())
    return {process.pid: process for process in found if process}


def look_up(pid: int) -> Process | None:
    """One process, as ``/proc`` shows it; None if it does not exist."""
    _, _, stat = read(f"/proc/{pid}/stat").rpartition(b")")  # the name before it may hold anything
    fields = stat.split()
    if not fields:
        return None
    (parent, group, session), threads = map(int, fields[1:4]), int(fields[17])
    alive = fields[0] not in b"ZX" or threads > 1  # only its main thread may have ended
    return Process(pid, parent, group, session, int(fields[19]), alive)


def children(pid: int, besides: Collection[int] = ()) -> list[Process]:
    """The children of a process, besides some; one that another's exit hides just now shows up at the next look."""
    found: list[Process] = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            pids = map(int, read(f"/proc/{pid}/task/{thread}/children").split())
            found += [child for child in map(look_up, set(pids).difference(besides)) if child]
    return found


def _processes_by_psutil() -> dict[int, Process]:
    import psutil  # noqa: PLC0415  # not available to the warden, which runs only where there is /proc

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
    """Find the processes of the tree, including zombies.

    Args:
        table: all processes.
        token: of the agent.
        known: start of each process known to belong, by pid.
        sessions: known to belong.
        strangers: pids that do not belong, whatever the evidence.
        agent_session: the agent's session, in which not every process belongs.
    """
    children, comrades = defaultdict(list), defaultdict(list)
    for process in table.values():
        children[process.parent].append(process)
        comrades[process.session].append(process)
    no_evidence = {agent_session, 0}  # 0: a session from outside this pid namespace
    # A session with a new leader is another one that got the same number.
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
    """Signal ``members``: whole process groups where possible, so that no fork can slip through."""
    mixed = {process.group for process in table.values() if process.pid not in members} | {0, 1}
    targets = {process.pid if process.group in mixed else -process.group for process in members.values()}
    for target in targets:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(target, number)


def _process_of(thread: str) -> int:
    """The process of a thread; 0 if it is gone."""
    _, _, rest = read(f"/proc/{thread}/status").partition(b"\nTgid:")
    return int((rest.split() or [b"0"])[0])


def _newest() -> str:
    """The pid of the newest process or thread; empty without /proc."""
    return (read("/proc/loadavg").split() or [b""])[-1].decode()


def _ambush(token: str, strangers: Collection[int]) -> bool:
    """Stop the newest process if it is one of the tree, but no stranger; returns whether it was.

    One that forks, exits, and whose child does the same in its own group, is gone before all processes are listed.
    """
    for _ in range(PROBES if HAS_PROC else 0):
        newest = _newest()
        if token.encode() in read(f"/proc/{newest}/environ") and _process_of(newest) not in strangers:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(newest), signal.SIGSTOP)
            return True
    return False


def end(
    token: str,
    look: Callable[[], tuple[dict[int, Process], dict[int, Process]]],
    strangers: Callable[[], Collection[int]],
    grace: float = 0.0,
) -> Ended:
    """End the tree that ``look`` finds among all processes, until it finds nothing more, but for ``strangers``.

    Within ``grace`` seconds each process gets one SIGTERM and may exit by itself. Then all are killed. New ones are
    first stopped, and looked at again: a stopped process does not fork, and is still its children's parent. All get
    SIGKILL only when nothing new turns up, or has done so for too long. Some may still live after ``LIMIT`` seconds.
    """
    kill_at = time.monotonic() + grace
    asked: set[tuple[int, float]] = set()
    met: set[tuple[int, float]] = set()
    empty_looks = 0
    while True:
        newest = _newest()
        table, members = look()
        left = {(process.pid, process.start) for process in members.values() if process.alive}
        seconds = time.monotonic() - kill_at
        empty_looks = 0 if left else empty_looks + 1
        # If nothing was started meanwhile, nothing can have slipped past the look.
        ended = not left and (newest == _newest() or empty_looks == EMPTY_LOOKS)
        if ended or seconds > LIMIT:
            return Ended(*({pid for pid, _ in found} for found in (asked, met, left)))
        if seconds < 0 and not left:
            # Nothing is left to ask, yet new processes keep coming: they may be ours, and too quick for a look.
            kill_at = time.monotonic()
            continue
        if seconds < 0:
            _terminate(left - asked)
            asked |= left
            _wait(left, min(kill_at, time.monotonic() + RELOOK))
            continue
        chase = not left <= met and seconds < CHASE
        _signal(table, members, signal.SIGSTOP if chase else signal.SIGKILL)
        met |= left
        if not _ambush(token, strangers()) and not chase:
            time.sleep(min(0.1, 0.005 + seconds / 10))


def _terminate(processes: set[tuple[int, float]]) -> None:
    for pid, _ in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGTERM)


def _wait(processes: set[tuple[int, float]], until: float) -> None:
    """Wait until these have ended, or until ``until`` on the monotonic clock; other processes cost nothing."""
    pause = 0.002
    while time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
        found = {(process.pid, process.start) for pid, _ in processes if (process := look_up(pid)) and process.alive}
        if HAS_PROC and not found & processes:
            return


def watch(token: str, agent: int, agent_session: int) -> None:
    """The warden's life: it takes briefings on its standard input, and acts when the agent is gone.

    The agent is gone when this process has another parent. End of input alone means nothing: an agent may close it, and
    a forked worker may keep it open.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.set_blocking(0, False)
    known: dict[int, float] = {}
    words = b""
    heard, sources = b"", [0, *_pidfd(agent)]
    interval = None if sources[1:] and os.getppid() == agent else INTERVAL  # else it is another process with its pid
    gone = False
    while not gone:
        ready = select.select(sources, [], [], interval)[0]
        gone = os.getppid() != agent or ready not in ([], [0])  # checked before the rest of the briefing is read
        with contextlib.suppress(BlockingIOError):
            while 0 in sources:
                said = os.read(0, 65536)
                if not said:
                    sources.remove(0)
                *lines, heard = (heard + said).split(b"\n")
                for line in lines:
                    first, _, rest = line.partition(b" ")
                    if first == WORDS:
                        words = rest
                    else:
                        known[int(first)] = int(rest)

    def look() -> tuple[dict[int, Process], dict[int, Process]]:
        table = processes()
        members = find(table, token, known, strangers={os.getpid()}, agent_session=agent_session)
        known.update((process.pid, process.start) for process in members.values())
        return table, members

    if not end(token, look, lambda: {os.getpid()}).left and words:
        _deliver(words)


def _pidfd(pid: int) -> list[int]:
    """A descriptor that signals the end of a process; none if the kernel has no pidfd (Linux before 5.3)."""
    try:
        return [os.pidfd_open(pid)]
    except (AttributeError, OSError):
        return []


def _deliver(words: bytes) -> None:
    # If it hangs, on a name server for example, it gets killed.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, DELIVERY)
    sys.path.append(os.path.dirname(__file__))  # noqa: PTH120
    import deliver  # type: ignore[import-not-found]  # noqa: PLC0415  # beside this file; doubles the warden's memory

    deliver.deliver(words)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
