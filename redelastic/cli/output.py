"""The commands' output: untrusted text made safe, tables for people, and JSON for programs."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from redelastic.logs import say
from redelastic.monitoring.events import VERSION
from redelastic.monitoring.wording import clean, short

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


PIPE_WIDTH: Final = 10_000  # columns where there is no terminal: nothing is wrapped or cut
_STYLES: Final = {
    "green": ("completed", "started", "readmitted", "preflight"),
    "yellow": ("drain", "left", "outage"),
}
EVENT_STYLES: Final = {event: style for style, events in _STYLES.items() for event in events}  # of what is no fault
_PHASE_STYLES: Final = {"running": "green", "dead": "red", "corrupt": "red", "empty": ""}


def add_json_argument(parser: argparse.ArgumentParser, fields: str) -> None:
    """Offer ``--json``; ``fields`` is appended to the help."""
    parser.add_argument("--json", action="store_true", help="print JSON; see below")
    units = "Times are Unix seconds, durations seconds (_ms: milliseconds), sizes bytes; null means unknown."
    parser.epilog = f"--json: version ({VERSION}), {fields}\n{units}"


def write_json(document: Mapping[str, Any]) -> None:
    """Write one JSON document on a line of its own; ASCII only, so that no terminal can misread it."""
    sys.stdout.write(json.dumps({"version": VERSION, **document}, allow_nan=False) + "\n")
    sys.stdout.flush()


def write_line(line: str) -> None:
    """Write one line of text, with anything a terminal would obey made visible."""
    sys.stdout.write(clean(line) + "\n")
    sys.stdout.flush()


def open_console() -> Console:
    """Standard output, for text without markup."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # do not fail on an encoding without "°"
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def moment(at: float, *, full: bool) -> str:
    """A local time of day, with the date if ``full`` or if it is not today."""
    try:
        local = datetime.fromtimestamp(round(at, 3))  # noqa: DTZ006  # in this machine's time zone
    except (OverflowError, ValueError, OSError):  # a made-up id
        return f"@{at:.3f}"
    day, clock = local.isoformat(" ", "milliseconds").split()
    return f"{day} {clock}" if full or day != time.strftime("%Y-%m-%d") else clock


def event_table(
    events: Iterable[Mapping[str, Any]], *, full: bool = False, widths: Sequence[int] = (0, 0, 0, 0)
) -> Table:
    """Events, one per row: time, event, epoch, node, reason.

    Args:
        events: oldest first, as :func:`~redelastic.monitoring.sentences.event_document` gives them.
        full: whether the date is shown even if it is today's.
        widths: minimum widths of the first four columns.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for width in widths:
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for event in events:
        style = "red" if event["fault"] else EVENT_STYLES.get(event["event"], "")
        table.add_row(
            Text(moment(event["time"], full=full), "dim"),
            Text(clean(event["event"]) or "?", style),
            Text(str(event["epoch"]), justify="right"),
            Text(clean(short(event["node"])) or "-"),
            Text(clean(short(event["text"]))),
        )
    return table


def phase_style(phase: str, *, failed: bool) -> str:
    """The colour of a run's phase; red if it is dead, or was closed because of a fault."""
    if phase in {"closed", "stopped"}:
        return "red" if failed else ""
    return _PHASE_STYLES.get(phase, "yellow")


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of parts, each with or without a style, for people: see :func:`short`."""
    from rich.text import Text

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((clean(short(words)), style) for words, style in pairs))


def answer(arguments: argparse.Namespace, code: int, message: str, **fields: Any) -> int:
    """Report the outcome of a request, and return the exit code; a refusal goes to stderr."""
    if arguments.json:
        write_json({"run": arguments.run, **fields, "message": message})
    elif code:
        say(f"redelastic {arguments.command.NAME}: {clean(message)}")
    else:
        write_line(message)
    return code
