"""Notes: records what happens on this node, both as an event of the run and as a torch event."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import WorkerSpec

from redelastic.rendezvous.membership import Membership
from redelastic.run.control import RunControl


class Notes:
    """Records events for people to read; returns at once.

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
