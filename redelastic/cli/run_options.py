"""The options of ``redelastic run``: torchrun's and ours, and what they mean for the agent and the rendezvous."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from redelastic.agent.options import MAX_IDLE_RESTARTS

from . import common

if TYPE_CHECKING:
    from redelastic.agent import AgentOptions
    from redelastic.preflight.options import Options

DESCRIPTION = "redelastic run: torchrun on Redis, with the agent that torch lacks."
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
_TYPES: Final = {"S": float, "N": int, "PORT": int}  # of values, by what an option's help calls them; others are texts


def make_parser() -> argparse.ArgumentParser:
    """Torchrun's parser with redelastic's options, and its help where torchrun's does not apply."""
    import torch.distributed.run as torchrun

    parser = common.Parser(
        "redelastic run",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[torchrun.get_args_parser()],
        add_help=False,  # it comes with torchrun's
    )
    parser.set_defaults(rdzv_backend=os.environ.get("PET_RDZV_BACKEND") or "redis")
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=None)  # 0 must differ from not given
    options = parser._option_string_actions  # noqa: SLF001  # argparse offers no other way to them
    for option, text in HELP.items():
        options[option].help = text
    if theirs := options.get("--print-completion"):  # torchrun has it since torch 2.14
        theirs.help = argparse.SUPPRESS
        refused = _RefusedCompletion(theirs.option_strings, theirs.dest, nargs="?")
        options.update(dict.fromkeys(theirs.option_strings, refused))
    _add_arguments(parser)
    return parser


class _RefusedCompletion(argparse.Action):
    """Torchrun's option, which would print a completion for the command name `torchrun`."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        parser.exit(
            common.USAGE,
            f"{parser.prog}: --print-completion is for torchrun: use redelastic completion bash (or zsh, or fish).\n",
        )


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    from torch.distributed.argparse_util import check_env, env

    group = parser.add_argument_group("options that torchrun does not have (times in seconds)")

    def add(option: str, value: str, text: str, **settings: Any) -> None:
        """Add an option as torchrun does: also with underscores, and with its default from a variable PET_….

        Args:
            option: its name.
            value: what it takes, as its help names it; empty for a flag.
            text: its help.
            settings: for argparse.
        """
        takes = {"action": env, "metavar": value, "type": _TYPES.get(value)} if value else {"action": check_env}
        names = dict.fromkeys((option, "--" + option[2:].replace("-", "_")))
        group.add_argument(*names, **{**takes, "help": text, **settings})

    add(
        "--config",
        "FILE",
        "TOML file with options by their names, such as hang-timeout = 300, and the script as training-script and "
        "training-script-args; flags and variables PET_… outweigh it",
    )
    group.add_argument(
        "--print-config",
        action="store_true",
        help="print the options that would hold, as such a file, and exit; secrets are hidden",
    )
    add("--node-name", "NAME", "name of this node in status and events (default: its hostname)")
    add(
        "--join-secret-file",
        "FILE",
        "file with a secret of 16 bytes or more: this node trains only with nodes that have the same one",
    )
    add("--drain-timeout", "S", "time for workers to save during a drain (default: 30)", default=30.0)
    add(
        "--admit",
        "MODE",
        "when to let this node into a round that trains, which restarts its workers: now; once they were asked to "
        "save, and have (up to --drain-timeout), with --survive once all have paused after a common step; or after a "
        "checkpoint of the job's own (default: saved)",
        choices=["now", "saved", "checkpoint"],
        metavar=None,
    )
    add(
        "--admit-interval",
        "S",
        "how old that round has to be, so that nodes that come together share one restart (default: 10; 0 with "
        "--survive)",
    )
    add(
        "--drain-file",
        "FILE",
        "drain when this file appears; it may contain a Unix time as the deadline",
        type=lambda name: Path(name) if name else None,
    )
    add("--hang-timeout", "S", "restart all workers if one that has reported progress reports none for S seconds")
    add(
        "--hang-start-timeout",
        "S",
        "the same for the time until the first report in a round (default: 1800, or --hang-timeout if longer)",
    )
    add("--max-job-restarts", "N", "restart budget of the whole job; also the default of --max-restarts")
    add(
        "--max-idle-restarts",
        "N",
        "stop the job, with exit code 78, after N consecutive restarts in which no worker reported a higher step "
        f"than before (default: {MAX_IDLE_RESTARTS}; 0: never)",
        default=MAX_IDLE_RESTARTS,
    )
    add("--max-failed-rounds", "N", "exclude a host whose workers failed first in N consecutive rounds")
    add("--preflight", "", "measure all hosts before the first round, and after one in which a worker or a node failed")
    add("--exclude", "", "with --preflight: exclude hosts that stand out, as --max-failed-rounds does")
    add("--preflight-path", "FOLDER", "with --preflight: write here, too; may be repeated", action="append", default=[])
    checks = "check to pass before joining, may be repeated: gpu, disk, memory, …, or none (default: disk)"
    add("--health-check", "NAME", checks, action="append")
    add("--health-command", "COMMAND", "shell command; if it fails, this node does not join")
    add("--health-timeout", "S", "time limit of each check (default: 60)", default=60.0)
    add("--health-port", "PORT", "port for /livez, /readyz and /metrics")
    add("--health-host", "ADDRESS", "address to listen on (default: 127.0.0.1)", default="127.0.0.1")
    add(
        "--survive",
        "",
        "keep workers' processes from round to round: the script calls redelastic.survive() (experimental)",
    )
    add(
        "--park-timeout",
        "S",
        "with --survive: time for workers to leave a round; after that they start anew (default: 10)",
        default=10.0,
    )
    add("--share-gpus", "", "let several workers use one GPU (not with NCCL)")
    add("--share-logs", "", "let the dashboard show the ends of the workers' logs, by Redis")
    add(
        "--preload",
        "MODULE,…",
        "import these modules once and fork workers from that process (such as torch); if one cannot be, "
        "a warning says why, and workers start as new processes",
    )
    theirs = parser._option_string_actions  # noqa: SLF001
    if "--shutdown-timeout" not in theirs:  # torchrun has it since torch 2.12
        add("--shutdown-timeout", "S", "time between SIGTERM and SIGKILL for workers (default: 30)", type=int)
    if "--exit-barrier-timeout" not in theirs:  # torch is about to have it
        add(
            "--exit-barrier-timeout",
            "S",
            "time for the other nodes' workers to end once this node's have; after that this node fails, and the "
            "run stays open (default: no limit)",
        )
    else:
        parser.set_defaults(exit_barrier_timeout=None)


def agent_options(arguments: argparse.Namespace) -> AgentOptions:
    """The options of the agent; the arguments that torchrun's own checks read become what these expect.

    Raises:
        ValueError: an argument is wrong.
    """
    from redelastic.agent import AgentOptions
    from redelastic.host.devices import has_driver

    least, _ = common.node_counts(arguments.nnodes)
    if re.fullmatch(r"-?[0-9]+", arguments.nproc_per_node) and int(arguments.nproc_per_node) < 1:
        raise ValueError(f"--nproc-per-node={arguments.nproc_per_node} is out of range: it must be 1 or more")
    if arguments.standalone and least > 1:
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
    modules = tuple(name.strip() for name in (arguments.preload or "").split(",") if name.strip())
    read: dict[str, Any] = {"health_checks": tuple(c for c in checks if c != "none"), "preload": modules}
    given = {f.name: getattr(arguments, f.name) for f in fields(AgentOptions) if f.name not in read}
    return AgentOptions(**read, **given)


def preflight_options(arguments: argparse.Namespace) -> Options | None:
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
