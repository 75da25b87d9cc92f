"""Errors that signal handlers raise, such as an alarm's time limit, wherever they interrupt a call to Redis."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error: Redis is not its cause."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def causes(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """The causes of an error, except for one that was being handled before."""
    below = error.__cause__ or error.__context__
    while below is not None and below is not handled:
        yield below
        below = below.__cause__ or below.__context__


class Latch:
    """As :class:`threading.Event`, but a signal handler's exception in the middle of a wait leaves it usable.

    An ``Event`` may stay locked then, so that all threads that wait for it or set it hang.
    """

    def __init__(self) -> None:
        self._is_set, self._gate = False, threading.Lock()
        self._gate.acquire()

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Release all threads that wait, and those that will."""
        self._is_set = True
        with contextlib.suppress(RuntimeError):  # it was set before
            self._gate.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most; returns whether it is."""
        # An exception between the two calls keeps the gate closed: threads that wait by then do so for all their time.
        if not self._is_set and self._gate.acquire(timeout=max(0.0, timeout)):
            self._gate.release()
        return self._is_set
