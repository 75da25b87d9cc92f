"""Signals that ask this process to end, or its node to drain."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

_replaced: Final[list[tuple[signal.Signals, Any]]] = []  # signals that are handled here, and their handlers before that


@contextlib.contextmanager
def handling(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], object]) -> Iterator[None]:
    """Handle signals while the block runs, except ignored ones, as SIGHUP is under ``nohup``.

    A process that is forked meanwhile has the handlers of before: a worker is no agent, and SIGTERM must end it.
    Outside the main thread this does nothing.
    """
    depth = len(_replaced)
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                _replaced.append((number, signal.signal(number, handler)))
    try:
        yield
    finally:
        _restore(depth)


def _restore(depth: int = 0) -> None:
    while len(_replaced) > depth:
        signal.signal(*_replaced.pop())


os.register_at_fork(after_in_child=_restore)
