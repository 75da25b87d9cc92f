"""``redelastic events``: what happened in a run, and why."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from redelastic.logs import say
from redelastic.monitoring.events import KINDS
from redelastic.monitoring.sentences import event_document
from redelastic.monitoring.wording import clean, short

from .common import OK, add_run_argument, add_server_arguments, open_run, whole_number
from .output import add_json_argument, event_table, open_console, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from redelastic.monitoring.events import Event

NAME = "events"
SUMMARY = "what happened in a run, and why"
DESCRIPTION = """\
What happened in a run, oldest first: time (in this machine's time zone), event,
epoch of the last round, node, reason. Redis keeps about the last 10,000 events,
at most 8 MiB. When more than 16 nodes join, start, fail or leave at once, one
line covers up to 64 of them, a second or two later.

Exit code: 0; 3 if Redis cannot be reached; 4 if there is no such run. With
--follow an outage is reported, and Ctrl-C ends the command with 0."""

DEFAULT_COUNT = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new events")
    parser.add_argument(
        "-n",
        metavar="COUNT",
        dest="count",
        type=whole_number(1, 1_000_000),
        default=DEFAULT_COUNT,
        help=f"number of past events to print (default: {DEFAULT_COUNT})",
    )
    parser.add_argument("--detail", action="store_true", help="print details too, such as workers' stacks")
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, events: a list of id, time, event, node, epoch, size (of the\n"
        "round), nodes (all of them, if one event covers several), breaks (whether all\n"
        "members had to regroup), fault (whether something went wrong), text, detail, and\n"
        "the fields of its kind.\n"
        "With --follow: one event per line instead of a list, each with the version.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    opened = open_run(arguments)
    found = opened.events(count=arguments.count + 1)
    older, past = found[: -arguments.count], found[-arguments.count :]
    printer = Printer(json=arguments.json, detail=arguments.detail)
    if arguments.json and not arguments.follow:
        write_json({"run": arguments.run, "events": [event_document(event) for event in past]})
        return OK
    printer.print(past)
    if older:
        say(f"(older events exist: use -n to show more than {arguments.count})")
    if not arguments.follow:
        return OK
    away = False
    try:
        for seen in opened.control.follow(found[-1].id if found else "0"):
            if isinstance(seen, Exception):
                if not away:
                    say(f"redelastic events: {clean(str(seen))} Waiting for it.")
                away = True
                continue
            if away:
                say("redelastic events: Redis is back.")
            away = False
            printer.print(seen)
    except KeyboardInterrupt:
        return OK
    raise AssertionError("a run is followed for ever")


class Printer:
    """Prints events as they come, one per line.

    Args:
        json: as JSON.
        detail: with their details.
    """

    def __init__(self, *, json: bool = False, detail: bool = False) -> None:
        self._json, self._detail = json, detail
        self._console: Console = open_console()
        self._node_width = 0

    def print(self, events: Sequence[Event]) -> None:
        """Print more events."""
        if self._json:
            for event in events:
                write_json(event_document(event))
            return
        self._node_width = max([self._node_width, *(len(clean(short(event.node))) for event in events)])
        wide = not self._console.is_terminal or self._console.width >= 110
        documents = [event_document(event) for event in events]
        batches = [[document] for document in documents] if self._detail else [documents]
        for batch in batches:
            if batch:
                widths = (23 if wide else 12, max(map(len, KINDS)), 2, self._node_width)
                self._console.print(event_table(batch, full=wide, widths=widths))
            for document in batch if self._detail else ():
                for line in document["detail"].splitlines():
                    self._console.print("    " + clean(line.expandtabs()), soft_wrap=True)
        sys.stdout.flush()
