"""The processes of a node's workers: all of them, whatever they forked, and their end.

torch signals its workers' process groups, and nothing else: what left those lives on, and all of it does if the agent
itself is killed. `warden.py` says which processes belong to the tree of an agent's workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from typing import Final

import psutil

from . import warden
from .warden import Process

log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "REDELASTIC_AGENT"  # noqa: S105
PR_SET_CHILD_SUBREAPER: Final = 36


class ProcessTree:
    """The processes of one agent's workers.

    Each worker must be started with ``environment``. From the beginning to ``close()`` a warden stands by.

    Attributes:
        token: random, and in the environment of the workers and what they start.
        environment: what to add to the environment of a worker.
        spared: pids that ``look`` and ``kill`` leave alone; the warden ends them with the tree.
    """

    def __init__(self) -> None:
        self.token = os.urandom(16).hex()
        # An agent that is a worker of another one belongs to that one's tree, and so do its own workers.
        self.environment = {TOKEN_VARIABLE: f"{os.environ.get(TOKEN_VARIABLE, '')} {self.token}".lstrip()}
        self.spared: set[int] = set()
        self._lock = threading.Lock()
        self._members: dict[int, Process] = {}  # as of the last look
        self._handles: dict[tuple[int, float], psutil.Process] = {}
        self._roots: set[int] = set()  # workers: those who started them reap them
        self._own_children: set[tuple[int, float]] | None = None  # when adoption began; None: it did not
        self._warden: subprocess.Popen[bytes] | None = None
        self._told: set[tuple[int, float]] = set()  # what the warden knows
        self._closed = False
        self._brief_warden()

    def adopt_orphans(self) -> None:
        """Make this process the parent of all its descendants' orphans, on Linux; elsewhere do nothing.

        From now on this process' children in other sessions belong to the tree, but for those it has now. It is for a
        program that starts nothing but workers in sessions of their own.
        """
        with self._lock:
            if warden.HAS_PROC and _adopt(True):
                children = (process for process in warden.processes().values() if process.parent == os.getpid())
                self._own_children = {(child.pid, child.start) for child in children}

    def look(self, roots: Iterable[int]) -> list[psutil.Process]:
        """Find the tree; call it about once a second.

        Args:
            roots: pids of the workers; one that is no descendant of this process is taken for somebody else's by now.

        Returns:
            The living processes of the tree; the same process is the same object each time.
        """
        with self._lock:
            table, self._members = self._find(set(roots))
            # A session leader may be a worker that died before we were told of it: whoever started it wants its status.
            self._reap(process for process in table.values() if process.pid != process.session)
            if not self._closed:
                self._brief_warden()
            handles = {}
            for member in self._members.values():
                key = member.pid, member.start
                with contextlib.suppress(psutil.NoSuchProcess):
                    if member.alive:
                        handles[key] = self._handles.get(key) or psutil.Process(member.pid)
            self._handles = handles
            return list(handles.values())

    def kill(self, roots: Iterable[int] = ()) -> list[int]:
        """SIGKILL all that is left of the tree, again and again until nothing is.

        What is left after ``warden.LIMIT`` is logged: SIGKILL ends it as soon as the kernel lets go of it.

        Args:
            roots: pids of the workers, as for ``look``.

        Returns:
            The pids killed, in order.
        """
        workers = set(roots)

        def look() -> tuple[dict[int, Process], dict[int, Process]]:
            table, members = self._find(workers)
            self._members |= members  # what has just gone may have left a session
            return table, members

        with self._lock:
            killed, left = warden.end(self.token, look)
            self._reap(warden.processes().values())
        if left:
            names = ", ".join(f"{pid} ({_describe(pid)})" for pid in sorted(left))
            log.error("Processes of the workers are not gone %g s after SIGKILL: %s.", warden.LIMIT, names)
        return sorted(killed)

    def close(self) -> None:
        """Dismiss the warden, and adopt nobody any more; what is left of the tree then outlives this process."""
        with self._lock:
            self._closed = True
            if self._own_children is not None:
                _adopt(False)
            if self._warden is not None:
                self._warden.kill()
                self._warden.communicate()
                self._warden = None

    def _find(self, roots: set[int]) -> tuple[dict[int, Process], dict[int, Process]]:
        me, table = os.getpid(), warden.processes()
        self._roots = {pid for pid in self._roots | roots if pid in table}
        mine = [pid for pid in roots if _descends_from(me, pid, table)]
        mine += [process.pid for process in table.values() if self._is_adopted(process)]
        members = warden.find(
            table,
            self.token,
            {process.pid: process.start for process in (*self._members.values(), *(table[pid] for pid in mine))},
            {process.session for process in self._members.values()},
            strangers={me, self._warden.pid if self._warden else me, *self.spared},
            agent_session=os.getsid(0),
        )
        return table, members

    def _is_adopted(self, process: Process) -> bool:
        """Whether ``process`` is an orphan of the tree's that became a child of ours, or one of the workers."""
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

    def _brief_warden(self) -> None:
        """Tell the warden what is new in the tree; start it if there is none."""
        if self._warden is None or self._warden.poll() is not None:
            self._start_warden()
        if self._warden is None or self._warden.stdin is None:
            return
        members = {(process.pid, process.start) for process in self._members.values()}
        self._told &= members
        with contextlib.suppress(BrokenPipeError):  # it is dead: the next look starts another one
            for pid, start in members - self._told:
                if self._warden.stdin.write(b"%d %d\n" % (pid, start)) is None:
                    break  # it is far behind: the next look goes on
                self._told.add((pid, start))

    def _start_warden(self) -> None:
        if not warden.HAS_PROC:
            return
        if self._warden is not None:
            self._warden.communicate()
            log.warning("The warden of the workers' processes was killed; a new one is started.")
        arguments = [self.token, str(os.getpid()), str(os.getsid(0))]
        try:
            self._warden = subprocess.Popen(
                [sys.executable, "-I", "-S", warden.__file__, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
                start_new_session=True,
            )
        except OSError as e:
            self._warden = None
            log.warning("No warden could be started (%s): if SIGKILL ends this process, its workers live on.", e)
        else:
            self._told = set()
            if self._warden.stdin is not None:
                os.set_blocking(self._warden.stdin.fileno(), False)


def _adopt(whether: bool) -> bool:
    """Whether orphans of this process' descendants become its children from now on; returns whether Linux agreed."""
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0)


def _descends_from(ancestor: int, pid: int, table: dict[int, Process]) -> bool:
    while pid in table:
        pid = table[pid].parent
        if pid == ancestor:
            return True
    return False


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{process.name()}, {process.status()}"
    except psutil.Error as e:
        return type(e).__name__


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory in this process' cgroup so far.

    Where no cgroup counts that, it is the whole host's number, and 0 where the kernel does not say.
    """
    paths = []
    for line in warden.read("/proc/self/cgroup").decode().splitlines():
        _, controllers, cgroup = line.split(":", 2)
        if "memory" in controllers.split(","):
            paths += [f"/sys/fs/cgroup/memory{place}/memory.oom_control" for place in (cgroup, "")]
        elif not controllers:  # version 2; in a container, its own cgroup may be what is mounted
            paths += [f"/sys/fs/cgroup{place}/memory.events" for place in (cgroup, "")]
    for path in (*paths, "/proc/vmstat"):
        for line in warden.read(path).decode().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0
