"""RedisElasticAgent: torch's agent, plus what torch lacks."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing import get_all_start_methods, resource_tracker
from typing import Any, Final

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from redelastic.host import checks
from redelastic.host.gpu_memory import GpuMemory
from redelastic.host.gpus import assign
from redelastic.host.health_endpoint import HealthEndpoint
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Closed, Event, Failed, Launched, Log, Started
from redelastic.monitoring.live_logs import LiveLogs
from redelastic.monitoring.operator import local_user
from redelastic.monitoring.sentences import sentence
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.node import DrainedError, RunStoppedError
from redelastic.torch_errors import torch_errors
from redelastic.torch_internals import close_within, known_options, shut_down, watchdog_progress
from redelastic.workers.drains import Drains, watch_drain_file
from redelastic.workers.group import Workers
from redelastic.workers.hangs import Hangs
from redelastic.workers.logs import command_of
from redelastic.workers.processes import ProcessTree
from redelastic.workers.relays import RelayedLogs
from redelastic.workers.signals import TORCH_SIGNALS, drain_on_signals, torch_signals
from redelastic.workers.warm import WarmStart, require_preloadable

from .background import BackgroundReporter, repeat
from .limits import Admission, Budget, log_folder
from .monitor import NodeMonitor
from .options import AgentOptions
from .regrouping import RegroupingAgent, remove_torn_errors
from .training_time import Earlier, TrainingTime
from .trainjob import INTERVAL as TELL_INTERVAL
from .trainjob import TrainJob

log = logging.getLogger(__name__)

TEMPLATE_CHECK_INTERVAL: Final = 1.0  # between checks that the workers' template is alive, in seconds
LAST_REPORTS_TIMEOUT: Final = 2.0  # for the last reports to Redis, in seconds


class RedisElasticAgent(RegroupingAgent):
    """torch's agent, which also reports its node's state to Redis, drains, and detects hangs.

    Contract: as torch's ``LocalElasticAgent``, with the same arguments in the same places, and ``RunResult``. It does
    not control other nodes: each agent decides for itself, based on the run's state in Redis.

    Args:
        spec: with a :class:`RedisRendezvousHandler`.
        logs_specs: where the workers' output goes.
        start_method: how to start workers that are functions.
        exit_barrier_timeout: how long to wait for other nodes' workers to end, in seconds; None: for as long as the
            nodes live, or torch's ``TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT``.
        log_line_prefix_template: as torch's.
        shutdown_timeout: how long workers have between SIGTERM and SIGKILL, in seconds.
        health_check_server: torch's, which its maker has started; it is stopped when :meth:`run` ends, and no endpoint
            is started for torch's ``TORCHELASTIC_HEALTH_CHECK_PORT``.
        uninterruptible_state_timeout: as torch's, from 2.13 on: how long a worker may hang in the kernel, in seconds.
        options: the options that torch's agent lacks.
        owns_process: whether this process only runs this agent, so that any orphan that becomes its child belongs to
            the workers (:meth:`ProcessTree.adopt_orphans`).
        preflight: called before each rendezvous, while no worker runs: it measures this host where that is due.

    Raises:
        TypeError: the handler is of another type.
        ValueError: there are fewer GPUs than workers that need one each, or a GPU does not exist; or modules cannot be
            preloaded here; or there is no such start method.
        DriverError: the GPU driver does not answer, or fails.
    """

    def __init__(  # noqa: PLR0917 - torch's arguments
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        start_method: str = "spawn",
        exit_barrier_timeout: float | None = None,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30.0,
        health_check_server: HealthCheckServer | None = None,
        uninterruptible_state_timeout: float | None = None,
        *,
        options: AgentOptions | None = None,
        owns_process: bool = False,
        preflight: Callable[[], object] | None = None,
    ) -> None:
        handler = spec.rdzv_handler
        if not isinstance(handler, RedisRendezvousHandler):
            raise TypeError(f"RedisElasticAgent needs a RedisRendezvousHandler, not a {type(handler).__name__}.")
        if start_method not in get_all_start_methods():
            known = ", ".join(get_all_start_methods())
            raise ValueError(f"There is no start_method={start_method!r}, only {known}; name other options: options=….")
        self._options = options or AgentOptions()
        if self._options.preload:
            require_preloadable(spec, owns_process=owns_process)
        share, isolate = self._options.share_gpus, bool(spec.virtual_local_rank)
        self._assignment = assign(spec.local_world_size, share=share, isolate=isolate, environ=os.environ)
        if self._assignment.isolate and not spec.virtual_local_rank:
            log.warning(
                "Each worker sees its own GPU only, as device 0, and LOCAL_RANK is 0: see redelastic.host.gpus."
            )
            spec.virtual_local_rank = True
        super().__init__(
            spec,
            logs_specs,
            start_method,
            300.0,  # torch's own barrier, which is not used
            log_line_prefix_template,
            **known_options(
                LocalElasticAgent,
                shutdown_timeout=shutdown_timeout,
                uninterruptible_state_timeout=uninterruptible_state_timeout,
            ),
        )
        self._relayed = RelayedLogs(self._logs_specs)
        if not callable(spec.entrypoint):  # torch opens a function's output as a file that can seek
            self._logs_specs = self._relayed
        self._shutdown_timeout: float = shutdown_timeout  # type: ignore[assignment]  # torch declares an int
        if exit_barrier_timeout is not None:
            self._exit_limit = exit_barrier_timeout
        self._given_server = health_check_server  # kept from torch's agent, which stops it when it restarts workers
        self._torch_signals = torch_signals()
        self._tree: ProcessTree  # set by run()
        self._reporter = BackgroundReporter()
        self._warm: WarmStart | None = None
        self._owns_process = owns_process
        self._preflight = preflight
        self._node = handler.node
        self._control = RunControl(handler.backend.connection, handler.backend.keys)
        self._workers = Workers(0, AgentOptions(), 0.0, (), self._node.watch.notify)  # none is started yet
        self._drains: Drains  # of the round: set when its workers start
        self._admission = Admission(
            node=self._node,
            control=self._control,
            options=self._options,
            checked=checks.Node(log_folder(logs_specs), spec.local_world_size, self._options.health_timeout),
            note=self._note,
        )
        self._time = TrainingTime(self._node, self._control, self._reporter.send)
        self._monitor = NodeMonitor(
            self._node,
            self._worker_group,
            self._assignment.visible or self._assignment.gpus,
            self._admission,
            partial(watchdog_progress, self),
            control=self._control,
            training_time=self._time,
            live_logs=LiveLogs(handler.backend.connection, handler.backend.keys) if self._options.share_logs else None,
        )
        self._gpu_memory = GpuMemory(self._assignment.visible)
        self._budget = Budget(self._node, self._options, self._monitor.allow)
        self._hangs = Hangs(self._note)
        self._unfit = True  # whether this node must prove its fitness before it joins
        self._verdict: Event | None = None  # why the job may not restart its workers
        self._asked_to_drain = False
        self._has_noted_launch = False

    # -- from beginning to end

    @torch_errors()
    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; contract: torch's ``ElasticAgent.run``.

        This does not shut down the handler: that is its creator's job.

        Raises:
            DrainedError: this node was asked to leave, and its workers have ended.
            RunStoppedError: the run was stopped: by a person, or because its restart budget is used up.
            RefusedError: a health check failed.
            RendezvousError: as raised by :meth:`RedisRendezvousHandler.next_rendezvous`; or Redis refuses this node.
            SignalException: a signal ended this process' work; SIGTERM and SIGUSR1 do so only the second time.
        """
        with contextlib.ExitStack() as opened:
            self._tree = ProcessTree()
            opened.callback(self._end_tree)
            opened.callback(self._close_workers)
            if self._owns_process:
                if callable(self._worker_group.spec.entrypoint):
                    resource_tracker.ensure_running()  # as the agent's child, not a worker's
                self._tree.adopt_orphans()
            self._reporter.start()
            if self._options.preload:
                given = self._options.preload, self._fixed_environment, self._tree
                self._warm = WarmStart(self._worker_group.spec, *given, self._node.must_leave)
                opened.callback(self._warm.close)
                self._warm.prepare()
                opened.enter_context(repeat(self._warm.tend, TEMPLATE_CHECK_INTERVAL, "template"))
            opened.callback(self._reporter.close, LAST_REPORTS_TIMEOUT)
            port = self._options.port
            if self._given_server is not None:
                opened.callback(self._given_server.stop)
                port = self._options.health_port
            if port is not None:
                endpoint = HealthEndpoint(self._monitor, host=self._options.health_host, port=port)
                endpoint.start()
                opened.callback(endpoint.stop)
            interval = min(1.0, self._handler.settings.keep_alive_interval)
            drain = self._options.drain_file, self._options.drain_timeout, self._drain
            opened.enter_context(watch_drain_file(*drain, interval))
            if job := TrainJob.of_environment(os.environ):
                opened.enter_context(repeat(partial(self._tell, job), TELL_INTERVAL, "trainjob"))
            opened.enter_context(drain_on_signals(self._drain))
            opened.enter_context(self._monitor.watching(self._tree, self._pids, interval))
            try:
                return super().run(role)
            finally:
                self._monitor.allow(math.inf)

    def _tell(self, job: TrainJob) -> None:
        held = self._node.view.round
        if held and held.rank == 0:
            job.report(self._monitor.status())

    def _drain(self, reason: str, timeout: float | None = None) -> None:
        """Start draining this node at once; the first reason counts."""
        if not self._asked_to_drain:
            self._asked_to_drain = True
            timeout = self._options.drain_timeout if timeout is None else timeout
            self._node.watch.begin_drain(reason, timeout)
            self._reporter.send(lambda: self._node.drain(reason, timeout))

    # -- rounds

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._monitor.allow(math.inf)
        if self._preflight is not None:
            self._admission.wait_to_be_readmitted()
            self._preflight()
            self._admission.wait_to_be_readmitted()  # it may have been found to be an outlier
        if self._unfit:
            self._admission.require()
        if self._warm:  # joining interrupts the other nodes, so import first
            self._warm.await_template()
        super()._rendezvous(worker_group)
        self._unfit = False
        self._reporter.send(self._learn_restarts)

    def _learn_restarts(self) -> None:
        """Read the job's restarts from Redis, which counts the other nodes' too and may have refunded one."""
        self._monitor.job_restarts = self._control.restarts()

    def _end_tree(self) -> None:
        """Kill what a shutdown cut short by a signal has left; if this is cut short too, the reaper does it."""
        self._tree.stop(self._pids().values())
        self._tree.close()

    def _close_workers(self) -> None:
        self._workers.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._close_workers()
        pids = self._start_processes(worker_group)
        self._begin_round(worker_group, self._begin_time(worker_group))
        return pids

    def _begin_time(self, worker_group: WorkerGroup) -> Earlier:
        """Count the time of the workers from here on as the new round's."""
        return self._time.begin_round(self._workers, int(worker_group.group_rank or 0))

    def _start_processes(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Start the workers' processes; returns their pids by local rank."""
        spec = worker_group.spec
        self._gpu_memory.await_free(self._node.must_leave)
        given = spec.local_world_size, self._options, self._interval, self._workers.reporters, self._node.watch.notify
        self._workers = workers = Workers(*given)
        with self._tree.starting(), self._warm.starting() if self._warm else contextlib.nullcontext():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        workers.started(pids)
        self._tree.look(pids.values())  # so that the reaper knows the workers
        self._monitor.begin_group(workers)
        # torch ends the other workers when one has failed, and then reads what they have written
        close_within(self._pcontext, self._shutdown_timeout, remove_torn_errors)
        workers.blame.read_from(self._pcontext, self._relayed.relays)
        return pids

    def _begin_round(self, worker_group: WorkerGroup, earlier: Earlier) -> None:
        """Watch the run for this round's workers, which have started, or have survived the round before."""
        workers, rank, size = self._workers, int(worker_group.group_rank or 0), int(worker_group.group_world_size or 0)
        self._drains = Drains(
            self._node,
            workers,
            store=self._round_store,
            rank=rank,
            size=size,
            reporter=self._reporter,
            note=self._note,
        )
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        workers.begin_round(ranks)
        logs = {ranks[local_rank]: path for local_rank, path in workers.blame.logs.items()}
        self._note(Started(size=size, rank=rank, logs=logs, **earlier._asdict()))
        if rank == 0 and not self._has_noted_launch:
            self._has_noted_launch = True
            self._note(Launched(user=local_user(), command=command_of(worker_group.spec)))

    def _note(self, event: Event) -> None:
        """Record what happens on this node, both as an event of the run and as a torch event; returns at once."""
        spec, noted = self._worker_group.spec, replace(event, node=self._node.id)
        self._reporter.send(lambda: self._control.note(noted))
        torch_event = events.Event(
            f"redelastic.{event.event}",
            source=events.EventSource.AGENT,
            metadata={"run_id": self._node.run_id, "node": noted.node, "role": spec.role, "reason": sentence(noted)},
        )
        events.record(torch_event, spec.event_log_handler)

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        isolated = spec.virtual_local_rank and bool(self._assignment.gpus)
        super()._set_local_rank_env(worker_env, 0 if isolated else local_rank, spec)
        if isolated:
            self._assignment.isolate_worker(local_rank, worker_env)
        worker_env.update(self._fixed_environment)
        worker_env.update(self._workers.environment(local_rank))
        worker_env[TORCH_SIGNALS] = self._torch_signals

    @property
    def _fixed_environment(self) -> dict[str, str]:
        """The variables that the agent sets for every worker in every round."""
        # With it, a worker that crashes in C writes its Python stack to its log.
        return {**self._tree.environment, "PYTHONFAULTHANDLER": os.environ.get("PYTHONFAULTHANDLER", "1")}

    def _setup_healthcheck(self) -> None:
        """Do nothing: torch's health check serves nothing, and the agent's own endpoint is up from the start."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002  # torch's signature
        self._shutdown(timeout=self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """Send SIGTERM, then SIGKILL after ``timeout`` seconds: to the workers, then to their remaining processes."""
        timeout = self._shutdown_timeout if timeout is None else timeout
        self._end_workers(death_sig, timeout)
        self._end_left_behind(timeout)

    def _end_workers(self, death_sig: signal.Signals, timeout: float) -> None:
        self._monitor.allow(3 * timeout)
        self._hangs.explain(self._workers)
        shut_down(super()._shutdown, death_sig, timeout)

    def _end_left_behind(self, timeout: float) -> None:
        if ended := self._tree.stop(self._pids().values(), timeout):
            log.warning("Ended processes that the workers had left behind: %s.", ", ".join(map(str, ended)))

    def _pids(self) -> dict[int, int]:
        context = self._pcontext
        try:
            return dict(context.pids()) if context else {}
        except AssertionError:  # torch raises it before the workers are started
            return {}

    # -- the loop

    def _pause(self) -> float:
        # Workers that are functions end only after torch has polled their results, at its own interval.
        polls = callable(self._worker_group.spec.entrypoint)
        return min(self._interval if polls else self._workers.pause, self._drains.pause)

    def _check_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._act_on_requests()
        self._budget.await_cause(self._workers)  # before torch ends the workers that have not failed
        result = super()._check_workers(worker_group)
        blame = self._workers.blame
        if result.failures:
            if blame.cause is None:
                self._budget.await_cause(self._workers, result)
            blame.explain(result, self._monitor.worker_usage)
        if result.state == WorkerState.HEALTHY:
            group = worker_group.workers
            # A round that is over may have had its cause here: a worker that has raised, but takes long to end.
            raised = blame.find_raised(group) if self._node.view.nodes_waiting else None
            return raised or self._hangs.find(self._workers, group) or result
        if result.state == WorkerState.SUCCEEDED and not self._node.view.closed and self._ended_to_regroup():
            # A script may save and exit with 0 because of the request, its work unfinished. The draining node leaves,
            # or a new one comes, and all regroup; workers whose work is finished then exit at once.
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _ended_to_regroup(self) -> bool:
        return self._workers.signalled or self._drains.admits or self._may_still_drain()

    def _act_on_requests(self) -> None:
        """Act on requests: end if the run was stopped; have workers save; leave if this node drains."""
        # This turn of the loop may take long: torch ends the other workers, or the agent waits for a lease to expire.
        self._monitor.allow(self._shutdown_timeout + self._handler.settings.lease)
        if self._node.view.is_stopped:
            raise RunStoppedError(self._node.run_id, self._node.view.closing)
        self._drains.advance()

    def _exit_barrier(self) -> None:
        """Give processes that the ended workers have left, such as an upload, some time to finish."""
        self._tree.wait(self._pids().values(), time.monotonic() + self._shutdown_timeout, self._node.must_leave)

    # -- failures

    def _first_failure(self) -> float | None:
        return self._workers.first_failure

    def _may_restart(self, result: RunResult) -> bool:
        self._leave_if_drained()  # a signal to all processes may have ended them
        self._unfit = True
        self._verdict = self._budget.charge(self._workers, self.failure(result), final=False)
        # Not before it is known which worker failed first: of many logs only that worker's is sure to be sent.
        self._send_log(result)
        return super()._may_restart(result) and self._verdict is None and not self._node.view.closed

    def _leave_if_drained(self) -> None:
        for drain in self._node.view.drains:
            if drain.node == self._node.id:
                raise DrainedError(drain.node, self._node.run_id, drain.reason)

    def _wait_for_loss(self) -> bool:
        """Wait for a draining node too: this node's workers may fail because of it long before it leaves."""
        lost = super()._wait_for_loss()
        self._leave_if_drained()
        while not lost and self._may_still_drain():
            self._act_on_requests()
            self._node.watch.wait_for_news(self._interval)
            lost = self._node.view.member_lost
        return lost

    def _may_still_drain(self) -> bool:
        """Whether a draining node may yet leave or lose its lease; one that has had the time for both never will."""
        if not self._node.view.drains:
            return False
        self._drains.advance()  # the drains may be new to it
        return time.monotonic() < self._drains.end + self._shutdown_timeout + self._handler.settings.lease

    def _give_up(self, result: RunResult, *, lost: bool) -> None:
        # A lost node explains a failure, but not that the job makes no progress. No verdict now means that another node
        # has been lost or has left meanwhile.
        idle = isinstance(self._verdict, Closed) and self._verdict.cause == "progress"
        may_stop = idle or (self._verdict is not None and not lost)
        if may_stop and (verdict := self._budget.charge(self._workers, self.failure(result), final=True)):
            raise RunStoppedError(self._node.run_id, verdict)
        if self._node.view.closed and not lost:  # no round follows, so that this failure is the end
            self._remaining_restarts = 0

    def _send_log(self, result: RunResult) -> None:
        """Send Redis the last log lines of the worker that failed first on this node."""
        if not result.failures:
            return
        failed_at = self._first_failure() or time.monotonic()
        blame = self._workers.blame
        rank, failure = blame.first_of(result)
        node, path = self._node.id, blame.logs.get(failure.local_rank, "")
        last = blame.last_lines(failure.local_rank)

        def task() -> None:
            age_ms = round(1000 * max(0.0, time.monotonic() - failed_at))
            self._control.note(Log(node=node, rank=rank, age_ms=age_ms, path=path, lines=last))

        self._reporter.send(task)

    @property
    def last_step(self) -> int | None:
        """The highest step that the workers have reported, if this node is rank 0."""
        return self._time.last_step

    def failure(self, result: RunResult) -> Failed:
        """Describe the failure of the worker that failed first."""
        return self._workers.blame.failure(result, self._monitor.worker_usage)
