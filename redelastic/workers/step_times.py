"""How long workers work for a step, without the time in which they wait for others in collectives."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

from .board import Progress

WINDOW: Final = 60.0  # over which the times are averaged, in seconds
MIN_STEPS: Final = 5  # in it
MIN_LOOKS: Final = 100  # in it


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
