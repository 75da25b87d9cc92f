"""The processes of a node's workers, including everything they forked, and their end.

torch signals its workers' process groups, and nothing else: processes that left those live on, and if the agent itself
is killed, all do. `warden.py` says which processes belong to the tree of an agent's workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Final

import psutil

from . import warden
from .guard import TOKEN_VARIABLE, Guard
from .warden import Process

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER: Final = 36
QUIET: Final = 0.5  # before logging what is being waited for, in seconds
FULL_LOOKS: Final = 30.0  # between two looks at all processes of the host if nothing is adopted, in seconds

Look = tuple[Iterable[Process], dict[int, Process]]  # processes that include our children, and the tree by pid


class ProcessTree:
    """The processes of one agent's workers.

    Each worker must be started with ``environment``. A warden stands by until ``close()``.

    Args:
        last_words: what the warden tells Redis if this process is killed: see :class:`Guard`.

    Attributes:
        token: random, and in the environment of the workers and what they start.
        environment: what to add to the environment of a worker.
        spared: pids that ``look`` and ``kill`` leave alone; the warden ends them with the tree.
    """

    def __init__(self, last_words: Callable[[], bytes] = bytes) -> None:
        self.token = os.urandom(16).hex()
        # An agent that is another agent's worker belongs to that agent's tree, and so do its own workers.
        self.environment = {TOKEN_VARIABLE: f"{os.environ.get(TOKEN_VARIABLE, '')} {self.token}".lstrip()}
        self.spared: set[int] = set()
        self._lock = threading.Lock()
        self._members: dict[int, Process] = {}  # as of the last look
        self._sessions: set[int] = set()  # of these and earlier members
        self._handles: dict[tuple[int, float], psutil.Process] = {}
        self._roots: set[int] = set()  # workers: their starters reap them
        self._own_children: set[tuple[int, float]] | None = None  # when adoption began; None: it has not
        self._full_look_at = 0.0  # on the monotonic clock
        self._guard = Guard(self.token, last_words)
        self._closed = False
        self._guard.brief(())

    def adopt_orphans(self) -> None:
        """Make this process the parent of all its descendants' orphans, on Linux; elsewhere do nothing.

        From now on this process' children in other sessions belong to the tree, except those that it has now. This is
        for a program that starts nothing but workers in sessions of their own.
        """
        with self._lock:
            if warden.HAS_PROC and _adopt(True):
                children = (process for process in warden.processes().values() if process.parent == os.getpid())
                self._own_children = {(child.pid, child.start) for child in children}

    def look(self, roots: Iterable[int], *, full: bool = False) -> list[psutil.Process]:
        """Find the tree; call it about once a second.

        A look costs nothing for processes that are not ours: it follows known processes to their children, and this
        process to the orphans that it has adopted. It misses an orphan in this process' own session and, if nothing is
        adopted, any orphan not seen before. Such an orphan is found by its environment or session when the tree is
        ended and, if nothing is adopted, also every ``FULL_LOOKS`` seconds, by a look at all processes of the host.
        Until then its usage is not counted, and the warden must find it by its environment.

        Args:
            roots: pids of the workers; one that is not a descendant of this process is taken for another's by now.
            full: whether to look at all processes of the host in any case.

        Returns:
            The living processes of the tree; the same process is the same object each time.
        """
        with self._lock:
            due = self._own_children is None and time.monotonic() >= self._full_look_at
            find = self._find if full or due or not warden.LISTS_CHILDREN else self._follow
            table, self._members = find(set(roots))
            # A session leader may be a worker that died before we heard of it: its starter wants its status.
            self._reap(process for process in table if process.pid != process.session)
            if not self._closed:
                self._guard.brief(self._members.values())
            handles = {}
            for member in self._members.values():
                key = member.pid, member.start
                with contextlib.suppress(psutil.Error):  # it has just gone
                    if member.alive:
                        handles[key] = self._handles.get(key) or psutil.Process(member.pid)
            self._handles = handles
            return list(handles.values())

    def wait(self, roots: Iterable[int], until: float, is_hurried: Callable[[], bool]) -> None:
        """Let what is left of the tree end by itself.

        Args:
            roots: pids of the workers, as for ``look``.
            until: when to give up, on the monotonic clock in seconds.
            is_hurried: whether to give up now; asked several times a second.
        """
        left, say_at = self.look(roots, full=True), time.monotonic() + QUIET
        while left and (now := time.monotonic()) < until and not is_hurried():
            if now >= say_at:
                names = ", ".join(f"{process.pid} ({_describe(process.pid)})" for process in left)
                log.warning(
                    "The workers left processes behind, which will get SIGTERM in %.0f s: %s.", until - now, names
                )
                say_at = math.inf
            psutil.wait_procs(left, timeout=0.1)
            left = self.look(roots)

    def stop(self, roots: Iterable[int], grace: float) -> list[int]:
        """End what is left of the tree: SIGTERM first, then :meth:`kill` what is alive after ``grace`` seconds.

        Returns:
            The pids of what was left, in order.
        """
        ended = self._end(set(roots), grace)
        if stubborn := sorted(ended.asked & ended.killed):
            log.warning("Processes of the workers did not exit within %g s of SIGTERM: %s.", grace, _listed(stubborn))
        return sorted(ended.asked | ended.killed)

    def kill(self, roots: Iterable[int] = ()) -> list[int]:
        """SIGKILL what is left of the tree, repeatedly, until nothing is.

        What is left after ``warden.LIMIT`` is logged: SIGKILL ends it as soon as the kernel lets go of it.

        Args:
            roots: pids of the workers, as for ``look``.

        Returns:
            The pids killed, in order.
        """
        return sorted(self._end(set(roots), 0.0).killed)

    def close(self) -> None:
        """Dismiss the warden, and stop adopting; anything left of the tree then outlives this process."""
        with self._lock:
            self._closed = True
            if self._own_children is not None:
                _adopt(False)
            self._guard.close()

    def _end(self, workers: set[int], grace: float) -> warden.Ended:
        met: dict[int, Process] = {}

        def look() -> tuple[dict[int, Process], dict[int, Process]]:
            with self._lock:
                self._members = met | self._members  # a process that is just gone may have left a session
                self._sessions |= _sessions(met)
                table, members = self._find(workers)
                met.update(self._members | members)
            return {process.pid: process for process in table}, members

        ended = warden.end(self.token, look, self._strangers, grace)
        with self._lock:
            self._reap(warden.processes().values())
        if ended.left:
            names = ", ".join(f"{pid} ({_describe(pid)})" for pid in sorted(ended.left))
            log.error("Processes of the workers are still there %g s after SIGKILL: %s.", warden.LIMIT, names)
        return ended

    def _find(self, roots: set[int]) -> Look:
        """All processes of the host, and the tree."""
        me, table = os.getpid(), warden.processes()
        self._full_look_at = time.monotonic() + FULL_LOOKS
        self._roots = {pid for pid in self._roots | roots if pid in table}
        mine = [table[pid] for pid in roots if _descends_from(me, pid, table.get)]
        mine += [process for process in table.values() if self._is_adopted(process)]
        members = warden.find(
            table,
            self.token,
            {process.pid: process.start for process in (*self._members.values(), *mine)},
            self._sessions,
            strangers=self._strangers(),
            agent_session=os.getsid(0),
        )
        self._sessions = _sessions(members)
        return table.values(), members

    def _follow(self, roots: set[int]) -> Look:
        """Our children but for our helpers, and what of the tree can be reached from these and its known members."""
        me, strangers = os.getpid(), self._strangers()
        children = warden.children(me, strangers)
        self._roots = {pid for pid in self._roots | roots if warden.look_up(pid)}
        known = [(member, warden.look_up(member.pid)) for member in self._members.values()]
        reached = [now for before, now in known if now and now.start == before.start]
        reached += [root for pid in roots if _descends_from(me, pid, warden.look_up) and (root := warden.look_up(pid))]
        reached += [child for child in children if self._is_adopted(child)]
        members: dict[int, Process] = {}
        while reached:
            member = reached.pop()
            if member.pid not in members and member.pid not in strangers:
                members[member.pid] = member
                reached += warden.children(member.pid)
        self._sessions = _sessions(members) | (self._sessions if self._own_children is None else set())
        return children, members

    def _strangers(self) -> set[int]:
        """This process and its helpers, which a look must leave out."""
        return {os.getpid(), *self.spared, *([self._guard.pid] if self._guard.pid else [])}

    def _is_adopted(self, process: Process) -> bool:
        """Whether ``process`` is an orphan of the tree that became our child, or one of the workers."""
        return (
            self._own_children is not None
            and process.parent == os.getpid()
            and process.session != os.getsid(0)
            and (process.pid, process.start) not in self._own_children
        )

    def _reap(self, processes: Iterable[Process]) -> None:
        for process in processes:
            reserved = process.pid in self._roots or process.pid in self.spared
            if not process.alive and not reserved and self._is_adopted(process):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process.pid, os.WNOHANG)


def _adopt(whether: bool) -> bool:
    """Set whether orphans of this process' descendants become its children; returns whether Linux agreed."""
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0)


def _descends_from(ancestor: int, pid: int, look_up: Callable[[int], Process | None]) -> bool:
    while process := look_up(pid):
        pid = process.parent
        if pid == ancestor:
            return True
    return False


def _sessions(members: dict[int, Process]) -> set[int]:
    return {process.session for process in members.values()}


def _listed(pids: Iterable[int]) -> str:
    return ", ".join(map(str, pids))


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.name()}, {process.status()}"
    except psutil.Error as e:
        return type(e).__name__
