"""``redelastic readmit``: let a host that failed repeatedly join again."""

from __future__ import annotations

import argparse

from .checkpoint import add_reason_argument
from .common import OK, add_run_argument, add_server_arguments, open_run
from .output import add_json_argument, answer

NAME = "readmit"
SUMMARY = "readmit a host that was excluded for its failures"
DESCRIPTION = """\
Clear a host's count of consecutive failed rounds, so that it is no longer
excluded; a node that waits there joins at once. `redelastic status RUN` names
such hosts.

Exit code: 0 if it was readmitted; 3 if Redis cannot be reached; 4 if there is
no such run, or the host has no failures to clear."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("name", metavar="NAME", help="host name, as `redelastic status` shows it")
    add_reason_argument(parser, "the events")
    add_server_arguments(parser)
    add_json_argument(
        parser, "run, name, failures (consecutive rounds, cleared), barred (whether it was excluded), message."
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`.

    Raises:
        UnknownNodeError: the host has no failures.
    """
    failures, barred = open_run(arguments).readmit(arguments.name, reason=arguments.reason)
    name = arguments.name
    message = f"Host {name} may join run {arguments.run!r} again: {failures} consecutive failed rounds cleared."
    if not barred:
        message = f"Host {name} was not excluded from run {arguments.run!r}: {failures} failed rounds cleared."
    return answer(arguments, OK, message, name=name, failures=failures, barred=barred)
