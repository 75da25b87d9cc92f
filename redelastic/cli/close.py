"""``redelastic close``: no new round, or no more work at all."""

from __future__ import annotations

import argparse

from redelastic.monitoring.sentences import cause_document, close_answer

from .checkpoint import add_reason_argument, add_timeout_argument, fields
from .common import OK, add_run_argument, add_server_arguments, end_time_limit, open_run
from .output import add_json_argument, answer

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
    add_reason_argument(parser)
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, closed (why: its event and fields), stopped, before (whether it was closed before), saved, unsaved,\n"
        "unasked (as for `redelastic checkpoint`; null without --stop), message.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    opened = open_run(arguments)
    if arguments.stop:
        end_time_limit()
    closing = opened.close(stop=arguments.stop, reason=arguments.reason, timeout=arguments.timeout)
    state = {"closed": cause_document(closing.why), "stopped": closing.stopped, "before": closing.before}
    return answer(arguments, OK, close_answer(arguments.run, closing), **state, **fields(closing.saves))
