"""``redelastic run``: torchrun on Redis, with the agent that torch lacks."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from redelastic.logs import say
from redelastic.signals import handling

from . import common
from .run_options import admission, agent_options, make_parser, preflight_options

NAME = "run"
SUMMARY = "run one node of a job, with torchrun's flags and more"
DRAINED: Final = 75  # as in agent/launch.py, which is slow to import

_leaving: Final = threading.Event()  # set once a signal has asked this process to leave


def main(argv: Sequence[str]) -> int:
    """Run the command; torchrun's parser has to come last.

    Returns:
        The exit code; see :data:`redelastic.cli.run_options.EPILOG`.
    """
    # Importing torch takes seconds, a wait for Redis minutes, and the kernel drops signals that PID 1 does not handle.
    with handling((signal.SIGTERM, signal.SIGUSR1), _leave):
        return _run(argv)


def _leave(number: int, _frame: object) -> None:
    """End this process, which runs no workers: its agent handles these signals while it runs."""
    for drain_signal in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(drain_signal, signal.SIG_IGN)  # a second one must not interrupt the clean-up
    say(f"redelastic {NAME}: drained by {signal.Signals(number).name}, while it ran no workers")
    _leaving.set()
    raise SystemExit(DRAINED)


@contextmanager
def _importing() -> Iterator[None]:
    """Leave after the block if a module that it imports has swallowed the exit."""
    try:
        yield
    finally:
        if _leaving.is_set():
            raise SystemExit(DRAINED)


def _run(argv: Sequence[str]) -> int:
    with _importing():
        from redelastic.logs import set_up_logging
        from redelastic.monitoring.wording import clean
        from redelastic.torch_internals import exit_barrier_timeout, require_torch, shutdown_timeout

        try:
            require_torch()
        except ImportError as e:
            say(f"redelastic {NAME}: {e}")
            return common.USAGE
        import torch.distributed.run as torchrun
        from torch.distributed.elastic.rendezvous.api import RendezvousError

        from redelastic.agent.launch import launch

    from . import config_file

    parser = make_parser()
    with ExitStack() as opened:
        try:
            arguments = config_file.parse(parser, argv)
            set_up_logging(logging.getLogger())
            options = agent_options(arguments)
            if arguments.print_config:
                sys.stdout.write(config_file.to_toml(parser, arguments))
                return common.OK
            _check_script(arguments)
            _make_log_dir(arguments)
            _place(arguments, opened)
            config, entrypoint, args = torchrun.config_from_args(arguments)
            for name in ("node_name", "join_secret_file"):
                if (value := getattr(arguments, name)) is not None:
                    config.rdzv_configs[name] = value
            config.rdzv_configs.update(admission(arguments, config.rdzv_configs))
            more: dict[str, Any] = {
                "preflight": preflight_options(arguments),
                "shutdown_timeout": shutdown_timeout(config, arguments.shutdown_timeout),
                "exit_barrier_timeout": exit_barrier_timeout(arguments.exit_barrier_timeout),
            }
        except (AssertionError, RuntimeError, ValueError, OSError) as e:  # what torchrun's own checks raise
            say(f"redelastic {NAME}: {e}")
            return common.USAGE

        try:
            return launch(config, options, entrypoint, args, **more)
        except RendezvousError as e:
            say(f"redelastic {NAME}: {clean(str(e))}")  # it may quote what the server said
            return common.UNREACHABLE


def _check_script(arguments: argparse.Namespace) -> None:
    script = arguments.training_script
    if arguments.no_python and not (arguments.run_path or arguments.module):
        if shutil.which(script) is None:
            raise ValueError(f"No executable {script!r} on PATH or in {Path.cwd()}.")
    elif not (arguments.module or Path(script).exists()):
        raise ValueError(f"No script {script!r} in {Path.cwd()}; use -m for a module, --no-python for a command.")


def _make_log_dir(arguments: argparse.Namespace) -> None:
    """Make the folder for the workers' logs, as torch would, whose error names no option."""
    if arguments.log_dir and arguments.log_dir != os.devnull and not arguments.logs_specs:
        try:
            Path(arguments.log_dir).mkdir(parents=True, exist_ok=True)
            arguments.log_dir = str(Path(arguments.log_dir).absolute())  # others read where the logs are
        except OSError as e:
            raise ValueError(
                f"--log-dir={arguments.log_dir} cannot be made: {e.strerror or e}. Name one that can be written."
            ) from e


def _place(arguments: argparse.Namespace, opened: ExitStack) -> None:
    """Decide which Redis and which run to use: with ``--standalone``, a server of this process' own."""
    name = os.environ.get("PET_RDZV_BACKEND") or "redis"
    if name != "redis" and arguments.rdzv_backend == name:
        raise ValueError(
            f"PET_RDZV_BACKEND={name} selects another rendezvous: unset it, or set it to redis (a launcher may set it)."
        )
    if arguments.rdzv_backend not in ("redis", "static"):
        raise ValueError(
            f"--rdzv-backend={arguments.rdzv_backend} is for torchrun; redelastic run supports only redis."
        )
    if arguments.standalone:
        from redelastic.agent.launch import STANDALONE
        from redelastic.redis.server import RedisServer

        if arguments.max_failed_rounds is not None:
            raise ValueError(
                "--max-failed-rounds needs several hosts: with --standalone nobody could readmit this one."
            )
        server = opened.enter_context(RedisServer())
        arguments.rdzv_endpoint, arguments.rdzv_id = server.url, f"{STANDALONE}{uuid.uuid4().hex[:12]}"
        arguments.local_addr = arguments.local_addr or "127.0.0.1"
    elif arguments.rdzv_id in ("", "none"):  # torch would give each node a random id of its own
        what = "missing" if arguments.rdzv_id else "empty (is a variable unset?)"
        raise ValueError(f"--rdzv-id is {what}: give the job an id that is unique on this Redis, or use --standalone.")
    arguments.rdzv_backend = "redis"
    del arguments.master_addr  # for the static rendezvous: torchrun would warn that it is unused
