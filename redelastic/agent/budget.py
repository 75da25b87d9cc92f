"""Budget: the job's restarts, to which this node's failures are charged."""

from __future__ import annotations

import logging
import math
import time

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from redelastic.rendezvous.membership import Membership

from .monitor import NodeMonitor
from .options import AgentOptions

log = logging.getLogger(__name__)


class Budget:
    """The job's restart budget, as one of its nodes draws on it.

    Args:
        membership: of this node.
        monitor: knows the workers, and reports the number of restarts.
        options: the limits.
    """

    def __init__(self, membership: Membership, monitor: NodeMonitor, options: AgentOptions) -> None:
        self._membership, self._monitor, self._options = membership, monitor, options

    def charge(self, result: RunResult, *, final: bool) -> str:
        """Count a failure of this node's workers; returns why the job may not go on, or "".

        Args:
            result: of the workers.
            final: whether to stop the run if no restart is left; otherwise this only says so.
        """
        workers = self._monitor.workers
        failed_at = (workers.first_failure if workers else None) or time.monotonic()
        step = workers.highest_step if workers else -1
        cause = self.cause(result)
        if not final:
            log.error("%s.", cause)
        self._monitor.allow(math.inf)  # for as long as Redis is away
        try:
            told = self._membership.charge(failed_at, step, cause, self._options.limits, final=final)
        except RendezvousConnectionError as e:
            log.warning("The failure could not be counted: %s", e)
            return ""
        self._monitor.job_restarts, _, verdict = told
        return verdict

    def cause(self, result: RunResult) -> str:
        """What happened to the worker that failed first, in words."""
        workers = self._monitor.workers
        return workers.cause(result, self._monitor.worker_usage) if workers else result.state.name
