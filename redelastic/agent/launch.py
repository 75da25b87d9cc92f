"""redelastic's counterpart of torchrun's launcher: from a launch configuration to an exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from torch.distributed import DistNetworkError
from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousParameters
from torch.distributed.launcher.api import LaunchConfig

from redelastic.agent.agent import RedisElasticAgent
from redelastic.agent.limits import RefusedError
from redelastic.agent.options import AgentOptions
from redelastic.agent.preflights import Preflights
from redelastic.agent.surviving import SurvivingAgent
from redelastic.logs import say
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Closed, Left, Lost, Stopped
from redelastic.monitoring.failure import last_failure, lines
from redelastic.monitoring.wording import clean, count
from redelastic.preflight.options import Options
from redelastic.redis.errors import RedelasticError
from redelastic.rendezvous.handler import RedisRendezvousHandler, handler_from_parameters
from redelastic.rendezvous.node import DrainedError, RunStoppedError, RunThen
from redelastic.workers.drains import watch_drain_file

log = logging.getLogger(__name__)

OK: Final = 0
FAILED: Final = 1  # workers failed, or a signal ended this process: same as torchrun
DRAINED: Final = (
    75  # this node was drained; the job goes on elsewhere, and this node's place may be taken (EX_TEMPFAIL)
)
STOPPED: Final = 76  # the job was stopped: by a person, or because its restart budget is used up
REFUSED: Final = 77  # a health check found this node unfit
NO_PROGRESS: Final = 78  # the job was stopped because it made no progress: a new run of it would make none either
UNUSED: Final = 79  # this node was a spare until the run ended, and has trained nothing
STANDALONE: Final = "standalone-"  # how the id of a run begins whose Redis is this process' own
LAST_LOOK_TIMEOUT: Final = 1.0  # for the question what the run went through, in seconds
DRAIN_FILE_INTERVAL: Final = 1.0  # between two looks for the drain file, in seconds


def launch(
    config: LaunchConfig,
    options: AgentOptions,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    *,
    shutdown_timeout: float = 30.0,
    exit_barrier_timeout: float | None = None,
    preflight: Options | None = None,
) -> int:
    """Run one node of a job in this process.

    Args:
        config: torchrun's; its rendezvous is on Redis.
        options: the options that torchrun lacks.
        entrypoint: of the workers.
        args: of the entry point.
        shutdown_timeout: how long workers have between SIGTERM and SIGKILL, in seconds.
        exit_barrier_timeout: as :class:`RedisElasticAgent` takes it.
        preflight: how to measure this host before rounds; None: not at all.

    Returns:
        The exit code.

    Raises:
        ValueError: an option is wrong.
        RendezvousConnectionError: Redis does not answer, or refuses this node.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # then the exit status of a worker would be lost
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    parameters = RendezvousParameters(
        backend="redis",
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id or uuid.uuid4().hex,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    with watch_drain_file(options.drain_file, 0.0, _drain_by_signal, DRAIN_FILE_INTERVAL):
        handler = handler_from_parameters(parameters)
    if not isinstance(handler, RedisRendezvousHandler):
        raise ValueError("The agent needs the native rendezvous: remove protocol=dynamic, or use torchrun.")  # noqa: TRY004
    agent: RedisElasticAgent | None = None
    ending: tuple[Left, RunThen] = (Left(cause="exited"), "goes on")
    try:
        timeouts = {"shutdown_timeout": shutdown_timeout, "exit_barrier_timeout": exit_barrier_timeout}
        before = None if preflight is None else Preflights(handler, parameters, preflight)
        agent = _agent(config, options, handler, entrypoint, args, preflight=before, **timeouts)
        metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
        try:
            result = agent.run()
        except BaseException:
            events.record(agent.get_event_failed(), config.event_log_handler)
            raise
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result.state != WorkerState.SUCCEEDED:
            failed = ChildFailedError(_name(entrypoint, args), result.failures)
            _copy_error(failed)
            ending = Left(cause="failed", **agent.failure(result).of_worker()), "stops"
            say(f"{failed}")
            _say_why(handler, Stopped(cause="failed", node=handler.node.id))
            return FAILED
        ending = Left(cause="finished"), "closes"
        if not handler.node.view.epoch_held:
            return UNUSED
        _say_end(handler)
    except DrainedError as e:
        ending = Left(cause="drained", reason=e.reason), "goes on"
        log.warning("%s", e)
        return DRAINED
    except (RunStoppedError, RefusedError, RendezvousError, DistNetworkError, OSError) as e:
        say(f"redelastic run: {e}")
        ending = Left(cause="closed" if isinstance(e, RendezvousClosedError) else "exited"), "goes on"
        if isinstance(e, RunStoppedError):
            _say_why(handler)
        return _code_of(e)
    except SignalException as e:
        ending = Left(cause="signal", signal=e.sigval.name), "goes on"
        say(f"redelastic run: ended by {e.sigval.name}")
        return FAILED
    finally:
        left, run_then = ending
        handler.end(replace(left, last_step=agent.last_step if agent else None), run_then)
    return OK


def _code_of(error: Exception) -> int:
    if isinstance(error, RunStoppedError):
        return NO_PROGRESS if error.without_progress else STOPPED
    return REFUSED if isinstance(error, RefusedError) else FAILED


def _say_end(handler: RedisRendezvousHandler) -> None:
    """Say on rank 0's node what the run went through."""
    held, run_id = handler.node.view.round, handler.settings.run_id
    if held is None or held.rank != 0:
        return
    hint = "" if run_id.startswith(STANDALONE) else f"; see `redelastic timeline {run_id}`"
    with contextlib.suppress(RedelasticError):  # Redis is away: the workers have finished all the same
        control = RunControl(handler.backend.connection, handler.backend.keys, LAST_LOOK_TIMEOUT)
        losses = sum(isinstance(event, Lost) for event in control.events())
        rounds = count(held.epoch, "round")
        say(f"redelastic run: finished: {rounds}, {losses} {'loss' if losses == 1 else 'losses'}{hint}")


def _say_why(handler: RedisRendezvousHandler, ended: Closed | None = None) -> None:
    """Say why the last round failed, as every other place does.

    Args:
        handler: of this node.
        ended: the run's end, which this node is about to report.
    """
    with contextlib.suppress(RedelasticError):  # Redis is away: the agent has logged what it knows of its own workers
        control = RunControl(handler.backend.connection, handler.backend.keys, LAST_LOOK_TIMEOUT)
        if (failure := last_failure(control.events())) is None:
            return
        if failure.ended is None and failure.next_epoch is None:
            failure = replace(failure, ended=ended)
        say(f"redelastic run: round {failure.epoch} failed")
        for name, line in lines(failure):
            say(f"  {name:<6} {clean(line)}")


def _drain_by_signal(reason: str, _timeout: float) -> None:
    """Drain a node that has no agent yet, which would do it."""
    log.warning("Draining: %s.", reason)
    os.kill(os.getpid(), signal.SIGTERM)


def _name(entrypoint: Callable[..., Any] | str, args: Sequence[Any]) -> str:
    """The workers' program as the failure report names it: the script, if Python runs one."""
    if not isinstance(entrypoint, str):
        return entrypoint.__qualname__
    return next((arg for arg in args if not arg.startswith("-")), "") if entrypoint == sys.executable else entrypoint


def _copy_error(failed: ChildFailedError) -> None:
    """Copy the first failed worker's error to this process' error file, for its parent, as torch's ``record`` does."""
    _, failure = failed.get_first_failure()
    if os.environ.get("TORCHELASTIC_ERROR_FILE") and Path(failure.error_file).is_file():
        get_error_handler().dump_error_file(failure.error_file, failure.exitcode)


def _agent(
    config: LaunchConfig,
    options: AgentOptions,
    handler: RedisRendezvousHandler,
    entrypoint: Callable[..., Any] | str,
    args: Sequence[Any],
    **more: Any,
) -> RedisElasticAgent:
    spec = WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )
    agent = SurvivingAgent if options.survive else RedisElasticAgent
    logs_specs: Any = config.logs_specs  # never None: LaunchConfig then makes the default
    return agent(
        spec,
        logs_specs,
        start_method=config.start_method,
        log_line_prefix_template=config.log_line_prefix_template,
        **more,
        options=options,
        owns_process=True,
    )
