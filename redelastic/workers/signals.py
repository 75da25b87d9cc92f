"""The signals on which a node drains."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from torch.distributed.elastic.multiprocessing import SignalException

from redelastic.signals import handling

log = logging.getLogger(__name__)

DRAIN_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
# SIGTERMs this close together are one request: GNU timeout signals a process, then its group.
SAME_REQUEST_SECONDS: Final = 1.0
TORCH_SIGNALS: Final = "TORCHELASTIC_SIGNALS_TO_HANDLE"
TORCH_DEFAULT: Final = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
UNUSED: Final = "SIGRTMAX"  # a signal that nobody sends


@contextlib.contextmanager
def drain_on_signals(drain: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Have SIGTERM and SIGUSR1 call ``drain`` with their name; torch's agent would end at once.

    A second SIGTERM, ``SAME_REQUEST_SECONDS`` or more after the first, raises torch's ``SignalException`` in the main
    thread. Outside the main thread this does nothing. A signal that is ignored, as ``nohup`` has SIGHUP ignored, stays
    ignored, by torch's agent too.

    Args:
        drain: begins the drain; called again for a repeated signal.
        clock: monotonic, in seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminated_at = math.inf  # when SIGTERM came first

    def on_signal(number: int, _frame: object) -> None:
        nonlocal terminated_at
        name, now = signal.Signals(number), clock()
        if name == signal.SIGTERM:
            if now - terminated_at > SAME_REQUEST_SECONDS:
                raise SignalException(f"Process {os.getpid()} got {name.name} a second time.", name)
            terminated_at = min(terminated_at, now)
        drain(name.name)

    names_before = torch_signals()
    ignored = {s.name for s in signal.Signals if signal.getsignal(s) is signal.SIG_IGN}
    for drain_signal in DRAIN_SIGNALS:
        if drain_signal.name in ignored:
            log.warning("%s was ignored at the start, so it does not drain this node.", drain_signal.name)
    # torch installs its handlers for the rest each time it starts workers, and complains if there are none.
    excluded = ignored | {s.name for s in DRAIN_SIGNALS}
    os.environ[TORCH_SIGNALS] = ",".join(n for n in names_before.split(",") if n.strip() not in excluded) or UNUSED
    try:
        with handling(DRAIN_SIGNALS, on_signal):
            yield
    finally:
        os.environ[TORCH_SIGNALS] = names_before


def torch_signals() -> str:
    """The signals that torch's agent is to handle, as its environment variable lists them."""
    return os.environ.get(TORCH_SIGNALS, TORCH_DEFAULT)
