"""``redelastic readmit``: a host that failed again and again may join again."""

from __future__ import annotations

import argparse

from .common import OK, add_run_argument, add_server_arguments, open_run
from .output import add_json_argument, answer, by_whom

NAME = "readmit"
SUMMARY = "let a host join again that was kept out for its failures"
DESCRIPTION = """\
Forget that workers of a host failed first in rounds in a row, so that it is kept
out no longer; a node there that waits to be readmitted joins at once. `redelastic
status RUN` names such hosts.

Exit code: 0 when it was readmitted; 3 when Redis cannot be reached; 4 when there
is no such run, or the host has no failures to forget."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("name", metavar="NAME", help="the host's name, as `redelastic status` shows it")
    parser.add_argument("--reason", metavar="TEXT", default="", help="for the events")
    add_server_arguments(parser)
    add_json_argument(parser, "run, name, failures (rounds in a row, forgotten), barred (whether it was), message.")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`.

    Raises:
        UnknownNodeError: the host has no failures.
    """
    control = open_run(arguments)
    from redelastic.run.control import UnknownNodeError

    before, name = control.state(), arguments.name
    if not control.readmit(name, by_whom(arguments.reason)):
        others = ", ".join(f"{n} ({failures})" for n, failures in sorted(before.failures.items())[:8])
        raise UnknownNodeError(
            f"Run {arguments.run!r} holds no failures against a host {name!r}; "
            + (f"against these it does: {others}." if others else "nor against any other.")
        )
    failures, barred = before.failures.get(name, 0), name in before.barred
    message = f"Host {name} may join run {arguments.run!r} again: {failures} failed rounds in a row are forgotten."
    if not barred:
        message = f"Host {name} was not kept out of run {arguments.run!r}: {failures} failed rounds are forgotten."
    return answer(arguments, OK, message, name=name, failures=failures, barred=barred)
