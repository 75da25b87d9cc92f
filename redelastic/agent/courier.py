"""Courier: tells Redis in the background what happens here, in order, so that no training waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousError

log = logging.getLogger(__name__)

# Its put() may be called by a signal's handler that interrupted a put().
_Errands = queue.SimpleQueue[Callable[[], object] | None]


class Courier:
    """Runs errands one after the other in a thread of its own; one that fails is logged, and not repeated."""

    def __init__(self) -> None:
        self._errands: _Errands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to run errands; again after :meth:`close` too, which may have left some to the thread of before."""
        self._errands = queue.SimpleQueue()
        self._thread = threading.Thread(target=_run, args=(self._errands,), name="redelastic-courier", daemon=True)
        self._thread.start()

    def send(self, errand: Callable[[], object]) -> None:
        """Have it run; returns at once."""
        self._errands.put(errand)

    def close(self, timeout: float) -> None:
        """Run what is left, for ``timeout`` seconds at most."""
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
