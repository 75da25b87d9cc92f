"""TrainingTime: where a node's time goes, by the steps that its workers report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Progressed
from redelastic.rendezvous.node import Node
from redelastic.rendezvous.view import Round
from redelastic.workers.group import Workers

PRECISION: Final = 0.01  # to which a round's first step is known, of the time until then
LONGEST_PAUSE: Final = 1.0  # between two looks for it, in seconds


@dataclass
class _Round:
    """What this node's workers have done in a round.

    Attributes:
        workers: of it.
        held: the round, as this node's view has it.
        leads: whether this node has rank 0, and so reports the steps.
        calls: of ``progress`` that its workers had made before, in an earlier round.
        last_step: the highest step of earlier rounds; None if none is known.
        began: on the monotonic clock.
        counted_until: until when the time is counted, on the monotonic clock; None before the first step.
        redone: whether the last reported step was one of an earlier round; None until the first one is reported.
    """

    workers: Workers
    held: Round | None
    leads: bool
    calls: int
    last_step: int | None
    began: float
    counted_until: float | None = None
    redone: bool | None = None


class Earlier(NamedTuple):
    """What a node's workers did before a round, as the event ``started`` has it.

    Attributes:
        survived: whether the processes are the same.
        last_step: the highest step that they have reported; None for none.
        since_progress_ms: time since their last progress; None if they made none.
    """

    survived: bool
    last_step: int | None
    since_progress_ms: int | None


class TrainingTime:
    """How long a node has trained since its agent began; on rank 0's node also the steps for the run's history.

    Time counts up to the workers' last progress, so that a hang, or the step that a fault cuts short, never does.

    Args:
        node: this one.
        control: of its run.
        send: runs a function in the background.
    """

    def __init__(self, node: Node, control: RunControl, send: Callable[[Callable[[], object]], None]) -> None:
        self._node, self._control, self._send = node, control, send
        self._lock = threading.Lock()
        self._looked_at = time.monotonic()
        self._whole = self._training = self._redone = 0.0
        self._round: _Round | None = None
        self._last_step: int | None = None  # the highest one of all rounds
        self._progress_at: float | None = None  # the last one, on the monotonic clock
        self._awaited = threading.Event()  # set while the round's first step, or its first new one, is still to come

    def begin_round(self, workers: Workers, rank: int) -> Earlier:
        """The workers are about to enter a round: what they report from now on counts as its.

        Args:
            workers: of this node: new ones, or the workers of the round before.
            rank: of this node.
        """
        with self._lock:
            self._count()
            survived = self._round is not None and self._round.workers is workers
            held = self._node.view.round
            calls = workers.progress_calls if survived else 0
            self._round = _Round(workers, held, rank == 0, calls, self._last_step, time.monotonic())
            self._awaited.set()
            since = None if self._progress_at is None else _ms_since(self._progress_at)
            return Earlier(survived, self._last_step, since)

    def look(self) -> None:
        """Count the time since the last look, and report the round's first step, or its first new one."""
        with self._lock:
            now = time.monotonic()
            self._whole += now - self._looked_at
            self._looked_at = now
            self._count()
            this = self._round
            if this is None:
                return
            step, is_first = this.workers.highest_step, this.redone is None
            is_new = is_first or (this.redone and not _is_redone(step, this.last_step))
            if this.leads and is_new and this.counted_until is not None:
                this.redone = False  # as far as is known
                self._send(partial(self._report, this, step, this.counted_until, is_first=is_first))
            if this.counted_until is not None and not this.redone:
                self._awaited.clear()

    def await_step(self, timeout: float) -> None:
        """Look for the round's first step, or its first new one; what comes before it is no training.

        Many scripts report none, so that the looks become rarer.

        Args:
            timeout: how long to wait for a round that still has to make it, in seconds.
        """
        if self._awaited.wait(timeout) and (this := self._round):
            self.look()
            time.sleep(min(LONGEST_PAUSE, PRECISION * (time.monotonic() - this.began)))

    def _report(self, this: _Round, step: int, at: float, *, is_first: bool) -> None:
        if is_first:  # another node may know more of earlier rounds
            known = [last for last in (this.last_step, self._control.last_step()) if last is not None]
            this.last_step = max(known, default=None)
            with self._lock:
                this.redone = _is_redone(step, this.last_step)
                if this.redone:
                    self._awaited.set()
        view = self._node.view
        if view.round is not this.held or view.broken:
            return  # too late: the steps that are known by now may be of the round after it
        node, last_step = self._node.id, this.last_step
        self._control.note(Progressed(node=node, step=step, last_step=last_step, since_progress_ms=_ms_since(at)))

    def _count(self) -> None:
        """Count the time up to the workers' last progress."""
        this = self._round
        if this is None or this.workers.progress_calls <= this.calls:
            return
        at, step = this.workers.progress_at, this.workers.highest_step
        if at is None:
            return
        passed = 0.0 if this.counted_until is None else max(0.0, at - this.counted_until)
        if _is_redone(step, this.last_step):
            self._redone += passed
        else:
            self._training += passed
        this.counted_until = self._progress_at = max(at, this.counted_until or at)
        self._last_step = step if self._last_step is None else max(step, self._last_step)

    @property
    def last_step(self) -> int | None:
        """The highest step that its workers have reported, if this node is rank 0; None elsewhere: one is enough."""
        with self._lock:
            self._count()
            return self._last_step if self._round and self._round.leads else None

    def fields(self) -> dict[str, Any]:
        """The times in seconds, and the share of training, for the health endpoint; left out before the first step."""
        with self._lock:
            if self._progress_at is None or self._whole <= 0:
                return {"node_time": self._whole}
            times = {"training_time": self._training, "redone_time": self._redone, "node_time": self._whole}
            return times | {"ettr": self._training / self._whole}


def _is_redone(step: int, last_step: int | None) -> bool:
    """Whether an earlier round had made a step."""
    return last_step is not None and step <= last_step


def _ms_since(at: float) -> int:
    return round(1000 * max(0.0, time.monotonic() - at))
