"""How commands write: what Redis holds may be anybody's, a terminal is for people, a pipe and JSON for programs."""

from __future__ import annotations

import argparse
import getpass
import json
import math
import os
import re
import socket
import sys
import time
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from redelastic.run.control import RunControl
    from redelastic.run.records import Event

PIPE_WIDTH: Final = 10_000  # columns where there is no terminal: nothing is wrapped or cut
LARGEST: Final = 10**18  # a number beyond this is none of ours
MAX_REASON: Final = 1_000  # characters, as `control` has it: what is longer would not be told again as it was given
NAMES: Final = 4  # of nodes that are told of together
NODE_ID: Final = re.compile(r"(\S+-\d+)-[0-9a-f]{12}\b")  # host's name and process; identity
EVENT_STYLES: Final = {
    "completed": "green",
    "started": "green",
    "readmitted": "green",
    "drain": "yellow",
    "left": "yellow",
    "outage": "yellow",
    "lost": "red",
    "failed": "red",
    "hung": "red",
    "refused": "red",
    "barred": "red",
    "unreached": "red",
    "stopped": "red",
}


def add_json_argument(parser: argparse.ArgumentParser, fields: str) -> None:
    """Offer ``--json``; ``fields`` goes to the end of the help."""
    parser.add_argument("--json", action="store_true", help="print JSON; see below")
    parser.epilog = (
        f"--json: {fields}\nTimes are Unix seconds, durations seconds, sizes bytes; null is what is not known."
    )


def write_json(document: Any) -> None:
    """Write one JSON document on a line of its own; ASCII only, so that no terminal takes it for anything else."""
    sys.stdout.write(json.dumps(document, allow_nan=False) + "\n")
    sys.stdout.flush()


def write_line(line: str) -> None:
    """Write one line of text, what a terminal would obey made visible."""
    sys.stdout.write(clean(line) + "\n")
    sys.stdout.flush()


def open_console() -> Console:
    """Standard output, for text that holds no markup."""
    from rich.console import Console

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # an encoding without "°" is no reason to fail
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def clean(text: str) -> str:
    """``text`` on one line, with everything that a terminal would obey instead of showing it as an escape."""
    return "".join(sign if _is_shown(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_shown(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def number(told: Any) -> float | None:
    """A number that somebody wrote into Redis; None if it is none, or none that we would have written."""
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    return told if abs(told) < LARGEST and math.isfinite(told) else None


def whole(told: Any) -> int | None:
    """As :func:`number`, for what is counted."""
    value = number(told)
    return None if value is None else int(value)


def duration(seconds: float) -> str:
    """A time for people: ``0.8 s``, ``42 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def size(bytes_: float) -> str:
    """A size for people, in binary units: ``71.2G``."""
    for unit in ("B", "K", "M", "G", "T"):
        if abs(bytes_) < 999.5:
            return f"{bytes_:.0f}{unit}" if unit == "B" or bytes_ >= 99.95 else f"{bytes_:.1f}{unit}"
        bytes_ /= 1024
    return f"{bytes_:.0f}P"


def count(n: int, thing: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{n} {thing}" + ("" if n == 1 else "s")


def short(text: str) -> str:
    """``text`` for people: each node's id in it without the part that only tells it from its own earlier selves."""
    return NODE_ID.sub(r"\1", text)


def who() -> str:
    """Who runs this command, for a reason."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def by_whom(reason: str) -> str:
    """The reason that is given to a run: who asked, and what they say to it."""
    return clean(f"by {who()}" + (f": {reason}" if reason else ""))[:MAX_REASON]


def moment(at: float, *, full: bool) -> str:
    """A time of day here, with the date if ``full`` or if it is not today."""
    at = round(at, 3)
    try:
        day, of_day = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)).split()
    except (OverflowError, ValueError, OSError):  # an id that somebody made up
        return f"@{at:.3f}"
    clock = f"{of_day}.{round(at % 1 * 1000):03d}"
    return f"{day} {clock}" if full or day != time.strftime("%Y-%m-%d") else clock


def event_table(events: Iterable[Event], *, full: bool = False, widths: Sequence[int] = (0, 0, 0, 0)) -> Table:
    """Events, one a row: time, event, epoch, node, reason.

    Args:
        events: the oldest first.
        full: whether the date is told even if it is today's.
        widths: of the first four columns, at least.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    for width in widths:
        table.add_column(no_wrap=True, min_width=width)
    table.add_column(overflow="fold")
    for event in events:
        style = EVENT_STYLES.get(event.event, "")
        table.add_row(
            Text(moment(event.time, full=full), "dim"),
            Text(clean(event.event) or "?", style),
            Text(str(event.epoch), justify="right"),
            Text(clean(short(event.node)) or "-"),
            Text(clean(short(reason_of(event)))),
        )
    return table


def reason_of(event: Event) -> str:
    """Why it happened; where it happened to many nodes, to how many, and a few of their names."""
    others = [node for node in event.nodes if node != event.node]
    if not others:
        return event.reason
    names = ", ".join(others[:NAMES]) + (", …" if len(others) > NAMES else "")
    return f"{event.reason} (and {count(len(others), 'more node')}: {names})"


def styled(*parts: str | tuple[str, str]) -> Text:
    """Text of parts, each with or without a style, for people: see :func:`short`."""
    from rich.text import Text

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((clean(short(words)), style) for words, style in pairs))


def follow(control: RunControl, after: str, block: float = 1.0) -> Iterator[list[Event] | Exception]:
    """As :meth:`RunControl.follow`, but an outage does not end it.

    Yields:
        Events; or, as long as Redis is away, every ``block`` seconds the error that says so.
    """
    from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

    while True:
        try:
            for events in control.follow(after, block):
                after = events[-1].id if events else after
                yield events
        except RendezvousConnectionError as e:  # noqa: PERF203  (it waits)
            yield e
            time.sleep(block)


def last_event_id(control: RunControl) -> str:
    """From where to follow if only what happens from now on matters."""
    last = control.events(count=1)
    return last[-1].id if last else "0"


def answer(arguments: argparse.Namespace, code: int, message: str, **fields: Any) -> int:
    """Say what became of a request, and return the exit code; a refusal goes to stderr."""
    if arguments.json:
        write_json({"run": arguments.run, **fields, "message": message})
    elif code:
        sys.stderr.write(f"redelastic {arguments.command.NAME}: {clean(message)}\n")
    else:
        write_line(message)
    return code
