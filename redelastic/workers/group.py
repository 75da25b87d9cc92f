"""Workers: the processes of one group of workers, and what the agent knows about each."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import Worker

from redelastic.agent.options import AgentOptions
from redelastic.monitoring.collectives import LastCollectives
from redelastic.monitoring.events import Hung
from redelastic.rendezvous.node import News

from .blame import Blame
from .board import FROZEN_LOOKS, HangWatch, ProgressBoard, StepTimer
from .channels import Parked, WorkerChannels
from .deaths import Deaths
from .records import last_collectives
from .stacks import catches, dump_stacks, speaker_of

log = logging.getLogger(__name__)

SAVE_SIGNAL: Final = signal.SIGUSR1  # asks workers that handle it to save
PAUSE_FACTOR: Final = 10  # times the monitor interval: between checks of workers whose ends the kernel reports
LONGEST_PAUSE: Final = 1.0  # between these checks, in seconds
SHORTEST_PAUSE: Final = 0.01  # in seconds
STACKS_TIMEOUT: Final = 10.0  # for the stacks of hung workers, in seconds
RECORDS_TIMEOUT: Final = 1.0  # for what their flight recorders hold, in seconds


class Workers:
    """One group of workers, from before its start until the next group is started.

    Args:
        count: number of workers on this node.
        options: they define a hang.
        interval: the monitor interval, in seconds.
        reporters: local ranks of workers that reported progress in an earlier group.
        notify: called when a worker has ended, or has parked, from a thread.

    Attributes:
        pids: of the workers that were started, by local rank.
        blame: which of them failed first, and why.
        channels: to the workers, if they survive from one round to the next.
        signalled: whether one of them was asked to save by signal alone: if it then ends with 0, its work may go on.
        hung: how long each hung worker has made no progress, in seconds, by local rank.
        start_timeout: how long a worker may take to report its first progress, in seconds.
    """

    def __init__(
        self,
        count: int,
        options: AgentOptions,
        interval: float,
        reporters: Iterable[int],
        notify: Callable[[], None],
    ) -> None:
        self.pids: dict[int, int] = {}
        self.blame = Blame()
        self.signalled = False
        self.hung: dict[int, float] = {}
        self._by_signal = True  # whether the last request to save was made by signal, too
        self._own_saves: dict[int, int] | None = None  # how many each had begun when one of its own began to be awaited
        self._board = ProgressBoard(count)
        self.channels = WorkerChannels(count, notify) if options.survive else None
        timeout = math.inf if options.hang_timeout is None else options.hang_timeout
        self._interval, self._notify = interval, notify
        self._pause = max(interval, min(PAUSE_FACTOR * interval, LONGEST_PAUSE, timeout / (2 * FROZEN_LOOKS)))
        self.start_timeout = options.start_timeout
        self._watch = HangWatch(self._board, timeout, self.start_timeout, reporters, interval=self._pause)
        self._started_at = math.inf
        self._deaths: Deaths | None = None
        self._steps: dict[int, int] = {}  # the last one of each when it was looked at
        self._counts_anew = False  # whether one of them has reported a lower step than before
        self._ranks: Mapping[int, int] = {}  # of the workers in the job, by local rank
        self._timers: dict[int, StepTimer] = {}  # in this round
        self._round_began = 0.0  # in seconds since 1970
        self._is_explained = False  # whether the round's collectives have been asked for

    def environment(self, local_rank: int) -> dict[str, str]:
        """The variables to add to the environment of a worker."""
        return self._board.environment(local_rank) | (self.channels.environment(local_rank) if self.channels else {})

    @property
    def parked(self) -> Mapping[int, Parked]:
        """The workers that survive and are in no round now, by local rank."""
        return self.channels.parked if self.channels else {}

    @property
    def have_parked(self) -> bool:
        """Whether all of them survive and are in no round now."""
        return self.channels is not None and self.channels.are_parked and not any(map(self.ended, self.pids))

    def started(self, pids: Mapping[int, int]) -> None:
        """Begin to watch."""
        self._started_at = time.monotonic()
        self._watch.look(pids)
        self.pids, self._deaths = dict(pids), Deaths(pids, self._notify)
        self.blame.started(self._deaths)

    def begin_round(self, ranks: Mapping[int, int]) -> None:
        """Begin a round; the workers may have survived the one before.

        Args:
            ranks: of the workers in the job, by local rank.
        """
        self.blame.begin_round(ranks)
        self._ranks, self._timers = ranks, {local_rank: StepTimer() for local_rank in ranks}
        self._round_began, self._is_explained = time.time(), False

    @property
    def pause(self) -> float:
        """After how many seconds to check them again: less often if the kernel reports their ends.

        A hang is found once its timeout is over: of two nodes the one that stopped first must report it.
        """
        pause = self._pause if self._deaths and self._deaths.sees_all else self._interval
        return max(SHORTEST_PAUSE, min(pause, self._watch.due_in))

    def ended(self, local_rank: int) -> bool:
        """Whether a worker has ended."""
        return self._deaths is not None and self._deaths.ended(local_rank)

    @property
    def first_failure(self) -> float | None:
        """When the first worker failed, on the monotonic clock in seconds; for a hang, when it last made progress.

        It is later for workers that failed because of a peer: see :meth:`Blame.follow_a_peer`.
        """
        if self.blame.failed_at is not None:
            return self.blame.failed_at
        if not self.hung:
            return min(self._deaths.failed.values(), default=None) if self._deaths else None
        last = [self._board.read(local_rank).at or self._started_at for local_rank in self.hung]
        return min(time.monotonic(), max(self._started_at, min(last)))

    def step(self, local_rank: int) -> int | None:
        """The last step that a worker reported."""
        return self._board.read(local_rank).step

    @property
    def highest_step(self) -> int:
        """The highest step that any of them reported; -1 for none."""
        return max((step for r in self.pids if (step := self.step(r)) is not None), default=-1)

    @property
    def progress_calls(self) -> int:
        """How often they have called ``progress`` in all."""
        return sum(self._board.read(local_rank).calls for local_rank in self.pids)

    @property
    def progress_at(self) -> float | None:
        """When one of them last made progress, on the monotonic clock in seconds; None if none has."""
        return max((at for r in self.pids if (at := self._board.read(r).at) is not None), default=None)

    @property
    def news(self) -> News:
        """What their reports say of the job's progress.

        Steps that start again, such as those of an epoch, do not show how far the job is; nor does a save by a script
        that reports no steps. Both count as progress.
        """
        self._look_at_steps()
        if self._counts_anew:
            return News.PROGRESS
        if self._steps:
            return News.STEP
        return News.PROGRESS if any(self._board.read(r).saves_done for r in self.pids) else News.NONE

    def _look_at_steps(self) -> None:
        for local_rank in self.pids:
            step = self.step(local_rank)
            if step is not None:
                self._counts_anew = self._counts_anew or step < self._steps.get(local_rank, step)
                self._steps[local_rank] = step

    @property
    def reporters(self) -> frozenset[int]:
        """Local ranks of workers that have ever reported progress, in this group or an earlier one."""
        return frozenset(self._watch.reporters)

    def find_hung(self) -> tuple[list[int], list[int]]:
        """Find hung workers, and set :attr:`hung`; returns them and the workers that have never reported."""
        self._look_at_steps()
        now = time.monotonic()
        for local_rank, timer in self._timers.items():
            timer.look(now, self._board.read(local_rank))
        self.hung = self._watch.look(r for r in self.pids if not self.ended(r))
        return list(self.hung), self._watch.silent

    def find_awaited(self, waits: Mapping[int, bool]) -> list[int]:
        """Count as hung also the workers that the hung ones wait for; returns all of them, the likeliest cause first.

        A worker that stops just after the others have begun to wait for it hangs just after them.

        Args:
            waits: whether a worker may wait for another one, by local rank.
        """
        awaited = [r for r in self._watch.stalled if not (waits[r] or self.ended(r))]
        self.hung |= {local_rank: self._watch.idle[local_rank] for local_rank in awaited}
        return sorted(self.hung, key=lambda local_rank: (waits[local_rank], -self.hung[local_rank]))

    def stacks(self, local_ranks: Iterable[int]) -> dict[int, str]:
        """Stacks of some of them, by local rank."""
        return dump_stacks(self._board, {r: self.pids[r] for r in local_ranks}, STACKS_TIMEOUT)

    def collectives_of_stalled(self) -> LastCollectives:
        """The last collectives of the workers by rank, once in a round, if some have made no progress for long."""
        if self._is_explained or not self._watch.stalled:
            return {}
        self._is_explained = True
        found = last_collectives(self._board, self._running, self._round_began, RECORDS_TIMEOUT)
        return {self._ranks[local_rank]: last for local_rank, last in found.items()}

    def _running(self) -> list[int]:
        return [local_rank for local_rank in self._ranks if not self.ended(local_rank)]

    def ask_to_save(self, *, by_signal: bool) -> int:
        """Ask for a checkpoint: through ``should_checkpoint()``, and by signal to workers that handle it.

        Args:
            by_signal: whether the signal may be sent: to many scripts it means that their job is about to end.

        Returns:
            How many workers get the request.
        """
        self._board.request_checkpoint()
        self._own_saves, self._by_signal = None, by_signal
        only_signalled: list[int] = []
        asked = sum(self._can_be_asked(local_rank, pid) for local_rank, pid in self.pids.items())
        for local_rank, pid in self.pids.items() if by_signal else ():
            speaker = speaker_of(self._board, local_rank, pid)
            if not self.ended(local_rank) and catches(speaker, SAVE_SIGNAL):  # the signal would end any other
                if not self._board.read(local_rank).asks:
                    only_signalled.append(local_rank)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(speaker, SAVE_SIGNAL)
        if only_signalled:
            self.signalled = True
            log.warning(
                "Local rank %s got SIGUSR1, which it handles, as a request to save. It never called "
                "should_checkpoint(), so the drain waits for its end, up to the drain timeout. A script that uses "
                "SIGUSR1 for something else, such as faulthandler.register(), should use another signal.",
                ", ".join(map(str, only_signalled)),
            )
        return asked

    def await_own_save(self, *, leads: bool) -> None:
        """Ask for nothing: :meth:`have_saved` waits for a save that workers begin by themselves from now on.

        Args:
            leads: whether these are the workers of rank 0's node: the first of them is the one that saves in any
                script. The others count only if they have begun a save before.
        """
        begun = {local_rank: self._board.read(local_rank).saves_begun for local_rank in self.pids}
        if leads and not begun.get(0):
            log.warning("Rank 0 has not marked any checkpoint with begin_save() yet; new nodes wait until it does.")
        self._own_saves = {local_rank: n for local_rank, n in begun.items() if n or (leads and local_rank == 0)}

    def have_saved(self) -> bool:
        """Whether each worker has saved, has ended, or cannot be asked to save."""
        return all(self._has_saved(local_rank, pid) for local_rank, pid in self.pids.items())

    def _has_saved(self, local_rank: int, pid: int) -> bool:
        seen = self._board.read(local_rank)
        if self._own_saves is not None:
            return self.ended(local_rank) or seen.saves_done > self._own_saves.get(local_rank, -1)
        return seen.saved or not self._can_be_asked(local_rank, pid)

    def _can_be_asked(self, local_rank: int, pid: int) -> bool:
        """Whether a worker runs and can be asked to save."""
        asks, speaker = self._board.read(local_rank).asks, speaker_of(self._board, local_rank, pid)
        return not self.ended(local_rank) and (asks or (self._by_signal and catches(speaker, SAVE_SIGNAL)))

    def hang(self, worker: Worker) -> Hung:
        """Describe how a worker hangs."""
        local_rank = worker.local_rank
        progress = self._board.read(local_rank)
        return Hung(
            local_rank=local_rank,
            rank=worker.global_rank,
            pid=self.pids[local_rank],
            idle_ms=round(1000 * self.hung[local_rank]),
            step=progress.step,
            phase=progress.phase,
        )

    def describe(self, worker: Worker) -> dict[str, Any]:
        """One worker, for the node's status."""
        local_rank = worker.local_rank
        states = {
            "exited": self.ended(local_rank),
            "hung": local_rank in self.hung,
            "parked": local_rank in self.parked,
        }
        state = next((state for state, holds in states.items() if holds), "running")
        status: dict[str, Any] = {"local_rank": local_rank, "rank": worker.global_rank}
        status |= {"pid": self.pids.get(local_rank), "state": state}
        if log := self.blame.logs.get(local_rank):
            status["log"] = log
        if (step := self.step(local_rank)) is not None:
            status["step"] = step
        has_reported = self._board.read(local_rank).at is not None or local_rank in self.hung
        if has_reported and (idle := self._watch.idle.get(local_rank)) is not None:
            status["idle"] = round(idle, 1)
        if (timer := self._timers.get(local_rank)) and (times := timer.times):
            status |= {"step_time": round(times.step, 6), "own_time": round(times.own, 6)}
        return status

    def close(self) -> None:
        """Release the agent's side; the processes are not touched."""
        self._board.close()
        self.blame.close()
        if self.channels:
            self.channels.close()
