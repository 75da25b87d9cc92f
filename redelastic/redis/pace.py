"""The pace at which the threads of a process try a server that cannot be reached."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

import redis.exceptions as rx

from .interrupts import Latch

T = TypeVar("T")

EARLY_PAUSE: Final = (0.1, 0.4)  # in seconds, between two tries of a process while an outage is short
LATE_PAUSE: Final = (0.5, 1.5)  # in seconds, afterwards; the spread keeps many nodes from returning at the same time
_OUTAGE: Final = (rx.ConnectionError, rx.TimeoutError, rx.RedisClusterException)


class Pace:
    """Spaces out the tries of all threads while a server is away; the first success releases them all.

    Args:
        attempt_timeout: how long one attempt at a call may take, in seconds. A thread waits no longer than that for its
            turn, and an outage is short up to twice that time, which is a lease.

    Attributes:
        is_up: whether the last try, if any, reached the server.
    """

    def __init__(self, attempt_timeout: float) -> None:
        self._longest_wait, self._short_outage = attempt_timeout, 2 * attempt_timeout
        # A node with a short lease has to return within it.
        least, most = (min(pause, attempt_timeout / part) for pause, part in zip(LATE_PAUSE, (6, 2), strict=True))
        self._late_pause = max(EARLY_PAUSE, (least, most))
        self._become_up()

    def _become_up(self) -> None:
        self.is_up, self._pid, self._lock, self._returned = True, os.getpid(), threading.RLock(), Latch()

    def run(self, operation: Callable[[], T]) -> T:
        """Run an operation in this thread's turn.

        Raises:
            redis.ConnectionError: the turns of the threads before this one take longer than an attempt.
        """
        self._wait_for_turn()
        try:
            result = operation()
        except (*_OUTAGE, rx.ResponseError) as e:
            self.note(e)
            raise
        self._note_success()
        return result

    def note(self, error: BaseException) -> None:
        """Take in the outcome of a try that failed: whether the server could not be reached, or has answered."""
        if isinstance(error, rx.ResponseError):
            self._note_success()
        elif isinstance(error, _OUTAGE) and self.is_up:
            with self._lock:
                self._since = self._next_turn = time.monotonic()  # the first try after a lost connection is not delayed
                self._why, self._returned, self.is_up = str(error), Latch(), False

    def _note_success(self) -> None:
        if not self.is_up:
            with self._lock:
                self._returned.set()
                self.is_up = True  # the last: if an exception comes before, the next success sets it again

    def _wait_for_turn(self) -> None:
        if self._pid != os.getpid():  # another thread of the parent may hold the lock
            self._become_up()
        if self.is_up:
            return
        with self._lock:
            now, returned = time.monotonic(), self._returned
            wait = max(0.0, self._next_turn - now)
            if has_turn := wait <= self._longest_wait:
                pause = EARLY_PAUSE if now - self._since < self._short_outage else self._late_pause
                self._next_turn = now + wait + random.uniform(*pause)
        if not returned.wait(min(wait, self._longest_wait)) and not has_turn:
            raise rx.ConnectionError(self._why)
