"""Limits: whether this node may join its run, and whether the job has a restart left."""

from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.host import checks
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Barred, Event, Failed, Left, Refused
from redelastic.monitoring.sentences import consecutive_failures, worker_failure
from redelastic.redis.errors import RedelasticError, UnavailableError, UnreachableError
from redelastic.rendezvous.node import News, Node
from redelastic.workers.group import Workers

from .options import AgentOptions

log = logging.getLogger(__name__)

CAUSE_TIMEOUT: Final = 10.0  # for a failure of another node that explains this node's, in seconds


def log_folder(logs_specs: LogsSpecs) -> Path:
    """The folder of the workers' logs, as far as it is known before the workers start."""
    known = str(logs_specs.root_log_dir)
    return Path(tempfile.gettempdir() if known in {os.devnull, "None"} else known)


class RefusedError(RendezvousError):
    """A health check found this node unfit to join."""


class Admission:
    """Guards each rendezvous of a node that must prove its fitness.

    Args:
        node: this one.
        control: of its run.
        options: which checks to run, and after how many failed rounds to keep a host out.
        checked: what the checks look at.
        note: records an event of this node.

    Attributes:
        barred: whether this node is waiting to be readmitted.
    """

    def __init__(
        self,
        *,
        node: Node,
        control: RunControl,
        options: AgentOptions,
        checked: checks.Node,
        note: Callable[[Event], None],
    ) -> None:
        self._node, self._control = node, control
        self._options, self._checked, self._note = options, checked, note
        self.barred = False

    def require(self) -> None:
        """Wait until this node may join.

        Raises:
            RefusedError: a health check failed.
            DrainedError, RendezvousClosedError, UnavailableError: as :meth:`Node.wait_while`; or Redis
                refuses to say whether this host is excluded.
        """
        self.wait_to_be_readmitted()
        options, must_leave = self._options, self._node.must_leave
        if unfit := checks.run_checks(options.health_checks, options.health_command, self._checked, must_leave):
            refused = RefusedError(f"This node does not join run {self._node.run_id!r}: {unfit}.")
            self._note(Refused(reason=unfit))
            try:
                self._node.leave(Left(cause="refused", reason=unfit))
            except RedelasticError as e:  # the node is out once its lease expires
                raise refused from e
            raise refused

    def wait_to_be_readmitted(self) -> None:
        """Wait while this host is excluded; raises as :meth:`require`."""
        limit = self._options.failed_rounds_limit
        if limit is None:
            return
        try:
            failures = self._control.failures(self._node.settings.node_name)
        except UnreachableError:
            return  # joining waits for Redis
        if failures < limit:
            return
        reason = consecutive_failures(failures)
        self._note(Barred(failures=failures))
        log.error(
            "This host is excluded from run %r because %s: `redelastic readmit %s %s` readmits it.",
            *(self._node.run_id, reason, self._node.run_id, self._node.settings.node_name),
        )
        self._node.leave(Left(cause="barred", reason=reason))
        self.barred = True
        self._node.wait_while(lambda: self._control.failures(self._node.settings.node_name) >= limit)
        self.barred = False


class Budget:
    """The job's restart budget, as one of its nodes draws on it.

    Args:
        node: this one.
        options: the limits.
        allow: expects the agent's loop to take so long, in seconds.
    """

    def __init__(self, node: Node, options: AgentOptions, allow: Callable[[float], None]) -> None:
        self._node, self._options, self._allow = node, options, allow
        self._has_news = False  # whether workers of this node have ever reported progress

    def charge(self, workers: Workers, failure: Failed, *, final: bool) -> Event | None:
        """Count a failure of this node's workers.

        Args:
            workers: that failed.
            failure: of the one that failed first.
            final: whether to stop the run if no restart is left; otherwise the reply only says so.

        Returns:
            Why the job may not go on; None if it may, or if the failure could not be counted.
        """
        if not final:
            log.error("%s.", worker_failure(failure))
        failed_at = workers.first_failure or time.monotonic()
        if workers.progress_at is not None:
            failure = replace(failure, idle_before_ms=round(1000 * max(0.0, failed_at - workers.progress_at)))
        step, news = workers.highest_step, workers.news
        self._has_news = self._has_news or news > News.NONE or bool(workers.reporters)
        news = news if self._has_news else News.NEVER_ANY
        self._allow(math.inf)  # for as long as Redis is away
        try:
            return self._node.charge(failed_at, step, news, failure, self._options.limits, final=final).verdict
        except UnavailableError as e:
            log.warning("The failure could not be counted: %s", e)
            return None

    def await_cause(self, workers: Workers, result: RunResult | None = None) -> None:
        """Wait, once workers have failed because of a peer, until it has failed: it may take longer to end.

        The peer may be another worker of this node, or a worker of another node, which then reports the failure.

        Args:
            workers: of this node.
            result: as for :meth:`Blame.find_cause`.
        """
        if not workers.blame.find_cause(result):
            return
        held, until = self._node.view.round, time.monotonic() + CAUSE_TIMEOUT
        self._allow(CAUSE_TIMEOUT)
        log.info("A peer is the cause: waiting up to %g s for its failure.", CAUSE_TIMEOUT)
        while workers.blame.find_cause(result) and (left := until - time.monotonic()) > 0:
            view = self._node.view
            is_alone = (held is None or held.size == 1) and (result or all(map(workers.ended, workers.pids)))
            if is_alone or view.nodes_waiting or view.member_lost or view.closed or view.drains:
                break
            self._node.watch.wait_for_news(left)
        if workers.blame.find_cause(result):
            workers.blame.follow_a_peer()
