"""``redelastic run``: torchrun on Redis, with the agent that torch lacks."""

from __future__ import annotations

import argparse
import logging
import math
import os
import re
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from redelastic.agent.options import MAX_IDLE_RESTARTS
from redelastic.logs import say
from redelastic.signals import handling

from . import common

if TYPE_CHECKING:
    from redelastic.agent import AgentOptions
    from redelastic.preflight.options import Options

NAME = "run"
SUMMARY = "run one node of a job, with torchrun's flags and more"
EPILOG = """\
exit codes: 0 finished; 1 workers or the rendezvous failed, or a signal ended the agent; 2 wrong arguments;
3 Redis cannot be reached at the start; 75 this node was drained (start another in its place); 76 the job was
stopped, or its restarts are used up; 77 refused by a health check; 78 the job was stopped because it makes no
progress (do not start it again before the cause is found); 79 the run has finished, but this node was a spare
to the end, and has trained nothing.

SIGTERM and SIGUSR1 drain the node: all workers of the job are asked to save, then this node leaves and
the others go on. A second SIGTERM, at least one second after the first, does not wait for the save.

--hang-timeout needs every rank to call redelastic.progress(): workers that never call it get a warning and
are not restarted.
"""

# For these, torchrun's own help does not apply here.
HELP = {
    "--rdzv-endpoint": "host:port or URL of Redis (default: $REDELASTIC_REDIS_URL, or localhost)",
    "--rdzv-backend": "must be redis",
    "--rdzv-id": "run id: the same on all nodes of the job, and unique on this Redis",
    "--standalone": "run a job of one node with its own Redis; --rdzv-endpoint and --rdzv-id are ignored",
    "--local-addr": "this host's address, name or interface for its peers (default: the address it reaches Redis from)",
    "--master-addr": "has no effect: rank 0 announces its address",
    "--master-port": "has no effect: rank 0 announces its port",
    "--node-rank": "has no effect: the rendezvous assigns ranks",
}


ADMIT_INTERVAL: Final = 10.0  # in seconds
DRAINED: Final = 75  # as in agent/launch.py, which is slow to import

_leaving: Final = threading.Event()  # set once a signal has asked this process to leave


def main(argv: Sequence[str]) -> int:
    """Run the command; torchrun's parser has to come last.

    Returns:
        The exit code; see :data:`EPILOG`.
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
            options = _options(arguments)
            if arguments.print_config:
                sys.stdout.write(config_file.to_toml(parser, arguments))
                return common.OK
            _check_script(arguments)
            _make_log_dir(arguments)
            _place(arguments, opened)
            config, entrypoint, args = torchrun.config_from_args(arguments)
            if arguments.node_name is not None:
                config.rdzv_configs["node_name"] = arguments.node_name
            if arguments.join_secret_file is not None:
                config.rdzv_configs["join_secret_file"] = arguments.join_secret_file
            config.rdzv_configs.update(admission(arguments, config.rdzv_configs))
            more: dict[str, Any] = {
                "preflight": _preflight(arguments),
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


def make_parser() -> argparse.ArgumentParser:
    """Torchrun's parser with redelastic's options, and its help where torchrun's does not apply."""
    import torch.distributed.run as torchrun

    parser = common.Parser(
        f"redelastic {NAME}",
        description=(__doc__ or "").replace("``", ""),
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun.get_args_parser()],
        add_help=False,  # it comes with torchrun's
    )
    parser.set_defaults(rdzv_backend=os.environ.get("PET_RDZV_BACKEND") or "redis")
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=None)  # 0 must differ from not given
    for option, text in HELP.items():
        parser._option_string_actions[option].help = text  # noqa: SLF001  # argparse offers no other way to it
    _add_arguments(parser)
    return parser


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from torch.distributed.argparse_util import check_env, env

    group = parser.add_argument_group("options that torchrun does not have (times in seconds)")

    def add(option: str, **settings: Any) -> None:
        """Add an option as torchrun does: also with underscores, and with its default from a variable PET_…."""
        action = {"action": check_env if settings.pop("flag", False) else env}
        names = dict.fromkeys((option, "--" + option[2:].replace("-", "_")))
        group.add_argument(*names, **{**action, **settings})

    add(
        "--config",
        metavar="FILE",
        help="TOML file with options by their names, such as hang-timeout = 300, and the script as training-script and "
        "training-script-args; flags and variables PET_… outweigh it",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print the options that would hold, as such a file, and exit; secrets are hidden",
    )
    add("--node-name", metavar="NAME", help="name of this node in status and events (default: its hostname)")
    add(
        "--join-secret-file",
        metavar="FILE",
        help="file with a secret of 16 bytes or more: this node trains only with nodes that have the same one",
    )
    add(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="time for workers to save during a drain (default: 30)",
    )
    add(
        "--admit",
        choices=["now", "saved", "checkpoint"],
        help="when to let this node into a round that trains, which restarts its workers: now; once they were asked to "
        "save, and have (up to --drain-timeout), with --survive once all have paused after a common step; or after a "
        "checkpoint of the job's own (default: saved)",
    )
    add(
        "--admit-interval",
        type=float,
        metavar="S",
        help="how old that round has to be, so that nodes that come together share one restart (default: 10; 0 with "
        "--survive)",
    )
    add(
        "--drain-file",
        type=lambda name: Path(name) if name else None,
        metavar="FILE",
        help="drain when this file appears; it may contain a Unix time as the deadline",
    )
    add(
        "--hang-timeout",
        type=float,
        metavar="S",
        help="restart all workers if one that has reported progress reports none for S seconds",
    )
    add(
        "--hang-start-timeout",
        type=float,
        metavar="S",
        help="the same for the time until the first report in a round (default: 1800, or --hang-timeout if longer)",
    )
    add(
        "--max-job-restarts",
        type=int,
        metavar="N",
        help="restart budget of the whole job; also the default of --max-restarts",
    )
    add(
        "--max-idle-restarts",
        type=int,
        default=MAX_IDLE_RESTARTS,
        metavar="N",
        help="stop the job, with exit code 78, after N consecutive restarts in which no worker reported a higher step "
        f"than before (default: {MAX_IDLE_RESTARTS}; 0: never)",
    )
    add(
        "--max-failed-rounds",
        type=int,
        metavar="N",
        help="exclude a host whose workers failed first in N consecutive rounds",
    )
    add(
        "--preflight",
        flag=True,
        help="measure all hosts before the first round, and after one in which a worker or a node failed",
    )
    add("--exclude", flag=True, help="with --preflight: exclude hosts that stand out, as --max-failed-rounds does")
    add(
        "--preflight-path",
        action="append",
        default=[],
        metavar="FOLDER",
        help="with --preflight: write here, too; may be repeated",
    )
    add(
        "--health-check",
        action="append",
        metavar="NAME",
        help="check to pass before joining, may be repeated: gpu, disk, memory, …, or none (default: disk)",
    )
    add("--health-command", metavar="COMMAND", help="shell command; if it fails, this node does not join")
    add("--health-timeout", type=float, default=60.0, metavar="S", help="time limit of each check (default: 60)")
    add("--health-port", type=int, metavar="PORT", help="port for /livez, /readyz and /metrics")
    add("--health-host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default: 127.0.0.1)")
    add(
        "--survive",
        flag=True,
        help="keep workers' processes from round to round: the script calls redelastic.survive() (experimental)",
    )
    add(
        "--park-timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="with --survive: time for workers to leave a round; after that they start anew (default: 10)",
    )
    add("--share-gpus", flag=True, help="let several workers use one GPU (not with NCCL)")
    add(
        "--preload",
        metavar="MODULE,…",
        help="import these modules once and fork workers from that process (such as torch); if one cannot be, "
        "a warning says why, and workers start as new processes",
    )
    if "--shutdown-timeout" not in parser._option_string_actions:  # noqa: SLF001  # torchrun has it since torch 2.12
        add(
            "--shutdown-timeout",
            type=int,
            metavar="S",
            help="time between SIGTERM and SIGKILL for workers (default: 30)",
        )
    if "--exit-barrier-timeout" not in parser._option_string_actions:  # noqa: SLF001  # torch is about to have it
        add(
            "--exit-barrier-timeout",
            type=float,
            metavar="S",
            help="time for the other nodes' workers to end once this node's have; after that this node fails, and the "
            "run stays open (default: no limit)",
        )
    else:
        parser.set_defaults(exit_barrier_timeout=None)


def _options(arguments: argparse.Namespace) -> AgentOptions:
    from redelastic.agent import AgentOptions
    from redelastic.host.devices import has_driver

    least, _, most = arguments.nnodes.partition(":")
    if not (re.fullmatch(r"[0-9]+(:[0-9]+)?", arguments.nnodes) and 1 <= int(least) <= int(most or least)):
        raise ValueError(f"--nnodes={arguments.nnodes} is invalid: use N (4) or MIN:MAX (2:4)")
    if re.fullmatch(r"-?[0-9]+", arguments.nproc_per_node) and int(arguments.nproc_per_node) < 1:
        raise ValueError(f"--nproc-per-node={arguments.nproc_per_node} is out of range: it must be 1 or more")
    if arguments.standalone and int(least) > 1:
        raise ValueError(f"--nnodes={arguments.nnodes} needs several hosts, and --standalone has one: leave one out")
    if not arguments.monitor_interval > 0:
        raise ValueError(f"--monitor-interval={arguments.monitor_interval} is out of range: it must be above 0.")
    if arguments.numa_binding and not has_driver():
        raise ValueError(f"--numa-binding={arguments.numa_binding} needs GPUs, and this host has no driver for any.")
    for name in arguments.signals_to_handle.split(","):
        if name.strip() not in signal.Signals.__members__:
            raise ValueError(f"{name.strip()} in --signals-to-handle is no signal of this system.")
    arguments.max_idle_restarts = arguments.max_idle_restarts or None
    if arguments.max_restarts is None:
        arguments.max_restarts = arguments.max_job_restarts or 0
    checks: list[str] = arguments.health_check or os.environ.get("PET_HEALTH_CHECK", "disk").split(",")
    arguments.health_check = checks
    given: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in (
            *("drain_timeout", "drain_file", "hang_timeout", "hang_start_timeout", "max_job_restarts"),
            *("max_idle_restarts", "max_failed_rounds", "exclude", "health_command", "health_timeout"),
            *("health_port", "health_host", "share_gpus", "survive", "park_timeout"),
        )
    }
    modules = tuple(name.strip() for name in (arguments.preload or "").split(",") if name.strip())
    return AgentOptions(health_checks=tuple(c for c in checks if c != "none"), preload=modules, **given)


def _preflight(arguments: argparse.Namespace) -> Options | None:
    """How to measure this host before rounds; None: not at all."""
    from redelastic.host.devices import has_driver
    from redelastic.preflight.options import Options

    if not arguments.preflight:
        if arguments.exclude or arguments.preflight_path:
            raise ValueError("--exclude and --preflight-path need --preflight.")
        return None
    for option in ("standalone", "survive"):
        if getattr(arguments, option):
            raise ValueError(f"--preflight does not work with --{option}: leave one out.")
    folders = tuple(str(Path(folder).absolute()) for folder in arguments.preflight_path)
    backend = "nccl" if has_driver() else "gloo"
    return Options(folders=folders, backend=backend, exclude=arguments.exclude)


def admission(arguments: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, float]:
    """How this node is let in, as parameters of the rendezvous; ``given`` has those of ``--rdzv-conf``."""
    mode = arguments.admit or "saved"
    timeouts = {"now": 0.0, "saved": arguments.drain_timeout, "checkpoint": math.inf}
    if mode not in timeouts:  # argparse does not look at what PET_ADMIT says
        raise ValueError(f"--admit={mode} is invalid: it must be one of {', '.join(timeouts)}.")
    interval = arguments.admit_interval
    if interval is None:
        interval = 0.0 if arguments.survive else ADMIT_INTERVAL
    if not 0 <= interval < math.inf:
        raise ValueError(f"--admit-interval={interval} is out of range: it must be 0 or more.")
    asked = {"admit_timeout": arguments.admit, "admit_interval": arguments.admit_interval}
    found = {"admit_timeout": timeouts[mode], "admit_interval": interval}
    return {name: value for name, value in found.items() if asked[name] is not None or name not in given}


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
