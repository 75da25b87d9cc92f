"""Courier: reports to Redis in the background, in order, so that training never waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousError

log = logging.getLogger(__name__)

# A SimpleQueue: a signal handler that interrupts put() may itself call it.
_Errands = queue.SimpleQueue[Callable[[], object] | None]


class Courier:
    """Runs errands one by one in its own thread; one that fails is logged, and not retried."""

    def __init__(self) -> None:
        self._errands: _Errands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start running errands, even after :meth:`close`, which may have left some to the previous thread."""
        self._errands = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._errands,), name="redelastic-courier", daemon=True)
        self._thread.start()

    def send(self, errand: Callable[[], object]) -> None:
        """Queue an errand; returns at once."""
        self._errands.put(errand)

    def close(self, timeout: float) -> None:
        """Run what is left, for at most ``timeout`` seconds."""
        self._errands.put(None)
        if self._thread is not None:
            self._thread.join(timeout)


def _run(errands: _Errands) -> None:
    while (errand := errands.get()) is not None:
        try:
            errand()
        except (RendezvousError, DistNetworkError) as e:  # noqa: PERF203  # the next may succeed
            log.warning("%s", e)
        except Exception:
            log.exception("The agent could not report to Redis.")
