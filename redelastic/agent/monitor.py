"""NodeMonitor: a node's usage and health, for its heartbeat and its HTTP endpoint."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerState

from redelastic.host.gpu_usage import GpuUsage
from redelastic.host.gpus import Gpu, why_hidden
from redelastic.host.telemetry import Telemetry, bounded, trees
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.curves import MINUTE, measured
from redelastic.monitoring.live_logs import INTERVAL as LOG_INTERVAL
from redelastic.monitoring.live_logs import LiveLog, LiveLogs
from redelastic.redis.errors import CorruptStateError, UnavailableError
from redelastic.rendezvous.node import Node
from redelastic.workers.group import Workers
from redelastic.workers.processes import ProcessTree

from .background import repeat
from .limits import Admission
from .training_time import TrainingTime

log = logging.getLogger(__name__)

STEPS_INTERVAL: Final = 0.1  # between looks for a first step that is still to come, in seconds
NVML_TIMEOUT: Final = 10.0  # how long NVML's last answer is reported if no other follows, in seconds
STALL_TIMEOUT: Final = 30.0  # how late the agent's loop may be before it counts as dead, in seconds
WATCHDOG_TIMEOUT: Final = 60.0  # how old the last look at torch's file timers may be, in seconds; as in torch's agent


class NodeMonitor:
    """Observes one node and describes it; contract: ``host.health_endpoint.NodeView``.

    Args:
        node: this one; the monitor extends the status in its heartbeat.
        group: torch's group of workers, to describe.
        gpus: to watch.
        admission: knows whether this node is kept out.
        watchdog_progress: when torch's file timers were last looked at, by ``time.time``; None if there are none.
        control: of the node's run.
        training_time: to keep up to date.
        live_logs: requests for logs, to answer; None if the run's logs are not shared.

    Attributes:
        job_restarts: how often the whole job has been restarted.
    """

    def __init__(
        self,
        node: Node,
        group: WorkerGroup,
        gpus: Sequence[Gpu],
        admission: Admission,
        watchdog_progress: Callable[[], float | None],
        *,
        control: RunControl,
        training_time: TrainingTime,
        live_logs: LiveLogs | None = None,
    ) -> None:
        self._node, self._control, self._group, self._admission = node, control, group, admission
        self._watchdog_progress, self._time, self._live_logs = watchdog_progress, training_time, live_logs
        # Each has a thread of its own: NVML may not answer for minutes, and the reaper must learn of new processes.
        self._processes, self._gpus = Telemetry(), GpuUsage(gpus)
        self._watches_gpus = bool(gpus)
        self._usage: dict[str, Any] = {}  # of the processes: the newest sample
        self._gpu_usage: dict[str, Any] = {}
        self._nvml_answered_at = math.inf
        self._gpus_hidden = why_hidden()
        self._workers: Workers | None = None
        self.job_restarts = 0
        self._starts = 0
        self._due_by = math.inf  # when the agent's loop must have begun its next turn, on the monotonic clock

    # -- what the agent says

    def begin_group(self, workers: Workers) -> None:
        """This node's workers were started."""
        self._workers = workers
        self._starts += 1

    def allow(self, seconds: float) -> None:
        """Expect the loop's next turn within ``seconds``; ``STALL_TIMEOUT`` later the loop counts as dead."""
        self._due_by = time.monotonic() + STALL_TIMEOUT + seconds

    # -- observing

    @contextlib.contextmanager
    def watching(self, tree: ProcessTree, pids: Callable[[], dict[int, int]], interval: float) -> Iterator[None]:
        """Observe the node while the block runs, and report what is seen in its heartbeat.

        Args:
            tree: of the workers.
            pids: of the workers now, by local rank.
            interval: in seconds.
        """

        def sample_processes() -> None:
            now = pids()
            self._time.look()
            self._usage = self._processes.sample(trees(tree.look(now.values()), now))
            self._forget_silent_gpus()

        with contextlib.ExitStack() as opened:
            self._node.describe, self._node.have_parked = self._describe, self._have_parked
            opened.callback(self._node.forget_workers)
            opened.enter_context(repeat(sample_processes, interval, "processes"))
            opened.enter_context(repeat(partial(self._time.await_step, timeout=1.0), STEPS_INTERVAL, "steps"))
            if self._watches_gpus:
                self._nvml_answered_at = time.monotonic()
                opened.enter_context(repeat(self._sample_gpus, interval, "gpus"))
            # Each at least once in a minute, and not all nodes in the same second
            opened.enter_context(repeat(self._add_to_curves, MINUTE * random.uniform(0.8, 0.95), "curves"))
            if self._live_logs:
                opened.enter_context(repeat(partial(self._answer, self._live_logs), LOG_INTERVAL, "live-log"))
            opened.callback(self._time.look)  # the workers' last steps
            yield

    def _add_to_curves(self) -> None:
        if values := measured(self._extended(self._node.status())):
            with contextlib.suppress(UnavailableError, CorruptStateError):
                self._control.measure(values)

    def _answer(self, live_logs: LiveLogs) -> None:
        with contextlib.suppress(UnavailableError, CorruptStateError):
            local_rank = live_logs.wanted(self._node.id)
            if local_rank is not None and self._workers:
                blame = self._workers.blame
                lines = blame.last_lines(local_rank)
                live_logs.answer(self._node.id, LiveLog(local_rank, blame.logs.get(local_rank, ""), lines))

    def _sample_gpus(self) -> None:
        sampled = self._gpus.sample()
        self._gpu_usage = {"gpus": sampled} if sampled else {}
        self._nvml_answered_at = time.monotonic()

    def _forget_silent_gpus(self) -> None:
        silent = time.monotonic() - self._nvml_answered_at
        if silent > NVML_TIMEOUT:
            log.warning("NVML has not answered for %.0f s: this node does not report its GPUs until it does.", silent)
            self._gpu_usage, self._nvml_answered_at = {}, math.inf  # warn once

    # -- describing

    def _have_parked(self) -> bool:
        return self._workers is not None and self._workers.have_parked

    @property
    def worker_usage(self) -> Mapping[str, Any]:
        """The usage of each worker at the last sample, by local rank as a string."""
        usage: Mapping[str, Any] = self._usage.get("workers", {})
        return usage

    def status(self) -> dict[str, Any]:
        """The status in this node's heartbeat, with the run's and the node's id and the times for ``/metrics``."""
        node = self._node
        identity = {"run_id": node.run_id, "node": node.id, "redis_away": node.watch.away}
        return {**identity, **self._time.fields(), **self._extended(node.status())}

    def stalled(self) -> str:
        """Why the agent's loop counts as dead; empty while it is alive."""
        if (late := time.monotonic() - self._due_by) > 0:
            return f"the agent's loop is {late:.0f} s late"
        looked_at = self._watchdog_progress()
        if looked_at is not None and (age := time.time() - looked_at) > WATCHDOG_TIMEOUT:
            return f"torch's file timers have not been looked at for {age:.0f} s"
        return ""

    def unready(self) -> str:
        """Why no workers run in a round; empty while they do."""
        state = {**self._node.status(), **self._own_state()}["state"]
        if state != "running":
            return f"the node is {state}"
        return "" if self._group.state == WorkerState.HEALTHY else "the workers are not running"

    def _describe(self, base: dict[str, Any]) -> str:
        """The status for a heartbeat, as JSON; never raises."""
        try:
            return bounded(self._extended(base))
        except Exception:
            log.exception("The node's status could not be reported.")
            return json.dumps(base)

    def _extended(self, base: Mapping[str, Any]) -> dict[str, Any]:
        usage, workers = dict(self._usage), self._workers
        each = usage.pop("workers", {})
        status = {**base, **self._own_state(), "agent": "redelastic"}
        status |= {"shares_logs": True} if self._live_logs else {}
        status |= {"gpus_hidden": self._gpus_hidden} if self._gpus_hidden else {}
        status |= {"restarts": max(0, self._starts - 1), "job_restarts": self.job_restarts, **usage, **self._gpu_usage}
        described = [workers.describe(worker) for worker in self._group.workers] if workers and workers.pids else []
        return {**status, "workers": [{**one, **each.get(str(one["local_rank"]), {})} for one in described]}

    def _own_state(self) -> dict[str, str]:
        """The state that the node's status shows instead of running or waiting."""
        draining = any(drain.node == self._node.id for drain in self._node.view.drains)
        return {"state": "barred"} if self._admission.barred else {"state": "draining"} if draining else {}
