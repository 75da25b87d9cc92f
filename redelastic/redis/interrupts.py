"""Errors that signal handlers raise, such as an alarm's time limit, wherever they interrupt a call to Redis."""

from __future__ import annotations

import contextlib
import signal
import threading
import traceback
from collections.abc import Iterator
from typing import Any


def is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error: Redis is not its cause."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def causes(error: BaseException, handled: BaseException | None = None) -> Iterator[BaseException]:
    """The causes of an error, except for one that was being handled before."""
    seen: set[int] = set()  # `raise e.__cause__ from None` makes a circle of causes and contexts
    below = error.__cause__ or error.__context__
    while below is not None and below is not handled and id(below) not in seen:
        yield below
        seen.add(id(below))
        below = below.__cause__ or below.__context__


class Latch:
    """As :class:`threading.Event`, but a signal handler's exception in the middle of a wait leaves it usable.

    An ``Event`` may stay locked then, so that all threads that wait for it or set it hang.
    """

    def __init__(self) -> None:
        self._is_set, self._gates = False, set[Any]()  # a lock for each thread that waits: nobody else's wait needs it

    def is_set(self) -> bool:
        """Whether it was set."""
        return self._is_set

    def set(self) -> None:
        """Release all threads that wait now or later."""
        self._is_set = True
        for gate in tuple(self._gates):
            with contextlib.suppress(RuntimeError):  # another thread sets it too
                gate.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, for ``timeout`` seconds at most; returns whether it is."""
        if not self._is_set:
            gate = threading.Lock()
            gate.acquire()
            self._gates.add(gate)
            if not self._is_set:  # it might have been set before it knew of this thread
                gate.acquire(timeout=max(0.0, timeout))
            self._gates.discard(gate)
        return self._is_set
