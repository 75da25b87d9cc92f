"""``redelastic close``: no new round, or no more work at all."""

from __future__ import annotations

import argparse

from redelastic.monitoring.events import Closed, Stopped
from redelastic.monitoring.sentences import cause, cause_document

from .checkpoint import add_timeout_argument, ask_to_save
from .common import OK, add_run_argument, add_server_arguments, open_run
from .output import add_json_argument, answer, attributed

NAME = "close"
SUMMARY = "close a run: no new round"
DESCRIPTION = """\
Close a run: no new round forms, and waiting nodes are turned away.
Workers of the current round may finish. With --stop they are asked to save, and
then ended, even if the run was closed before. A closed run cannot be reopened:
use a new run id.

Exit code: 0 if the run is closed, whoever closed it first; 3 if Redis cannot be
reached; 4 if there is no such run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("--stop", action="store_true", help="end the workers too, once they have saved")
    add_timeout_argument(parser, "with --stop: how long the workers have to save first; 0: end them at once")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="reason to record in the events and the nodes' logs"
    )
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, closed (why: its event and fields), stopped, before (whether it was closed before), saved, unsaved,\n"
        "unasked (as for `redelastic checkpoint`; null without --stop), message.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    control = open_run(arguments)
    earlier = control.state()  # also refuses to close a run that does not exist: more likely a typo
    reason = attributed(arguments.reason)
    saves = None
    if arguments.stop and arguments.timeout > 0 and not earlier.stopped:
        saves = ask_to_save(control, f"the run is about to be stopped {reason}", arguments.timeout)
    why = control.close(reason, stop=arguments.stop)
    stopped = arguments.stop or earlier.stopped
    asked = (Stopped if arguments.stop else Closed)(cause="asked", reason=reason)
    before = earlier.closed is not None or why != asked
    message = (
        f"Run {arguments.run!r} was already closed ({cause(why)})" if before else f"Run {arguments.run!r} is closed"
    )
    message += ": its nodes end their workers." if stopped else ": no new round; running workers may finish."
    if saves:
        message += f" Before, {saves.message}."
    fields = saves.fields if saves else {"saved": None, "unsaved": None, "unasked": None}
    return answer(arguments, OK, message, closed=cause_document(why), stopped=stopped, before=before, **fields)
