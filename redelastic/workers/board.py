"""The agent's side of `redelastic/worker.py`: how far its workers are, how fast, and which of them hang.

Each worker has three nameless files of its own, for its progress, its stacks and what its flight recorder holds, and a
pipe for requests. It reaches them through `/proc/<agent>/fd`. So there is nothing to clean up, even after the agent was
killed with SIGKILL. The size of the first is sealed: were the file cut, the agent's next look would end the agent with
SIGBUS. The kernel opens them for processes with the agent's user and capabilities; a worker with fewer capabilities
writes to its stderr that the agent cannot see its progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import math
import mmap
import os
import secrets
import struct
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from redelastic import worker

__all__ = ["ProgressBoard", "HangWatch", "Progress", "StepTimer", "StepTimes", "nameless_file"]

F_ADD_SEALS: Final = 1033  # of Linux; a Python built for an old C library does not have the names
SEALS: Final = 1 | 2 | 4  # no further seals, no other size
WINDOW: Final = 60.0  # over which the times of steps are averaged, in seconds
MIN_STEPS: Final = 5  # in it
MIN_LOOKS: Final = 100  # in it
FROZEN_LOOKS: Final = 10  # missed looks after which the agent assumes that it was frozen itself


@dataclass(frozen=True)
class Progress:
    """The progress that a worker has reported.

    Attributes:
        pid: of the process that reports for the worker: the worker, or its child if it is a wrapper; 0 if none does.
        calls: how often it called ``progress``.
        step: of the last call; None before the first.
        at: when it last called ``progress``, or began or ended a phase, on the monotonic clock in seconds; None before.
        asks: whether it called ``should_checkpoint``, so that it will see a request.
        saved: whether it has seen the last request, has called ``progress`` since, and no save that it began goes on.
        saves_begun, saves_done: number of the last save that it began, and of the last one that is complete.
        limit: timeout of its phase in seconds; None outside phases.
        phase: name of its phase; empty outside phases.
        looks, waits: how often its thread has looked whether a collective goes on, and how often one did.
    """

    pid: int
    calls: int
    step: int | None
    at: float | None
    asks: bool
    saved: bool
    saves_begun: int
    saves_done: int
    limit: float | None
    phase: str
    looks: int
    waits: int


class ProgressBoard:
    """Shared memory in which one group of workers writes its progress; a restarted group gets a new board.

    Args:
        workers: number of workers on this node.

    Raises:
        OSError: no memory, disk space or file descriptor is left.
    """

    def __init__(self, workers: int) -> None:
        self._pid = os.getpid()
        self.slots: list[memoryview[int]] = []
        self._files: list[io.FileIO] = []
        self._stacks: list[io.FileIO] = []
        self._records: list[io.FileIO] = []
        self._asks: list[io.FileIO] = []  # write ends of the pipes
        self._requests = 0
        with contextlib.ExitStack() as opened:
            for _ in range(workers):
                file = opened.enter_context(nameless_file())
                fields = [0] * (worker.SLOT_BYTES // 8)
                stacks, records = (opened.enter_context(nameless_file()) for _ in range(2))
                asked, asks = (opened.enter_context(io.FileIO(*end)) for end in zip(os.pipe(), "rw", strict=True))
                os.set_blocking(asks.fileno(), False)
                fields[worker.TOKEN], fields[worker.SEEN] = secrets.randbits(62), -1
                fields[worker.STACKS], fields[worker.RECORDS] = stacks.fileno(), records.fileno()
                fields[worker.ASKS] = asked.fileno()
                # Written, not just extended: a page that the disk has no room for would kill the worker later.
                file.write(struct.pack(f"{len(fields)}q", *fields))
                with contextlib.suppress(OSError):  # not a file in memory
                    fcntl.fcntl(file, F_ADD_SEALS, SEALS)
                self._files.append(file)
                self._stacks.append(stacks)
                self._records.append(records)
                self._asks.append(asks)
                self.slots.append(memoryview(mmap.mmap(file.fileno(), worker.SLOT_BYTES)).cast("q"))
            self._closing = opened.pop_all()

    def environment(self, local_rank: int) -> dict[str, str]:
        """The environment variables by which a worker finds its slot."""
        name, token = self._files[local_rank].fileno(), self.slots[local_rank][worker.TOKEN]
        return {worker.VARIABLE: f"/proc/{self._pid}/fd/{name}:{token}", worker.NAMESPACE: worker.pid_namespace()}

    def read(self, local_rank: int) -> Progress:
        """Read a worker's progress; works after :meth:`close`, and from any thread."""
        slot = self.slots[local_rank]
        seen = slot[worker.SEEN]  # read before the calls: later calls can only make `saved` more true
        calls = slot[worker.CALLS]
        done = slot[worker.DONE]  # read after the calls, which follow a save's beginning, and before that beginning
        begun = slot[worker.BEGUN]
        request, calls_before = divmod(seen, 1 << worker.CALL_BITS)
        limit = slot[worker.LIMIT]  # read before the time, which is written first
        name = slot[worker.PHASE :].tobytes().rstrip(b"\0").decode(errors="replace") if limit else ""
        return Progress(
            pid=slot[worker.PID],
            calls=calls,
            step=slot[worker.STEP] if calls else None,
            at=slot[worker.AT] / 1e9 or None,
            asks=seen >= 0,
            saved=0 < self._requests == request and calls > calls_before and done >= begun,
            saves_begun=begun,
            saves_done=done,
            limit=limit / 1000 or None,
            phase=name,
            looks=slot[worker.LOOKS],
            waits=slot[worker.WAITS],
        )

    def request_checkpoint(self) -> None:
        """Have ``should_checkpoint`` return True, once, in every worker."""
        self._requests += 1
        for slot in self.slots:
            slot[worker.REQUESTED] = self._requests

    def clear_stacks(self, local_rank: int) -> None:
        """Forget the stacks that a worker has written."""
        self._stacks[local_rank].truncate(0)

    def stacks_size(self, local_rank: int) -> int:
        """How many bytes of stacks a worker has written."""
        return os.fstat(self._stacks[local_rank].fileno()).st_size

    def stacks(self, local_rank: int, limit: int) -> bytes:
        """The last ``limit`` bytes of the stacks that a worker has written."""
        size = self.stacks_size(local_rank)
        return os.pread(self._stacks[local_rank].fileno(), min(size, limit), max(0, size - limit))

    def ask_for_records(self, local_rank: int) -> None:
        """Ask a worker that has reported progress for what its flight recorder holds."""
        self._records[local_rank].truncate(0)
        with contextlib.suppress(BlockingIOError):  # it has answered none of thousands of requests
            os.write(self._asks[local_rank].fileno(), b"?")

    def records(self, local_rank: int, limit: int) -> bytes | None:
        """What the flight recorder held, as a JSON list of documents; None until a worker has answered.

        Raises:
            ValueError: it has more than ``limit`` bytes; or the board is closed.
        """
        file = self._records[local_rank].fileno()
        size = os.fstat(file).st_size
        if size > limit:
            raise ValueError(f"The flight recorder of local rank {local_rank} holds {size} bytes.")
        return os.pread(file, size, 0) if size and os.pread(file, 1, size - 1) == b"\n" else None

    def close(self) -> None:
        """Close the files: a late worker finds no slot, and one that has its slot keeps it."""
        self._closing.close()


def nameless_file() -> io.FileIO:
    """A file in memory if possible; it is gone with the last process that has it open."""
    try:
        return os.fdopen(os.memfd_create("redelastic", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "r+b", buffering=0)
    except (AttributeError, OSError):  # a Python built for an old C library; a sandbox that forbids it
        return tempfile.TemporaryFile(buffering=0)


class HangWatch:
    """Finds workers that have made no progress for too long.

    Progress means that the worker has called ``progress``, or begun or ended a phase, since the last look. Time in
    which the agent itself was frozen does not count.

    Args:
        board: of these workers.
        timeout: how long a worker may take from one call of ``progress`` to the next, in seconds; in a phase its own
            counts. Infinite: none hangs.
        start_timeout: how long it may take from its start to the first call, in seconds.
        reporters: local ranks of workers that called it in an earlier group.
        interval: between calls of :meth:`look`, in seconds.
        clock: monotonic, in seconds; the system's, as the workers' is.

    Attributes:
        reporters: local ranks of workers that have ever called it, in this group or an earlier one.
        idle: how long each worker had made no progress at the last look, in seconds, by local rank.
        silent: local ranks of workers that have never called ``progress``, in any group, though they had the time.
        due_in: how long after the last look the next worker may be found to hang, in seconds.
    """

    def __init__(
        self,
        board: ProgressBoard,
        timeout: float,
        start_timeout: float,
        reporters: Iterable[int],
        *,
        interval: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._board = board
        self._timeout = timeout
        self._start_timeout = start_timeout
        self.reporters = set(reporters)
        self._longest = FROZEN_LOOKS * interval
        self._clock = clock
        self._looked_at = clock()
        self._at: dict[int, float] = {}  # when each last made progress
        self.idle: dict[int, float] = {}
        self.silent: list[int] = []
        self.due_in = math.inf

    def look(self, running: Iterable[int]) -> dict[int, float]:
        """Look at all workers.

        Args:
            running: local ranks of workers that have not ended: one that is done makes no progress either.

        Returns:
            For each local rank that hangs, how long it has made no progress, in seconds.
        """
        now = self._clock()
        elapsed, self._looked_at = now - self._looked_at, now
        if elapsed > self._longest:
            elapsed = 0.0
        hung: dict[int, float] = {}
        self.silent, self.due_in = [], math.inf
        for local_rank in running:
            progress = self._board.read(local_rank)
            idle = self.idle.get(local_rank, 0.0) + elapsed
            if progress.at is not None and progress.at != self._at.get(local_rank):
                self._at[local_rank] = progress.at
                idle = min(max(0.0, now - progress.at), elapsed)
            if progress.calls:
                self.reporters.add(local_rank)
            self.idle[local_rank] = idle
            left = self._limit(progress) - idle
            if left >= 0:
                self.due_in = min(self.due_in, left)
            elif progress.limit or local_rank in self.reporters:
                hung[local_rank] = idle
            else:
                self.silent.append(local_rank)
        return hung

    @property
    def stalled(self) -> list[int]:
        """Local ranks of workers that report, and at the last look had made no progress for half of their time."""
        limits = {r: self._limit(self._board.read(r)) for r in self.reporters & self.idle.keys()}
        return [local_rank for local_rank, limit in limits.items() if self.idle[local_rank] > limit / 2]

    def _limit(self, progress: Progress) -> float:
        if progress.limit and not math.isinf(self._timeout):
            return progress.limit
        return self._timeout if progress.calls else self._start_timeout


class StepTimes(NamedTuple):
    """Averages of a worker's last minute, in seconds.

    Attributes:
        step: from one step to the next.
        own: of that, the time in which no collective went on.
    """

    step: float
    own: float


class StepTimer:
    """Follows one worker in one round."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, Progress]] = deque()

    def look(self, now: float, progress: Progress) -> None:
        """Take in what the worker has reported; ``now`` is on the monotonic clock, in seconds."""
        if self._seen and now - self._seen[-1][0] < WINDOW / MIN_LOOKS:
            return
        self._seen.append((now, progress))
        while len(self._seen) > 2 and now - self._seen[1][0] >= WINDOW:
            self._seen.popleft()

    @property
    def times(self) -> StepTimes | None:
        """The averages; None while too little is known, as for a script without collectives."""
        if not self._seen:
            return None
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        steps, looks, waits = last.calls - first.calls, last.looks - first.looks, last.waits - first.waits
        if until - since < WINDOW or steps < MIN_STEPS or looks < MIN_LOOKS or not waits:
            return None
        step = (until - since) / steps
        return StepTimes(step, step * (1 - waits / looks))
