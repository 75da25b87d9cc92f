"""Signals that ask a command to end."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any


@contextlib.contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals while the block runs, except ignored ones, as SIGHUP is under ``nohup``.

    Outside the main thread this does nothing.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
