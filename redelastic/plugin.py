"""The torchrun plug-in: what the entry-point group ``torchrun.handlers`` names ``redis``.

torch loads it while its elastic package is being imported, so nothing of torch is imported before a handler is made.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
    from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousParameters

log = logging.getLogger(__name__)


def handler() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """Return the creator of handlers, the same at each call, as torch's registry demands."""
    return create


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that torchrun asks for; see :func:`redelastic.handler.handler_from_parameters`."""
    from torch.distributed.elastic.agent.server.api import SimpleElasticAgent

    from .handler import handler_from_parameters

    regroup_when_broken(SimpleElasticAgent)  # type: ignore[type-abstract]
    return handler_from_parameters(params)


def regroup_when_broken(agent: type[SimpleElasticAgent]) -> None:
    """Let torch's agent join the next round when this one breaks while it exchanges roles through the round's store.

    torch's agent has no answer to an error there: it would end, one node more lost for the death of another.
    """
    from .store import RoundBrokenError

    original = agent._rendezvous  # noqa: SLF001
    if hasattr(original, "__redelastic__"):
        return

    @functools.wraps(original)
    def _rendezvous(self: SimpleElasticAgent, worker_group: WorkerGroup) -> None:
        while True:
            try:
                original(self, worker_group)
            except RoundBrokenError as e:  # noqa: PERF203
                log.warning("%s", e)
            else:
                return

    _rendezvous.__redelastic__ = True  # type: ignore[attr-defined]
    agent._rendezvous = _rendezvous  # type: ignore[method-assign]  # noqa: SLF001
