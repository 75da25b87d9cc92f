"""``redelastic drain``: a node saves, leaves, and the others go on without it."""

from __future__ import annotations

import argparse
import time

from redelastic.monitoring.events import DRAIN_GRACE
from redelastic.monitoring.sentences import drain_answer
from redelastic.monitoring.wording import duration

from .checkpoint import add_reason_argument, add_timeout_argument
from .common import NO, OK, add_run_argument, add_server_arguments, open_run
from .output import add_json_argument, answer, write_line

NAME = "drain"
SUMMARY = "have a node save and leave; the others go on"
DESCRIPTION = """\
Ask a node to leave: every worker of the run is asked to save, then the node
ends its workers and leaves, and the others regroup at once. The run stays
open. A node under plain torchrun cannot drain.

Exit code: 0 if the node was asked, with --wait if it has left; 1 if it cannot
drain, or has not left in time; 3 if Redis cannot be reached; 4 if there is no
such run or node."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("node", metavar="NODE", help="node id, name, or rank in the round")
    add_reason_argument(parser)
    add_timeout_argument(parser, "how long the workers have to save")
    parser.add_argument(
        "--wait", action="store_true", help=f"wait until the node has left, for up to --timeout plus {DRAIN_GRACE:g} s"
    )
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, node, name, rank, asked, before (why it was draining already, or\n"
        '""), left (with --wait: whether it has left; else null), message.',
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`.

    Raises:
        UnknownNodeError, UnknownRunError: there is no such node or run.
    """
    asked = open_run(arguments).drain(arguments.node, reason=arguments.reason, timeout=arguments.timeout)
    node = asked.node
    fields = {"node": node.id, "name": node.name, "rank": node.rank, "before": node.draining, "asked": asked.asked}
    message = drain_answer(asked)
    if not asked.asked or not arguments.wait:
        return answer(arguments, OK if asked.asked else NO, message, **fields, left=None)
    if not arguments.json:
        write_line(message)
    started = time.monotonic()
    why = asked.wait()
    message = f"Node {node.id} " + (why or f"has left, {duration(time.monotonic() - started)} later") + "."
    return answer(arguments, NO if why else OK, message, **fields, left=not why)
