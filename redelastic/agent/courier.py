"""Courier: tells Redis in the background what happens here, in order, so that no training waits for it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from torch.distributed import DistNetworkError
from torch.distributed.elastic.rendezvous.api import RendezvousError

log = logging.getLogger(__name__)


class Courier:
    """Runs errands one after the other in a thread of its own; one that fails is logged, and not repeated."""

    def __init__(self) -> None:
        # Its put() may be called by a signal handler that interrupted a put().
        self._errands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="redelastic-courier", daemon=True)
        self._thread.start()

    def send(self, errand: Callable[[], object]) -> None:
        """Have it run; returns at once."""
        self._errands.put(errand)

    def close(self, timeout: float) -> None:
        """Run what is left, for ``timeout`` seconds at most."""
        self._errands.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        while (errand := self._errands.get()) is not None:
            try:
                errand()
            except (RendezvousError, DistNetworkError) as e:  # noqa: PERF203  # the next may succeed
                log.warning("%s", e)
            except Exception:
                log.exception("The agent could not tell Redis what happened.")
