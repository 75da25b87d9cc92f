"""``redelastic drain``: a node saves, leaves, and the others go on without it."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Final

from redelastic.monitoring.events import Left, Lost
from redelastic.monitoring.sentences import sentence
from redelastic.monitoring.wording import duration

from .checkpoint import add_timeout_argument
from .common import NO, OK, add_run_argument, add_server_arguments, open_run
from .output import add_json_argument, answer, attributed, follow, last_event_id, write_line

if TYPE_CHECKING:
    from redelastic.monitoring.control import RunControl
    from redelastic.monitoring.records import Node

NAME = "drain"
SUMMARY = "have a node save and leave; the others go on"
DESCRIPTION = """\
Ask a node to leave: every worker of the run is asked to save, then the node
ends its workers and leaves, and the others regroup at once. The run stays
open. A node under plain torchrun cannot drain.

Exit code: 0 if the node was asked, with --wait if it has left; 1 if it cannot
drain, or has not left in time; 3 if Redis cannot be reached; 4 if there is no
such run or node."""

GRACE: Final = 30.0  # to end workers that do not save in time and to leave, in seconds
MERGE_DELAY: Final = 1.0  # how long an event may wait to be merged with others of its kind, in seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("node", metavar="NODE", help="node id, name, or rank in the round")
    parser.add_argument(
        "--reason", metavar="TEXT", default="", help="reason to record in the events and the nodes' logs"
    )
    add_timeout_argument(parser, "how long the workers have to save")
    parser.add_argument(
        "--wait", action="store_true", help=f"wait until the node has left, for up to --timeout plus {GRACE:g} s"
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
    control = open_run(arguments)
    node = control.find(arguments.node)
    fields = {"node": node.id, "name": node.name, "rank": node.rank, "before": node.draining, "left": None}
    if node.status.get("agent") != "redelastic":
        message = (
            f"Node {node.id} does not run under `redelastic run`, so it cannot drain: send SIGTERM to its torchrun"
        )
        where = node.status.get("host")
        message += f", process {node.status.get('pid')} on {where}." if where else "."
        return answer(arguments, NO, message, **fields, asked=False)
    after = last_event_id(control)
    if not control.drain(node.id, attributed(arguments.reason), arguments.timeout):
        return answer(arguments, NO, f"Node {node.id} left before it could be asked.", **fields, asked=False)
    message = f"Node {node.id} was asked to drain: workers have {arguments.timeout:g} s to save."
    if node.draining:
        message = f"Node {node.id} is already draining, {node.draining}: nothing changes."
    if not arguments.wait:
        return answer(arguments, OK, message, **fields, asked=True)
    if not arguments.json:
        write_line(message)
    started = time.monotonic()
    why = _why_not_left(control, node, after, started + arguments.timeout + GRACE)
    message = f"Node {node.id} " + (why or f"has left, {duration(time.monotonic() - started)} later") + "."
    return answer(arguments, NO if why else OK, message, **fields | {"left": not why}, asked=True)


def _why_not_left(control: RunControl, node: Node, after: str, deadline: float) -> str:
    """Wait for a node to leave; returns what happened instead, or "" if it left."""
    why = "has not left in time: see `redelastic status` and `redelastic events`"
    gone_since: float | None = None
    for seen in follow(control, after):
        now = time.monotonic()
        if isinstance(seen, Exception):
            why = f"may or may not have left: {seen}"
        else:
            for event in (one for several in seen for one in several.each()):
                if event.node == node.id and isinstance(event, Left | Lost):
                    return f"did not leave, it died: it {sentence(event)}" if isinstance(event, Lost) else ""
            if not seen:
                run = control.state()
                here = any(other.id == node.id for other in run.nodes)
                gone_since = None if here else gone_since or now
                if gone_since is not None and now - gone_since > MERGE_DELAY + run.lease:
                    return ""  # a heartbeat has come since: an event would be there
        if now > deadline and (gone_since is None or isinstance(seen, Exception)):
            return why
    raise AssertionError("a run is followed for ever")
