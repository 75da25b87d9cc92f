"""RedisElasticAgent: torch's agent, and what torch lacks."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic import events
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousError

from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.membership import DrainedError, RunStoppedError
from redelastic.run.control import RunControl
from redelastic.run.logs import failure_text, places_text
from redelastic.store import RedisStore
from redelastic.torch_internals import shut_down, shutdown_option

from .courier import Courier
from .host.checks import Node, run_checks
from .host.gpus import assign, why_hidden
from .host.health_endpoint import HealthEndpoint
from .host.telemetry import Telemetry, bounded, trees
from .options import AgentOptions
from .torchrun.exit_barrier import wait_for_others
from .torchrun.regrouping import RegroupingAgent
from .training_time import TrainingTime
from .workers.drains import Drains
from .workers.group import Workers
from .workers.logs import log_files, tail
from .workers.processes import ProcessTree
from .workers.signals import TORCH_SIGNALS, drain_on_signals, torch_signals

log = logging.getLogger(__name__)

STALL: Final = 30.0  # the agent's loop is dead when it comes round so many seconds later than it is due
FAREWELL: Final = 2.0  # for what Redis is still to be told at the end, in seconds


class RefusedError(RendezvousError):
    """A health check found this node unfit to join."""


class RedisElasticAgent(RegroupingAgent):
    """An agent whose node tells Redis how it is, and that ends as softly as it can.

    Contract: torch's ``LocalElasticAgent``, whose arguments it takes, and whose ``RunResult`` it returns. It has no say
    over other nodes: each agent decides by itself, from what Redis tells it.

    Args:
        spec: with a :class:`RedisRendezvousHandler`.
        logs_specs: where the workers' output goes.
        options: what torch's agent does not have.
        start_method: of workers that are functions.
        exit_barrier_timeout: how long to wait for other nodes whose workers end later, in seconds.
        log_line_prefix_template: as torch's.
        shutdown_timeout: between SIGTERM and SIGKILL to workers, in seconds.
        owns_process: whether this process does nothing but to run this agent, so that whatever processes become its
            children are the workers' (:meth:`ProcessTree.adopt_orphans`).

    Raises:
        TypeError: another handler.
        ValueError: more workers than GPUs, or a GPU that does not exist.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        options: AgentOptions | None = None,
        *,
        start_method: str = "spawn",
        exit_barrier_timeout: float = 300.0,
        log_line_prefix_template: str | None = None,
        shutdown_timeout: float = 30.0,
        owns_process: bool = False,
    ) -> None:
        handler = spec.rdzv_handler
        if not isinstance(handler, RedisRendezvousHandler):
            raise TypeError(f"RedisElasticAgent needs a RedisRendezvousHandler, not a {type(handler).__name__}.")
        self._options = options or AgentOptions()
        self._assignment = assign(spec.local_world_size, share=self._options.share_gpus, environ=os.environ)
        if self._assignment.isolate and not spec.virtual_local_rank:
            log.warning(
                "Each worker sees its own GPU only, as device 0, and LOCAL_RANK is 0: see redelastic.agent.host.gpus."
            )
            spec.virtual_local_rank = True
        super().__init__(
            spec,
            logs_specs,
            start_method,
            exit_barrier_timeout,
            log_line_prefix_template,
            **shutdown_option(LocalElasticAgent, shutdown_timeout),
        )
        self._shutdown_timeout: float = shutdown_timeout  # type: ignore[assignment]  # torch has whole seconds
        self._torch_signals = torch_signals()
        self._tree: ProcessTree  # from run() on, as is
        self._courier: Courier
        self._owns_process = owns_process
        self._rendezvous_handler = handler
        self._membership = handler.membership
        self._control = RunControl(handler.backend.connection, handler.backend.keys)
        self._workers: Workers | None = None
        self._drains: Drains | None = None
        self._usage: dict[str, Any] = {}  # the newest sample
        self._time = TrainingTime()
        self._gpus_hidden = why_hidden()
        self._logs: dict[int, str] = {}  # of the workers, by local rank
        self._job_restarts = 0
        self._verdict = ""  # why the job may not restart its workers
        self._unfit = True  # whether this node has to prove its health before it joins
        self._due_by = math.inf  # when the loop has to come round, on the monotonic clock
        self._barred = False  # whether this node waits to be readmitted
        self._asked_to_drain = False

    # -- from beginning to end

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; contract: torch's ``ElasticAgent.run``.

        The handler is not shut down: that is for who made it.

        Raises:
            DrainedError: this node was asked to leave, and its workers have ended.
            RunStoppedError: the run was stopped: by somebody, or because its budget of restarts is used up.
            RefusedError: a health check failed.
            RendezvousError: as :meth:`RedisRendezvousHandler.next_rendezvous` raises them.
            SignalException: a signal ended this process' work; SIGTERM and SIGUSR1 do so at the second time only.
        """
        with contextlib.ExitStack() as opened:
            self._tree, self._courier = ProcessTree(), Courier()
            opened.callback(self._end_tree)
            opened.callback(self._close_workers)
            if self._owns_process:
                if callable(self._worker_group.spec.entrypoint):
                    resource_tracker.ensure_running()  # a child of ours that is not the workers'
                self._tree.adopt_orphans()
            opened.callback(self._courier.close, FAREWELL)
            if (port := self._options.port) is not None:
                endpoint = HealthEndpoint(self, host=self._options.health_host, port=port)
                endpoint.start()
                opened.callback(endpoint.stop)
            ended = threading.Event()
            opened.callback(ended.set)
            threading.Thread(target=self._observe, args=(ended,), name="redelastic-telemetry", daemon=True).start()
            opened.enter_context(drain_on_signals(self._drain))
            self._membership.heartbeat.describe = self._describe
            opened.callback(setattr, self._membership.heartbeat, "describe", json.dumps)
            try:
                return super().run(role)
            finally:
                self._due_by = math.inf

    def _drain(self, reason: str, timeout: float | None = None) -> None:
        """Have this node drain, at once; the first reason counts."""
        if not self._asked_to_drain:
            self._asked_to_drain = True
            timeout = self._options.drain_timeout if timeout is None else timeout
            self._membership.view.begin_drain(reason, timeout)
            self._courier.send(lambda: self._membership.drain(reason, timeout))

    # -- rounds

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._due_by = math.inf  # however long that takes
        if self._unfit:
            self._prove_fitness()
        super()._rendezvous(worker_group)
        self._unfit = False
        self._courier.send(self._learn_restarts)

    def _learn_restarts(self) -> None:
        """A restart that was charged may have been taken back since, and others' are only known to Redis."""
        self._job_restarts = self._control.restarts()

    def _prove_fitness(self) -> None:
        """Refuse to join with a host that is not fit, or wait until somebody readmits it."""
        options, name = self._options, self._rendezvous_handler.settings.node_name
        limit = options.max_failed_rounds
        if limit is not None and (failures := self._control.failures(name)) >= limit:
            reason = f"its workers failed first in {failures} rounds in a row"
            self._note("barred", f"{name} is kept out: {reason}")
            log.error(
                "This host is kept out of run %r, since %s: `redelastic readmit %s %s` lets it in.",
                *(self._membership.run_id, reason, self._membership.run_id, name),
            )
            self._membership.leave(f"is kept out: {reason}")
            self._barred = True
            self._membership.wait_while(lambda: self._control.failures(name) >= limit)
            self._barred = False
        log_dir: Any = self._logs_specs.root_log_dir
        node = Node(
            log_dir=Path(tempfile.gettempdir() if log_dir in {os.devnull, "None"} else log_dir),
            local_world_size=self._worker_group.spec.local_world_size,
            timeout=options.health_timeout,
        )
        if unfit := run_checks(options.health_checks, options.health_command, node):
            refused = RefusedError(f"This node does not join run {self._membership.run_id!r}: {unfit}.")
            self._note("refused", unfit)
            try:
                self._membership.leave(f"is not fit: {unfit}")
            except RendezvousError as e:  # it is out when its lease has run out
                raise refused from e
            raise refused

    def _end_tree(self) -> None:
        """A signal may have ended a shutdown before its time; if one ends this too, the warden does the rest."""
        self._tree.kill(self._pids().values())
        self._tree.close()

    def _close_workers(self) -> None:
        if self._workers:
            self._workers.close()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._close_workers()
        spec = worker_group.spec
        self._workers = workers = Workers(
            spec.local_world_size, self._options, self._interval, self._membership.view.notify
        )
        pids: dict[int, Any] = super()._start_workers(worker_group)
        workers.started(pids)
        size = int(worker_group.group_world_size or 0)
        self._drains = Drains(
            self._membership, workers, store=self._round_store, size=size, courier=self._courier, note=self._note
        )
        context: Any = self._pcontext  # which ends workers by itself when one has failed, within 30 s otherwise
        context.close = functools.partial(_close, context.close, self._shutdown_timeout)
        self._logs = log_files(context.stdouts, context.stderrs)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        told = places_text({ranks[local_rank]: path for local_rank, path in self._logs.items()})
        self._note("started", f"rank {worker_group.group_rank} of {size}", told)
        return pids

    def _set_local_rank_env(self, worker_env: dict[str, Any], local_rank: int, spec: WorkerSpec) -> None:
        if spec.virtual_local_rank and self._assignment.gpus:
            worker_env.update(self._assignment.isolated_env(local_rank))
        else:
            super()._set_local_rank_env(worker_env, local_rank, spec)
        if self._workers:
            worker_env.update(self._tree.environment)
            worker_env.update(self._workers.environment(local_rank))
        # A worker that crashes in C says where, in its log.
        worker_env["PYTHONFAULTHANDLER"] = os.environ.get("PYTHONFAULTHANDLER", "1")
        worker_env[TORCH_SIGNALS] = self._torch_signals

    def _setup_healthcheck(self) -> None:
        """Not torch's, which serves nothing: the agent's own endpoint stands from the beginning."""

    def _stop_workers(self, worker_group: WorkerGroup) -> None:  # noqa: ARG002  # torch's signature
        self._shutdown(timeout=self._shutdown_timeout)

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: float | None = None) -> None:
        """SIGTERM, then SIGKILL after ``timeout`` seconds, and nothing of the workers' processes is left."""
        timeout = self._shutdown_timeout if timeout is None else timeout
        self._due_by = time.monotonic() + 2 * timeout + STALL
        roots = self._pids().values()
        shut_down(super()._shutdown, death_sig, timeout)
        if killed := self._tree.kill(roots):
            log.warning("Processes that the workers had left behind were killed: %s.", ", ".join(map(str, killed)))

    def _pids(self) -> dict[int, int]:
        context = self._pcontext
        try:
            return dict(context.pids()) if context else {}
        except AssertionError:  # torch's: they are not started yet
            return {}

    # -- the loop

    def _pause(self) -> float:
        if not self._workers or not self._drains:
            return self._interval
        # torch asks workers that are functions for their results again and again: they do not end before that
        polls = callable(self._worker_group.spec.entrypoint)
        return min(self._interval if polls else self._workers.pause, self._drains.pause)

    def _look(self, worker_group: WorkerGroup) -> RunResult:
        self._come_round()
        result = super()._look(worker_group)
        if result.failures and self._workers:
            self._workers.explain(result, self._usage.get("workers", {}))
        if result.state == WorkerState.HEALTHY and self._workers and self._workers.look():
            return self._report_hang(self._workers)
        return result

    def _come_round(self) -> None:
        # Then torch may end the workers that are left when one has failed, and a lost lease may be waited for.
        lease = self._rendezvous_handler.settings.lease
        self._due_by = time.monotonic() + STALL + self._shutdown_timeout + lease
        if self._membership.view.stopped:
            raise RunStoppedError(f"Run {self._membership.run_id!r} was stopped: {self._membership.view.stopped}.")
        if self._drains:
            self._drains.attend()

    def _exit_barrier(self) -> None:
        group = self._worker_group
        rank, size = int(group.group_rank or 0), int(group.group_world_size or 0)
        if size > 1:
            wait_for_others(
                self._round_store,
                rank,
                size,
                self._exit_barrier_timeout,
                come_round=self._come_round,
                is_patient=self._is_patient,
            )

    def _is_patient(self) -> bool:
        return self._membership.view.away < self._rendezvous_handler.settings.read_timeout

    # -- failures

    def _may_restart(self, result: RunResult) -> bool:
        self._leave_if_drained()  # a signal to all processes may have ended them
        self._unfit = True
        self._verdict = self._charge(result, final=False)
        return super()._may_restart(result) and not self._verdict

    def _leave_if_drained(self) -> None:
        for drain in self._membership.view.drains:
            if drain.node == self._membership.node:
                raise DrainedError(drain.node, self._membership.run_id, drain.reason)

    def _wait_for_loss(self, handler: RedisRendezvousHandler) -> bool:
        """A node that drains is lost once its workers have ended; ours may have failed for that long before."""
        lost = super()._wait_for_loss(handler)
        self._leave_if_drained()
        while not lost and self._membership.view.drains:  # others', which their leases end if nothing else does
            self._come_round()
            lost = self._membership.view.wait_for_loss(self._interval)
        return lost

    def _give_up(self, result: RunResult) -> None:
        if self._verdict and (verdict := self._charge(result, final=True)):  # else another node was lost meanwhile
            raise RunStoppedError(f"Run {self._membership.run_id!r} was stopped: {verdict}.")

    def _charge(self, result: RunResult, *, final: bool) -> str:
        """Count the failure against the job's budget; returns why the job may not go on."""
        workers = self._workers
        failed_at = (workers.first_failure if workers else None) or time.monotonic()
        step = workers.highest_step if workers else -1
        cause = self.cause(result)
        if not final:
            log.error("%s.", cause)
            self._tell_log(result, failed_at)
        self._due_by = math.inf  # as long as Redis is away
        try:
            told = self._membership.charge(failed_at, step, cause, self._options.limits, final=final)
        except RendezvousConnectionError as e:
            log.warning("The failure could not be counted: %s", e)
            return ""
        self._job_restarts, _, verdict = told
        return verdict

    def _tell_log(self, result: RunResult, failed_at: float) -> None:
        """Have Redis keep the last lines of the worker that failed first here."""
        if not result.failures:
            return
        rank, failure = min(result.failures.items(), key=lambda item: item[1].timestamp)
        node, path = self._membership.node, self._logs.get(failure.local_rank, "")
        last = tail(path) if path else ""

        def errand() -> None:
            self._control.note("log", node, failure_text(rank, time.monotonic() - failed_at, path), last)

        self._courier.send(errand)

    def cause(self, result: RunResult) -> str:
        """What happened to the worker that failed first, in words."""
        return self._workers.cause(result, self._usage.get("workers", {})) if self._workers else result.state.name

    def _report_hang(self, workers: Workers) -> RunResult:
        """Say where the workers hang, and have them restarted like workers that failed."""
        stacks = workers.stacks()
        hung = [self._worker_group.workers[local_rank] for local_rank in workers.hung]
        failures = {worker.global_rank: workers.hang_failure(worker) for worker in hung}
        for worker in hung:
            where = stacks.get(worker.local_rank, "")
            log.error("Stacks of worker %s (rank %s), which hangs:\n%s", worker.local_rank, worker.global_rank, where)
            self._note("hung", workers.hang(worker), where)
        return RunResult(state=WorkerState.FAILED, failures=failures)

    @property
    def _round_store(self) -> RedisStore:
        store: Any = self._worker_group.store  # torch declares None
        return store  # type: ignore[no-any-return]

    # -- what others see

    def _note(self, event: str, reason: str, detail: str = "") -> None:
        """Record what happens here, in Redis and with torch's events."""
        node = self._membership.node
        self._courier.send(lambda: self._control.note(event, node, reason, detail))
        spec = self._worker_group.spec
        metadata: dict[str, Any] = {
            "run_id": self._membership.run_id,
            "node": node,
            "role": spec.role,
            "reason": reason,
        }
        told = events.Event(f"redelastic.{event}", source=events.EventSource.AGENT, metadata=metadata)
        events.record(told, spec.event_log_handler)

    def _observe(self, ended: threading.Event) -> None:
        """The telemetry's thread."""
        telemetry = Telemetry(self._assignment.visible)
        interval = self._rendezvous_handler.settings.keep_alive_interval
        while not ended.wait(min(1.0, interval)):
            try:
                self._look_for_drain_file()
                pids = self._pids()
                self._time.look(trains=self._trains())
                self._usage = telemetry.sample(trees(self._tree.look(pids.values()), pids))
            except Exception:  # noqa: PERF203
                log.exception("The node's telemetry failed; the training is not touched.")

    def _look_for_drain_file(self) -> None:
        path = self._options.drain_file
        if path is None or self._asked_to_drain or not path.exists():
            return
        timeout = self._options.drain_timeout
        with contextlib.suppress(ValueError, OSError):
            timeout = min(timeout, max(0.0, float(path.read_text()) - time.time()))
        self._drain(f"the file {path} is there", timeout)

    def _describe(self, base: dict[str, Any]) -> str:
        """The status for a heartbeat, which must not fail."""
        try:
            return bounded(self._extended(base))
        except Exception:
            log.exception("The node's status could not be told.")
            return json.dumps(base)

    def _extended(self, base: Mapping[str, Any]) -> dict[str, Any]:
        usage, workers = dict(self._usage), self._workers
        each = usage.pop("workers", {})
        status = {**base, **self._own_state(), "agent": "redelastic"}
        status["restarts"] = self._worker_group.spec.max_restarts - self._remaining_restarts
        status["job_restarts"] = self._job_restarts
        status |= {"gpus_hidden": self._gpus_hidden} if self._gpus_hidden else {}
        told = [workers.describe(worker) for worker in self._worker_group.workers] if workers and workers.pids else []
        return {**status, **usage, "workers": [{**one, **each.get(str(one["local_rank"]), {})} for one in told]}

    def _own_state(self) -> dict[str, str]:
        """What the node's status says instead of running or waiting."""
        draining = self._drains is not None and self._drains.own
        return {"state": "barred"} if self._barred else {"state": "draining"} if draining else {}

    def status(self) -> dict[str, Any]:
        """What this node's heartbeat says, and which run and node it is."""
        membership = self._membership
        who = {"run_id": membership.run_id, "node": membership.node, "redis_away": membership.view.away}
        return {**who, **self._time.told(), **self._extended(membership.heartbeat.status())}

    def _trains(self) -> bool:
        """Whether workers run in a round, and none hangs."""
        runs = self._membership.heartbeat.status()["state"] == "running"
        return runs and self._worker_group.state == WorkerState.HEALTHY and not (self._workers and self._workers.hung)

    def stalled(self) -> str:
        """Why the agent's loop is taken for dead; empty while it lives."""
        late = time.monotonic() - self._due_by
        return f"the agent's loop is {late:.0f} s late" if late > 0 else ""

    def unready(self) -> str:
        """Why no workers run in a round; empty while they do."""
        state = {**self._membership.heartbeat.status(), **self._own_state()}["state"]
        if state != "running":
            return f"the node is {state}"
        return "" if self._worker_group.state == WorkerState.HEALTHY else "the workers do not run"


def _close(
    close: Callable[[signal.Signals | None, float], None],
    default: float,
    death_sig: signal.Signals | None = None,
    timeout: float | None = None,
) -> None:
    """Torch's ``PContext.close`` with another default for its time-out."""
    close(death_sig, default if timeout is None else timeout)
