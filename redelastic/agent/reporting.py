"""Reports to Redis in the background, in order, so that training never waits for them: a courier, and its notes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from torch.distributed import DistNetworkError
from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.rendezvous.membership import Membership
from redelastic.run.control import RunControl

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


class Notes:
    """Records what happens on this node, both as an event of the run and as a torch event; returns at once.

    Args:
        membership: of this node.
        control: of its run.
        spec: torch's, which says where its events go.
        send: runs a function in the background.
    """

    def __init__(
        self,
        membership: Membership,
        control: RunControl,
        spec: WorkerSpec,
        send: Callable[[Callable[[], object]], None],
    ) -> None:
        self._membership, self._control, self._spec, self._send = membership, control, spec, send

    def __call__(self, event: str, reason: str, detail: str = "") -> None:
        """Record an event, its reason, and details such as stacks."""
        node = self._membership.node
        self._send(lambda: self._control.note(event, node, reason, detail))
        metadata = {"run_id": self._membership.run_id, "node": node, "role": self._spec.role, "reason": reason}
        told = events.Event(f"redelastic.{event}", source=events.EventSource.AGENT, metadata={**metadata})
        events.record(told, self._spec.event_log_handler)
