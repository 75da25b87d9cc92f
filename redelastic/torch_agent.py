"""What torch's agent is taught, so that the loss of a node costs the others nothing but the regrouping.

Plain torchrun makes its own agent, and leaves no other way in than to wrap three of its methods. They do what they did
for handlers that are not ours.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from .handler import RedisRendezvousHandler
from .store import RoundBrokenError

log = logging.getLogger(__name__)

Method = Callable[..., Any]


def teach() -> None:
    """Wrap the methods of torch's ``LocalElasticAgent``, once."""
    if not hasattr(LocalElasticAgent, "_redelastic_charged"):
        LocalElasticAgent._redelastic_charged = False  # type: ignore[attr-defined]  # noqa: SLF001
        for wrap in (_rendezvous, _monitor_workers, run):
            name = wrap.__name__
            setattr(LocalElasticAgent, name, functools.wraps(getattr(LocalElasticAgent, name))(wrap(name)))


def _rendezvous(name: str) -> Method:
    """Join the next round when this one breaks while roles are exchanged through its store.

    torch's agent has no answer to an error there: it would end, one node more lost for the death of another. And when
    workers failed because a node was lost, that is not one of their own failures: the restart is given back.
    """
    original: Method = getattr(LocalElasticAgent, name)

    def wrapped(self: Any, worker_group: WorkerGroup) -> None:
        handler = worker_group.spec.rdzv_handler
        if not isinstance(handler, RedisRendezvousHandler):
            original(self, worker_group)
            return
        lost, done = False, False
        while not done:
            try:
                original(self, worker_group)
                done = True
            except RoundBrokenError as e:
                log.warning("%s", e)
            lost = lost or handler.nodes_lost > 0
        if self._redelastic_charged and lost:
            self._remaining_restarts += 1
        self._redelastic_charged = False

    return wrapped


def _monitor_workers(name: str) -> Method:
    """Tell workers that failed because a node was lost from workers that failed by themselves.

    A lost node is known when its lease runs out; its peers' workers mostly fail before that. With no restart left the
    agent would end, and with it the job; so it waits for as long as a lease first.
    """
    original: Method = getattr(LocalElasticAgent, name)

    def wrapped(self: Any, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = original(self, worker_group)
        handler = worker_group.spec.rdzv_handler
        if result.state not in {WorkerState.FAILED, WorkerState.UNHEALTHY}:
            return result
        if self._remaining_restarts > 0:
            self._redelastic_charged = True
        elif isinstance(handler, RedisRendezvousHandler) and handler.wait_for_loss():
            return RunResult(state=WorkerState.HEALTHY)  # num_nodes_waiting() is above 0: the agent regroups
        return result

    return wrapped


def run(name: str) -> Method:
    """Let a spare end in peace when its run is closed: torch's agent returns nothing then, and its launcher fails."""
    original: Method = getattr(LocalElasticAgent, name)

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> RunResult | None:
        result: RunResult | None = original(self, *args, **kwargs)
        ours = isinstance(self.get_worker_group().spec.rdzv_handler, RedisRendezvousHandler)
        return RunResult(state=WorkerState.SUCCEEDED) if result is None and ours else result

    return wrapped
