"""The processes of a node's workers, including everything they forked, and their end.

torch signals only its workers' process groups: processes that left their group live on, and if the agent itself is
killed, all processes do. `reaper.py` says which processes belong to the tree of an agent's workers.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Final

import psutil

from redelastic.redis.endpoint import URL_VARIABLE

from . import reaper
from .board import nameless_file
from .deaths import signal_name
from .reaper import Process

log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "REDELASTIC_AGENT"  # noqa: S105
RESTART_INTERVAL: Final = 10.0  # between the starts of two reapers, in seconds: one may fail at its start
PR_SET_CHILD_SUBREAPER: Final = 36
LOG_DELAY: Final = 0.5  # before logging what the agent waits for, in seconds
CLAIM_TIMEOUT: Final = 1.0  # after which no code waits for the status of a dead child, in seconds


class ProcessTree:
    """The processes of one agent's workers.

    Each worker must be started with ``environment``. A reaper stands by until ``close()``.

    Args:
        clock: monotonic, in seconds.

    Attributes:
        token: random, and in the environment of the workers and what they start.
        environment: what to add to the environment of a worker.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.token = os.urandom(16).hex()
        # An agent that is another agent's worker belongs to that agent's tree, and so do its own workers.
        self.environment = {TOKEN_VARIABLE: f"{os.environ.get(TOKEN_VARIABLE, '')} {self.token}".lstrip()}
        self._spared: set[int] = set()
        self._lock = threading.Lock()
        self._members: dict[int, Process] = {}  # as of the last look
        self._handles: dict[tuple[int, int], psutil.Process] = {}
        self._own_children: set[tuple[int, int]] | None = None  # when adoption began; None: it has not
        self._starting = False  # whether workers are being started
        self._dead: dict[tuple[int, int], float] = {}  # dead children that may be claimed -> when a look first saw them
        self._reaper_client = ReaperClient(self.token)
        self._reaper_client.brief(())

    def spare(self, pid: int) -> None:
        """Have ``look`` and ``stop`` leave a process alone; the reaper ends it with the tree."""
        self._spared.add(pid)

    def release(self, pid: int) -> None:
        """Spare a process no longer."""
        self._spared.discard(pid)

    def adopt_orphans(self) -> None:
        """Make this process the parent of all its descendants' orphans.

        From now on this process' children in other sessions belong to the tree, except its present ones. This is
        for a program that starts nothing but workers in sessions of their own.
        """
        with self._lock:
            if set_subreaper(True):
                table = reaper.processes().values()
                self._own_children = {process.identity for process in table if process.parent == os.getpid()}

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """Workers are being started while the block runs: a dead child may be one of them."""
        self._starting = True
        try:
            yield
        finally:
            self._starting = False

    def look(self, workers: Collection[int]) -> list[psutil.Process]:
        """Find the tree; call it about once a second.

        A look reads nothing of other programs' processes: it follows known processes to their children, and this
        process to the orphans that it has adopted. It misses an orphan in this process' own session and, if nothing is
        adopted, any orphan not seen before. Such an orphan is found by its environment or session when the tree is
        ended. Until then its usage is not counted, and the reaper must find it by its environment.

        Args:
            workers: their pids; one that is not a child of this process belongs to another process by now.

        Returns:
            The living processes of the tree; the same process is the same object each time.
        """
        with self._lock:
            own, strangers = reaper.children(os.getpid()), self._strangers
            seen = ((member, reaper.look_up(member.pid)) for member in self._members.values())
            reached = [now for before, now in seen if now and now.identity == before.identity]
            reached += self._tree_of(own, workers)
            members: dict[int, Process] = {}
            while reached:
                process = reached.pop()
                if process.pid not in members and process.pid not in strangers:
                    members[process.pid] = process
                    reached += reaper.children(process.pid)
            self._reap(child for child in own if self._is_unclaimed(child, workers))
            identities = {child.identity for child in own}
            self._dead = {dead: since for dead, since in self._dead.items() if dead in identities}
            self._members = members
            self._reaper_client.brief(members.values())
            handles = {}
            for member in members.values():
                with contextlib.suppress(psutil.Error):  # it has just gone
                    if member.alive:
                        handles[member.identity] = self._handles.get(member.identity) or psutil.Process(member.pid)
            self._handles = handles
            return list(handles.values())

    def wait(self, workers: Collection[int], until: float, is_hurried: Callable[[], bool]) -> None:
        """Let what is left of the tree end by itself.

        Args:
            workers: their pids, as for ``look``.
            until: when to give up, on the monotonic clock in seconds.
            is_hurried: whether to give up now; called several times a second.
        """
        left, say_at = self._find(workers), time.monotonic() + LOG_DELAY
        while left and (now := time.monotonic()) < until and not is_hurried():
            if now >= say_at:
                names = ", ".join(_describe(process.pid) for process in left)
                log.warning(
                    "The workers left processes behind, which will get SIGTERM in %.0f s: %s.", until - now, names
                )
                say_at = math.inf
            left = reaper.wait(left, now + 0.1) or self._find(workers)

    def stop(self, workers: Collection[int] = (), grace: float = 0.0) -> list[int]:
        """End what is left of the tree: SIGTERM first, then SIGKILL, repeatedly, until nothing is left.

        What is left after ``reaper.KILL_TIMEOUT`` is logged: SIGKILL ends it as soon as the kernel lets go of it.

        Args:
            workers: their pids, as for ``look``; their exit status stays for the code that started them.
            grace: between the two signals, in seconds; 0: SIGKILL at once.

        Returns:
            The pids of what was left, in order.
        """
        ended = reaper.end(lambda: self._find(workers), grace)
        if stubborn := sorted(ended.asked & ended.killed):
            pids = ", ".join(map(str, stubborn))
            log.warning("Processes of the workers did not exit within %g s of SIGTERM: %s.", grace, pids)
        if ended.left:
            names = ", ".join(map(_describe, sorted(ended.left)))
            log.error("Processes of the workers are still there %g s after SIGKILL: %s.", reaper.KILL_TIMEOUT, names)
        return sorted(ended.asked | ended.killed)

    def close(self) -> None:
        """Stop the reaper, and stop adopting; anything left of the tree then outlives this process."""
        with self._lock:
            if self._own_children is not None:
                set_subreaper(False)
            self._reaper_client.close()

    def _find(self, workers: Collection[int]) -> list[Process]:
        """The living processes of the tree, among all processes of the host; adopted zombies are reaped."""
        with self._lock:
            table = reaper.processes()
            own = [process for process in table.values() if process.parent == os.getpid()]
            known = {process.pid: process.start for process in (*self._members.values(), *self._tree_of(own, workers))}
            known |= dict.fromkeys(set(workers) - table.keys(), 0)  # a dead worker's session is in the tree
            self._members = reaper.find(table, self.token, known, self._strangers, os.getsid(0))
            self._reap(child for child in own if child.pid not in workers)
            return [process for process in self._members.values() if process.alive]

    @property
    def _strangers(self) -> set[int]:
        """This process and its helpers, which a look must leave out."""
        return {os.getpid(), *self._spared, *([self._reaper_client.pid] if self._reaper_client.pid else [])}

    def _tree_of(self, children: Iterable[Process], workers: Collection[int]) -> list[Process]:
        """This process' children that belong to the tree.

        As PID 1 this process adopts every orphan in its container: only the tree's have the token.
        """

        def has_proof(orphan: Process) -> bool:
            return os.getpid() != 1 or reaper.has_token(orphan.pid, self.token)

        return [child for child in children if child.pid in workers or (self._is_adopted(child) and has_proof(child))]

    def _is_adopted(self, child: Process) -> bool:
        """Whether a child is an orphan, or one of the workers."""
        return (
            self._own_children is not None
            and child.session != os.getsid(0)
            and child.identity not in self._own_children
        )

    def _is_unclaimed(self, child: Process, workers: Collection[int]) -> bool:
        """Whether no code in this process waits for a child's status.

        Code in this process may have started a session leader, and waits for it at once, unless it is torch's.
        """
        if child.pid != child.session:
            return True
        if child.alive or child.pid in workers or self._starting:
            return False
        return self._clock() - self._dead.setdefault(child.identity, self._clock()) > CLAIM_TIMEOUT

    def _reap(self, children: Iterable[Process]) -> None:
        for child in children:
            if not child.alive and child.pid not in self._strangers and self._is_adopted(child):
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(child.pid, os.WNOHANG)


def set_subreaper(whether: bool) -> bool:
    """Set whether orphans of this process' descendants become its children; returns whether Linux agreed."""
    return bool(ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(whether), 0, 0, 0) == 0)


def _describe(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        return f"{pid} ({process.name()}, {process.status()})"
    except psutil.Error as e:
        return f"{pid} ({type(e).__name__})"


class ReaperClient:
    """Keeps a reaper for the tree with ``token``.

    Args:
        token: of the tree.
        clock: monotonic, in seconds.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._reaper: subprocess.Popen[bytes] | None = None
        self._briefing = nameless_file()
        self._start_at: float | None = clock()  # None: never again
        self._complaint = ""  # about the last one

    @property
    def pid(self) -> int | None:
        """Pid of the reaper; None while there is none."""
        return self._reaper.pid if self._reaper else None

    def brief(self, members: Iterable[Process]) -> None:
        """Write down the tree for the reaper; start one if there is none."""
        if self._start_at is None:
            return
        content = f"{self._token}\n".encode() + b"".join(reaper.RECORD.pack(*process.identity) for process in members)
        os.pwrite(self._briefing.fileno(), content, 0)
        self._briefing.truncate(len(content))  # only now: if this process is killed in between, too much is written
        if self._reaper is not None and self._reaper.poll() is not None:
            self._report_end(self._reaper)
        if self._reaper is None and self._clock() >= self._start_at:
            self._start()

    def close(self) -> None:
        """End the reaper; the tree lives on."""
        self._start_at = None
        self._briefing.close()
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None

    def _start(self) -> None:
        self._start_at = self._clock() + RESTART_INTERVAL
        secret = (TOKEN_VARIABLE, URL_VARIABLE)
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(os.getsid(0))],
                stdin=self._briefing,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in secret},
                start_new_session=True,
            )
        except OSError as e:
            self._complain(f"No reaper could be started ({e}).")

    def _report_end(self, dead: subprocess.Popen[bytes]) -> None:
        self._reaper = None
        output = dead.communicate()[1].decode(errors="replace").strip()[-1000:]
        status = dead.returncode
        how = f"exited with {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
        if self._start_at is not None and self._clock() >= self._start_at:
            self._complaint = ""  # it did not fail at its start
        self._complain(f"The reaper of the workers' processes {how}.", output)

    def _complain(self, complaint: str, output: str = "") -> None:
        """Log a complaint, unless the last reaper failed the same way."""
        if complaint != self._complaint:
            without = "Until one stays up, workers would survive this process if it got SIGKILL."
            log.warning("%s", f"{complaint} {without}\n{output}".rstrip())
        self._complaint = complaint
