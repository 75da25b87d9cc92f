"""``redelastic checkpoint``: have all workers of a run save now; and how other commands do so first."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from redelastic.monitoring.events import Saved
from redelastic.monitoring.wording import count, duration

from .common import NO, OK, add_run_argument, add_server_arguments, end_time_limit, open_run
from .output import add_json_argument, answer, attributed

if TYPE_CHECKING:
    from redelastic.monitoring.control import RunControl

NAME = "checkpoint"
SUMMARY = "have all workers save now"
DESCRIPTION = """\
Ask all workers of a run to save, and wait until they have. They go on training.
A worker can be asked if its script calls redelastic.should_checkpoint(), as the
callbacks for Lightning and Transformers do.

Exit code: 0 if all have saved; 1 if not, or not in time; 3 if Redis cannot be
reached; 4 if there is no such run."""

TIMEOUT: Final = 30.0  # for workers to save, in seconds
PAUSE: Final = 0.05  # between two looks at first, in seconds; later a tenth of the time that has passed


class Outcome(NamedTuple):
    """What became of a request to save."""

    saved: int  # number of nodes whose workers have saved
    unsaved: list[int]  # ranks of the nodes whose workers have not, or not in time
    unasked: int  # number of nodes with no worker that could be asked
    message: str

    @property
    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {"saved": self.saved, "unsaved": self.unsaved, "unasked": self.unasked}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    add_timeout_argument(parser, "how long the workers have to save")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="reason to record in the events and the nodes' logs"
    )
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, saved (number of nodes whose workers have saved), unsaved (ranks of the\n"
        "nodes whose workers have not), unasked (number of nodes with none to ask), message.",
    )


def add_timeout_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the option that limits the time for saving."""
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=seconds, default=TIMEOUT, help=f"{what} (default: {TIMEOUT:g})"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    control = open_run(arguments)
    outcome = ask_to_save(control, attributed(arguments.reason), arguments.timeout)
    done = outcome.saved > 0 and not outcome.unsaved and not outcome.unasked
    message = f"Run {arguments.run!r}: {outcome.message}."
    return answer(arguments, OK if done else NO, message, **outcome.fields)


def ask_to_save(control: RunControl, reason: str, timeout: float) -> Outcome:
    """Ask all workers of a run to save, and wait until they have, or for ``timeout`` seconds."""
    from redelastic.monitoring.control import RESAVE_INTERVAL

    before = control.state()
    reached = {n.rank for n in before.nodes if n.rank is not None and n.status.get("agent") == "redelastic"}
    asked = control.save(reason, timeout) if reached else None
    if asked is None:
        return Outcome(0, [], 0, "no node trains that could be asked to save")
    end_time_limit()
    started = time.monotonic()
    unsaved = sorted(reached)
    while (passed := time.monotonic() - started) <= timeout and unsaved:
        unsaved = sorted(reached.intersection(control.unsaved(asked)))
        if unsaved:
            time.sleep(max(PAUSE, passed / 10))
    # Workers that were asked moments before are not asked again: what became of that request counts for this one.
    lately = control.events(f"{max(0, round(1000 * (before.time - RESAVE_INTERVAL)))}-0")
    each = (one for event in lately for one in event.each())
    outcomes = {one.node: one.asked for one in each if isinstance(one, Saved)}
    unasked = sum(outcomes.get(node.id) == 0 for node in before.nodes if node.rank in reached)
    saved = len(reached) - len(unsaved) - unasked
    return Outcome(saved, unsaved, unasked, _words(saved, unsaved, unasked, time.monotonic() - started))


def _words(saved: int, unsaved: list[int], unasked: int, passed: float) -> str:
    parts = [f"the workers of {count(saved, 'node')} have saved"] if saved else []
    if unsaved:
        first = ", ".join(map(str, unsaved[:8])) + (", …" if len(unsaved) > 8 else "")
        parts.append(f"those of rank {first} have not within {duration(passed)}")
    if unasked:
        parts.append(f"on {count(unasked, 'node')} no worker could be asked: none calls should_checkpoint()")
    return "; ".join(parts)


def seconds(text: str) -> float:
    """The type of an argument that is a time."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1e6:
        raise argparse.ArgumentTypeError(f"must be a number of seconds from 0 to 1,000,000, not {text!r}")
    return value
