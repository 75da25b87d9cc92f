"""Errors that signal handlers raise, such as an alarm's time limit, wherever they interrupt a call to Redis."""

from __future__ import annotations

import signal
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
