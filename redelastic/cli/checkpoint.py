"""``redelastic checkpoint``: have all workers of a run save now; and how other commands do so first."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from redelastic.monitoring.events import SAVE_TIMEOUT
from redelastic.monitoring.sentences import save_answer

from .common import NO, OK, add_run_argument, add_server_arguments, end_time_limit, open_run
from .output import add_json_argument, answer

if TYPE_CHECKING:
    from redelastic.monitoring.operator import Saves

NAME = "checkpoint"
SUMMARY = "have all workers save now"
DESCRIPTION = """\
Ask all workers of a run to save, and wait until they have. They go on training.
A worker can be asked if its script calls redelastic.should_checkpoint(), as the
callbacks for Lightning and Transformers do.

Exit code: 0 if all have saved; 1 if not, or not in time; 3 if Redis cannot be
reached; 4 if there is no such run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    add_timeout_argument(parser, "how long the workers have to save")
    add_reason_argument(parser)
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, saved (number of nodes whose workers have saved), unsaved (ranks of the\n"
        "nodes whose workers have not), unasked (number of nodes with none to ask), message.",
    )


def add_timeout_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option that limits the time for saving."""
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=SAVE_TIMEOUT, help=f"{what} (default: {SAVE_TIMEOUT:g})"
    )


def add_reason_argument(parser: argparse.ArgumentParser, recorded_in: str = "the events and the nodes' logs") -> None:
    """Add the option that says why."""
    parser.add_argument("--reason", metavar="TEXT", default="", help=f"reason to record in {recorded_in}")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    opened = open_run(arguments)
    end_time_limit()
    saves = opened.checkpoint(reason=arguments.reason, timeout=arguments.timeout)
    message = f"Run {arguments.run!r}: {save_answer(saves)}."
    return answer(arguments, OK if saves.complete else NO, message, **fields(saves))


def fields(saves: Saves | None) -> dict[str, Any]:
    """For JSON."""
    return {name: getattr(saves, name, None) for name in ("saved", "unsaved", "unasked")}


def seconds(text: str) -> float:
    """The type of an argument that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to 1,000,000, not {text!r}")
    return value
