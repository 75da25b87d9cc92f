"""Everything redelastic uses from torch that is not public, or that differs between torch versions.

``HOOKS`` lists each name with the parameters that redelastic passes. One test asserts that :func:`missing` finds them
all, so that a new torch is checked within a minute; ``redelastic doctor`` checks the installed torch the same way.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from typing import IO, Any, Final, NamedTuple

log = logging.getLogger(__name__)

# Before 2.10 torch's agent has no hook for a worker's environment (`_set_local_rank_env`) and its launcher no
# `signals_to_handle`; before 2.8 it shuts the rendezvous down at each SIGTERM, which closes the run for all its nodes.
OLDEST: Final = (2, 10)
NEWEST_TESTED: Final = (2, 15)


def version_of(text: str) -> tuple[int, int]:
    """Major and minor number of a version such as ``2.13.0+cpu``."""
    major, minor, *_ = text.split(".")
    return int(major), int(minor)


def require_torch(version: str = "") -> str:
    """Raise an error if redelastic would hang or break its guarantees on this torch; returns the version.

    Args:
        version: of torch; empty for the installed one.

    Raises:
        ImportError: torch is not installed, or too old.
    """
    if not version:
        try:
            import torch  # noqa: PLC0415 - doctor and the command line work without it
        except ModuleNotFoundError as e:
            if e.name != "torch":
                raise
            raise ImportError(
                "torch is not installed. Nodes need it; a machine that only looks at runs does not."
            ) from e
        version = str(torch.__version__)
    if version_of(version) < OLDEST:
        raise ImportError(
            f"redelastic needs torch {OLDEST[0]}.{OLDEST[1]} or newer; this is torch {version}. "
            "Run pip install --upgrade torch."
        )
    return version


class Hook(NamedTuple):
    """A torch function or class, and the parameters that redelastic relies on."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()


# A line each: the module below torch.distributed, the name, and the parameters that redelastic passes.
_TABLE: Final = """
elastic.agent.server.local_elastic_agent  LocalElasticAgent.__init__              spec logs_specs start_method exit_barrier_timeout log_line_prefix_template
elastic.agent.server.local_elastic_agent  LocalElasticAgent._rendezvous           worker_group
elastic.agent.server.local_elastic_agent  LocalElasticAgent._assign_worker_ranks  store group_rank group_world_size spec
elastic.agent.server.local_elastic_agent  LocalElasticAgent._monitor_workers      worker_group
elastic.agent.server.local_elastic_agent  LocalElasticAgent._start_workers        worker_group
elastic.agent.server.local_elastic_agent  LocalElasticAgent._stop_workers         worker_group
elastic.agent.server.local_elastic_agent  LocalElasticAgent._set_local_rank_env   worker_env local_rank spec
elastic.agent.server.local_elastic_agent  LocalElasticAgent._setup_healthcheck
elastic.agent.server.local_elastic_agent  LocalElasticAgent._shutdown             death_sig
elastic.agent.server.local_elastic_agent  LocalElasticAgent._exit_barrier
elastic.agent.server.local_elastic_agent  LocalElasticAgent._initialize_workers   worker_group
elastic.timer                             FileTimerServer.get_last_progress_time
elastic.agent.server.local_elastic_agent  start_processes                         envs
elastic.agent.server.api                  _RoleInstanceInfo                       role rank local_world_size
elastic.agent.server.api                  WorkerSpec                              numa_options event_log_handler duplicate_stdout_filters duplicate_stderr_filters virtual_local_rank
elastic.multiprocessing.api               PContext.close                          death_sig timeout
elastic.multiprocessing.api               PContext.pids
elastic.multiprocessing.api               LogsSpecs.reify                         envs
elastic.multiprocessing.api               get_subprocess_handler                  entrypoint args env stdout stderr
elastic.multiprocessing.subprocess_handler  SubprocessHandler._popen              args env
elastic.utils                             macros.substitute                       args local_rank
run                                       get_args_parser
run                                       config_from_args                        args
launcher.api                              LocalElasticAgent                       spec logs_specs start_method log_line_prefix_template
launcher.api                              LaunchConfig                            numa_options signals_to_handle duplicate_stdout_filters duplicate_stderr_filters virtual_local_rank event_log_handler
elastic.events                            construct_and_record_rdzv_event         run_id message node_state
elastic.rendezvous.dynamic_rendezvous     RendezvousTimeout                       join last_call close heartbeat
elastic.rendezvous.dynamic_rendezvous     DynamicRendezvousHandler.from_backend   run_id store backend min_nodes max_nodes local_addr timeout
elastic.rendezvous.api                    RendezvousInfo                          store rank world_size bootstrap_store_info
distributed_c10d                          _set_pg_timeout                         timeout group
distributed_c10d                          _World.group_count
distributed_c10d                          _World.pg_names
rendezvous                                _rendezvous_handlers
rendezvous                                register_rendezvous_handler             scheme handler
"""  # noqa: E501
MESH_CACHES: Final = (  # modules of torch.distributed.tensor, and what clears a cache there
    ("debug", "_clear_python_sharding_prop_cache"),
    ("debug", "_clear_fast_path_sharding_prop_cache"),
    ("_redistribute", "clear_redistribute_planner_cache"),
    ("_redistribute", "_gen_transform_infos.cache_clear"),
)
HOOKS: Final = tuple(
    Hook(f"torch.distributed.{module}", name, tuple(parameters))
    for module, name, *parameters in map(str.split, _TABLE.strip().splitlines())
)


def missing() -> list[str]:
    """The ``HOOKS`` that this torch lacks; empty if it has all."""
    return [why for hook in HOOKS if (why := _why_missing(hook))]


def _why_missing(hook: Hook) -> str:
    named = f"{hook.module}.{hook.name}"
    try:
        found: Any = import_module(hook.module)
        for part in hook.name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return f"{named} is missing"
    if not hook.parameters:
        return ""
    known = inspect.signature(found).parameters
    if lacking := [name for name in hook.parameters if name not in known]:
        return f"{named} takes no {', '.join(lacking)}"
    return ""


# -- what differs between versions


def known_options(agent: type, **options: Any) -> dict[str, Any]:
    """Those of the keyword arguments that torch's agent takes: ``shutdown_timeout`` only from 2.12 on, for example."""
    known = inspect.signature(agent).parameters
    return {name: value for name, value in options.items() if name in known}


def watchdog_progress(agent: Any) -> float | None:
    """When the file timer's server of torch's agent last looked at its timers, by ``time.time``; None without one."""
    watchdog = getattr(agent, "_worker_watchdog", None)
    return None if watchdog is None else float(watchdog.get_last_progress_time())


def shut_down(shutdown: Callable[..., None], death_sig: signal.Signals, timeout: float) -> None:
    """Call torch's ``_shutdown``, which takes a timeout from 2.12 on; before, ``PContext.close`` has its own."""
    if "timeout" in inspect.signature(shutdown).parameters:
        shutdown(death_sig, timeout)
    else:
        shutdown(death_sig)


def close_within(context: Any, seconds: float, then: Callable[[Any], None]) -> None:
    """Have a ``PContext`` end its processes within ``seconds`` where torch's own code does not say how soon.

    torch's agent makes the context and offers no way to choose its class, so the class is replaced afterwards.
    Once the processes have ended, ``then`` is called with the context.

    torch signals whole process groups: a worker that saves at SIGTERM would lose its DataLoader's processes meanwhile.
    So Python processes get the signal alone; what they leave behind is the caller's to end. A shell that waits for its
    command acts on no signal before that has ended, so that group gets it as torch sends it.
    """

    class Closing(type(context)):  # type: ignore[misc]
        def close(self, death_sig: signal.Signals | None = None, timeout: float = seconds) -> None:
            if death_sig != signal.SIGKILL and not _end_alone(self, death_sig or signal.SIGTERM, timeout):
                death_sig = signal.SIGKILL
            super().close(death_sig, timeout)
            then(self)

    context.__class__ = Closing


def set_group_timeout(timeout: timedelta, group: Any = None) -> None:
    """Set the timeout of a group's operations from now on; None: of the default group's."""
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    distributed_c10d._set_pg_timeout(timeout, group)  # noqa: SLF001


def forget_meshes() -> None:
    """Clear what DTensor has computed on meshes, and keeps together with their groups.

    It takes a mesh for an earlier one with the same ranks, whose groups have ended.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    for module, name in MESH_CACHES:
        found: Any = import_module(f"torch.distributed.tensor.{module}")
        for part in name.split("."):
            found = getattr(found, part, None)  # some versions of torch lack the cache
        if found is not None:
            found()


def restart_group_names() -> None:
    """Name the next default group as a new process does.

    Its name is part of its keys in the store, and has to be the same on all ranks. torch counts groups, also one that
    could not be made, and starts again only when a default group is destroyed.
    """
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    distributed_c10d._world.group_count = 0  # noqa: SLF001


def abort_nccl() -> None:
    """Abort the NCCL communicators of all groups; gloo has nothing to abort. Idempotent.

    It is one NCCL group call: communicators that are aborted one after the other may wait for each other for ever.
    """
    nccl = _nccl_backends()
    if not nccl:
        return
    nccl[0]._group_start()  # noqa: SLF001
    try:
        for backend in nccl:
            backend.abort()
    finally:
        nccl[0]._group_end()  # noqa: SLF001


def nccl_has_failed() -> bool:
    """Whether an NCCL communicator has failed, as when a peer dies; a script that waits for its GPU gets no error."""
    from torch._C._distributed_c10d import ErrorType  # noqa: PLC0415

    return any(backend.get_error() != ErrorType.SUCCESS for backend in _nccl_backends())


def _nccl_backends() -> list[Any]:
    """Those of all groups, the newest first."""
    from torch import device  # noqa: PLC0415
    from torch.distributed import distributed_c10d  # noqa: PLC0415

    gpu, world = device("cuda"), distributed_c10d._world  # noqa: SLF001
    groups = [group for group in list(world.pg_names) if gpu in group._device_types]  # noqa: SLF001
    backends: list[Any] = [group._get_backend(gpu) for group in groups]  # noqa: SLF001
    return [backend for backend in reversed(backends) if hasattr(backend, "_group_start")]


def starting_no_processes(then: Callable[[dict[int, dict[str, str]]], Any]) -> AbstractContextManager[None]:
    """Within the block, have torch's agent start no processes: ``then`` gets the environments of its workers instead.

    It takes them by local rank, and returns the ``PContext`` of the workers.
    """
    from torch.distributed.elastic.agent.server import local_elastic_agent  # noqa: PLC0415

    return _replaced(local_elastic_agent, "start_processes", lambda *, envs, **_: then(envs))


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _end_alone(context: Any, death_sig: signal.Signals, timeout: float) -> bool:
    """Signal the processes of a context, not their children; returns False if one of them runs on after ``timeout``."""
    handlers = getattr(context, "subprocess_handlers", {}).values()
    running = [handler.proc for handler in handlers if handler.proc.poll() is None]
    if not all(_is_python(process.pid) for process in running):
        return True
    for process in running:
        log.warning("Sending process %s closing signal %s", process.pid, death_sig.name)  # as torch does
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, death_sig)
    until = time.monotonic() + timeout
    try:
        for process in running:
            process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True


def _is_python(pid: int) -> bool:
    try:
        return "python" in os.readlink(f"/proc/{pid}/exe").rpartition("/")[2]  # noqa: PTH115  # no other use of paths
    except OSError:  # it has just ended
        return True


def exit_codes(context: Any) -> dict[int, int]:
    """The exit codes of a ``PContext``'s processes that have ended, by local rank; negative for a signal."""
    if (handlers := getattr(context, "subprocess_handlers", None)) is not None:
        codes = {local_rank: handler.proc.poll() for local_rank, handler in handlers.items()}
    else:
        processes = getattr(getattr(context, "_pc", None), "processes", ())
        codes = {local_rank: process.exitcode for local_rank, process in enumerate(processes)}
    return {local_rank: code for local_rank, code in codes.items() if code is not None}


Starter = Callable[[Sequence[str], Mapping[str, str], IO[Any] | None, IO[Any] | None], Any]


def starting_workers_with(start: Starter) -> AbstractContextManager[None]:
    """Within the block, have torch start commands with ``start``, which may return None to leave one to torch.

    It takes the command line, the environment, and where stdout and stderr go (None: where this process' go); it
    returns what torch needs of a ``subprocess.Popen``: ``pid``, ``poll()``, ``wait(timeout)``.
    """
    from torch.distributed.elastic.multiprocessing import api  # noqa: PLC0415  # torchrun's plugin must stay light
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler  # noqa: PLC0415

    class Handler(SubprocessHandler):
        def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
            return start(args, env, self._stdout, self._stderr) or super()._popen(args, env)

    return _replaced(api, "get_subprocess_handler", Handler)


def substitute_local_rank(arguments: Iterable[str], local_rank: int) -> list[str]:
    """The arguments of one worker: torch replaces ``${local_rank}`` with its local rank."""
    from torch.distributed.elastic.utils import macros  # noqa: PLC0415

    return [str(argument) for argument in macros.substitute(list(arguments), str(local_rank))]


def shutdown_timeout(config: Any, given: float | None) -> float:
    """How long workers have between SIGTERM and SIGKILL, in seconds.

    It is ``given``, or else ``TORCH_ELASTIC_SHUTDOWN_TIMEOUT``, or else 30.

    From 2.12 on, ``LaunchConfig`` has it.

    Raises:
        ValueError: it is negative or not a number.
    """
    if (known := getattr(config, "shutdown_timeout", None)) is not None:
        return float(known)
    text = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30") if given is None else str(given)
    return _seconds("shutdown_timeout", text)


def exit_barrier_timeout(given: float | None) -> float | None:
    """How long a node whose workers have finished waits for the other nodes' workers, in seconds; None: no limit.

    It is ``given``, or else ``TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT``, or else None.

    Raises:
        ValueError: it is negative or not a number.
    """
    text = os.environ.get("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT") if given is None else str(given)
    return _seconds("exit_barrier_timeout", text) if text else None


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:  # nor is it nan
        raise ValueError(f"{name} must be a number of seconds, 0 or more, not {text!r}.")
    return seconds


def replace_agent_of_launcher(torch_agent: type, agent: type) -> None:
    """Have torchrun use ``agent``; the only way is to replace the name by which its launcher finds torch's.

    If no launcher is loaded, torchrun is not in use, and this does nothing. If the launcher uses another agent, that
    agent stays, and a warning says what that costs.
    """
    launcher: Any = sys.modules.get("torch.distributed.launcher.api")
    if launcher is None:
        return
    found = getattr(launcher, torch_agent.__name__, None)
    if found is torch_agent:
        setattr(launcher, torch_agent.__name__, agent)
    elif not (isinstance(found, type) and issubclass(found, agent)):
        log.warning(
            "torchrun of torch %s uses %s and not torch's %s, which redelastic would replace. The rendezvous works, "
            "but workers that fail because a node was lost cost a restart of --max-restarts. `redelastic run` is "
            "unaffected.",
            *(require_torch(), f"{found.__module__}.{found.__qualname__}" if found else "no agent of that name"),
            torch_agent.__name__,
        )
