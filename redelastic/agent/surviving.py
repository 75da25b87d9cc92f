"""SurvivingAgent: the agent, except that its workers live on from one round to the next."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousGracefulExitError

from redelastic.monitoring.events import Failed, Left
from redelastic.redis.errors import RedelasticError
from redelastic.rendezvous.addresses import INTERFACE_VARIABLES
from redelastic.rendezvous.handler import DETECTION, EPOCH_VARIABLE, PREFIX_VARIABLE
from redelastic.rendezvous.node import RunStoppedError
from redelastic.torch_internals import starting_no_processes
from redelastic.workers.blame import failed_alive
from redelastic.workers.channels import Parked

from .agent import RedisElasticAgent

log = logging.getLogger(__name__)

ROUND_VARIABLES: Final = (EPOCH_VARIABLE, PREFIX_VARIABLE, *INTERFACE_VARIABLES)  # that the handler sets for a round
# After an error, the watchdog of torch's NCCL groups would write what the flight recorder holds (the agent asks for it
# itself), for a minute let no thread call a collective or destroy the group, and end the process.
NCCL_VARIABLES: Final = (
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
)
LONG_WAIT: Final = 60.0  # after which the log says what the agent waits for, in seconds


class SurvivingAgent(RedisElasticAgent):
    """An agent whose workers' script calls :func:`redelastic.survive`.

    The workers' processes are started before this node joins a round, so that it joins when they can begin at once.
    When a round ends, the workers leave it, and the agent joins the next one with the same processes. It starts them
    anew if one of them has ended, or does not leave within ``park_timeout``.
    """

    _called_roll_in = 0  # epoch of the last round in which workers left by themselves

    # -- rounds

    def _initialize_workers(self, worker_group: WorkerGroup) -> None:
        if not self._workers.pids:
            self._start_ahead(worker_group)
        super()._initialize_workers(worker_group)

    def _start_ahead(self, worker_group: WorkerGroup) -> None:
        """Start the workers' processes before their round is known, and wait until they can enter one."""
        spec = worker_group.spec
        worker_group.workers = [Worker(local_rank) for local_rank in range(spec.local_world_size)]
        unknown: Any = worker_group  # torch declares None for what the round will bring
        unknown.store, unknown.master_addr, unknown.master_port = object(), "", 0
        self._close_workers()
        self._start_processes(worker_group)
        self._await_ready()

    def _await_ready(self) -> None:
        """Wait until all workers are ready, one has ended, or this node is to leave."""
        warn_at = time.monotonic() + LONG_WAIT
        workers = self._workers
        while workers.pids.keys() - workers.parked.keys():
            if self._node.must_leave() or any(map(workers.ended, workers.pids)):
                return
            if time.monotonic() > warn_at:
                warn_at = math.inf
                log.warning("The workers have not called redelastic.survive() yet; this node joins when they have.")
            self._node.watch.wait_for_news(workers.pause)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Have the workers enter the round; torch's agent computes their environments as for new processes."""
        earlier = self._begin_time(worker_group)  # before the workers make a step of the round
        with starting_no_processes(self._send_rounds):
            pids: dict[int, Any] = LocalElasticAgent._start_workers(self, worker_group)  # noqa: SLF001
        self._begin_round(worker_group, earlier)
        return pids

    def _send_rounds(self, environments: dict[int, dict[str, str]]) -> Any:
        of_round = {name: os.environ[name] for name in ROUND_VARIABLES if name in os.environ}
        for local_rank, environment in environments.items():
            if channels := self._workers.channels:
                names = environment.keys() - channels.environment(local_rank).keys()
                channels.send_round(local_rank, of_round | {name: environment[name] for name in names})
        return self._pcontext

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        super()._set_local_rank_env(worker_env, local_rank, spec)
        worker_env |= {name: "0" for name in NCCL_VARIABLES if name not in os.environ}

    def _setup_local_watchdog(self, envs: dict[int, dict[str, str]]) -> None:
        if self._worker_watchdog is None:  # it watches the processes, which stay
            super()._setup_local_watchdog(envs)

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Have the workers leave the round, and enter the next one; or else start them anew.

        In the second case this node leaves the run once they have ended, and until new ones are ready: the other nodes
        wait for nothing else.

        Raises:
            RendezvousGracefulExitError: the other nodes have finished meanwhile.
        """
        if self._park():
            worker_group.state = WorkerState.STOPPED
            self._initialize_workers(worker_group)
            return
        self._end_workers(signal.SIGTERM, self._shutdown_timeout)
        with contextlib.suppress(RedelasticError):  # it is out once its lease expires
            self._node.leave(Left(cause="restarts"), timeout=self._handler.settings.lease)
        self._end_left_behind(self._shutdown_timeout)
        worker_group.state = WorkerState.STOPPED
        try:
            self._start_ahead(worker_group)
            self._initialize_workers(worker_group)
        except RunStoppedError:
            raise
        except RendezvousClosedError as e:
            raise RendezvousGracefulExitError(str(e)) from e

    def _park(self) -> bool:
        """Have all workers leave the round; returns whether all have, within the time that they have for it."""
        channels, workers, epoch = self._workers.channels, self._workers, self._node.view.epoch_held
        if channels is None:
            return False
        self._hangs.explain(workers)
        channels.abort(epoch)
        deadline = time.monotonic() + self._options.park_timeout
        while missing := workers.pids.keys() - workers.parked.keys():
            if any(map(workers.ended, workers.pids)):
                return False
            if time.monotonic() > deadline:
                log.warning(
                    "Local rank %s has not left round %s within %g s: this node's workers start anew.",
                    *(", ".join(map(str, sorted(missing))), epoch, self._options.park_timeout),
                )
                return False
            self._node.watch.wait_for_news(min(workers.pause, max(0.0, deadline - time.monotonic())))
        return not any(map(workers.ended, workers.pids))

    # -- failures

    def _check_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Check the workers; the ones that left the round by themselves have failed, unless the round is broken.

        A worker leaves by itself when a collective fails. If a node is lost or leaves, it is known within a lease. If
        none is, the collective failed for a reason of its own, and may fail for ever.
        """
        result = super()._check_workers(worker_group)
        left = self._left_by_themselves()
        if result.state != WorkerState.HEALTHY or not left or self._handler.num_nodes_waiting():
            return result
        first = min(left.values(), key=lambda parked: parked.at)
        if self._called_roll_in != self._node.view.epoch_held:
            self._called_roll_in = self._node.view.epoch_held
            self._node.call_roll(first.at)
        if time.monotonic() - first.at <= self._handler.settings.lease + DETECTION:
            return result
        workers = worker_group.workers
        result = failed_alive({workers[rank]: Failed(message=parked.why) for rank, parked in left.items()})
        self._budget.await_cause(self._workers, result)
        return result

    def _left_by_themselves(self) -> dict[int, Parked]:
        return {rank: one for rank, one in dict(self._workers.parked).items() if not one.paused}

    def _ended_to_regroup(self) -> bool:
        """Workers end with 0 when all have finished; for a request they pause, unless the script handles its signal."""
        return self._workers.signalled
