"""``redelastic timeline``: a run as a page in a file: nodes over time, rounds and faults, and where the time went."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from redelastic.cli import common, output
from redelastic.logs import say
from redelastic.monitoring.sentences import event_document
from redelastic.monitoring.wording import count

if TYPE_CHECKING:
    from redelastic.monitoring.events import Event
    from redelastic.monitoring.history import History

NAME: Final = "timeline"
SUMMARY: Final = "draw a run: nodes over time, rounds, failures, where the time went"
DESCRIPTION: Final = """\
Draw a run's nodes and rounds from its events: which node trained when, what
broke each round, and how much of the nodes' time went into training, steps that
were made again, starting, waiting, and getting from the last step of a round to
the next round.

The file is one HTML page that loads nothing: it opens from disk in any browser,
which also prints it or saves it as PDF.

Exit code: 0; 1 if the run has no events; 2 if the file cannot be written; 3 if
Redis cannot be reached; 4 if there is no such run."""

SUFFIXES: Final = (".html", ".htm")
_AS_THEY_ARE: Final = ("start", "end", "complete", "outages", "seconds", "ettr", "redone")  # in the JSON document
_AGO: Final = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)([smhd])", re.ASCII)
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    common.add_run_argument(parser)
    common.add_server_arguments(parser)
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the page to write (default: timeline-RUN.html, with --json none)"
    )
    parser.add_argument(
        "--since", metavar="WHEN", default="", help="start at this time: 90s, 15m, 8h or 2d ago, or 2026-11-20T18:00"
    )
    output.add_json_argument(
        parser,
        "run, start, end, complete (whether the run's beginning is known:\n"
        "Redis keeps some 10,000 events), closed, outages, seconds (of all nodes, by state),\n"
        "ettr (effective training time ratio: the share of them in which nodes trained,\n"
        "spares not counted; null: no worker has called redelastic.progress()), redone (the\n"
        "share in which they made steps again), nodes (id, name, gone, spans: state, start,\n"
        "end, epoch, rank), events,\n"
        "rounds (epoch, size, completed_at, because, members: rank by node, started_at,\n"
        "broken_at, broken_by, fault_at: when that began, down: from the fault to the\n"
        "next round, restart: until its workers ran, last_progress_at).",
    )


def run(arguments: argparse.Namespace) -> int:
    """Draw the run.

    Raises:
        ValueError: the file cannot be written, or an argument is wrong.
    """
    out: Path | None = arguments.out
    if out is None and not arguments.json:
        out = Path(re.sub(r"[^\w.-]", "_", f"timeline-{arguments.run}.html"))
    since = _moment(arguments.since) if arguments.since else None
    if out is not None:
        _check(out)
    history = common.open_run(arguments).history()
    from redelastic.monitoring.events import is_fault

    if history is None:
        say(f"redelastic timeline: run {arguments.run!r} has no events.")
        return common.NO
    if since is not None:
        if since > history.end:
            raise ValueError(
                f"--since {arguments.since}: the last event of run {arguments.run!r} is "
                f"{time.time() - history.end:.0f} s old."
            )
        history = history.since(since)
    if arguments.json:
        output.write_json(_document(arguments.run, history))
    if out is not None:
        size = _write(out, history, arguments.run)
        broken = [this.broken_by for this in history.rounds if this.broken_at is not None]
        summary = f"{count(len(history.nodes), 'node')}, {count(len(history.rounds), 'round')}, {len(broken)} broken"
        summary += f", {sum(map(is_fault, broken))} by faults" if broken else ""
        say(f"{out}: {summary}; {size:,} bytes")
    return common.OK


def _check(out: Path) -> None:
    """Report errors before anything is read."""
    if out.suffix.lower() not in SUFFIXES:
        raise ValueError(f"--out {out} must end in .html: the page is HTML, which a browser can print or save as PDF.")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no directory {out.parent}.")


def _write(out: Path, history: History, run_id: str) -> int:
    from redelastic.dashboard.standalone import page

    try:
        return out.write_bytes(page(run_id, history).encode())
    except OSError as e:
        raise ValueError(f"--out {out} cannot be written: {e.strerror}.") from e


def _moment(when: str) -> float:
    """A time in Unix seconds."""
    if ago := _AGO.fullmatch(when):
        return time.time() - float(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(when).timestamp()  # local time where no zone is given
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"--since {when!r} is invalid: use 15m or 8h, or 2026-11-20T18:00.") from None


def _document(run_id: str, history: History) -> dict[str, Any]:
    def shown(event: Event | None) -> dict[str, Any] | None:
        return event_document(event) if event else None

    return {
        "run": run_id,
        **{name: getattr(history, name) for name in _AS_THEY_ARE},
        "closed": shown(history.closed),
        "nodes": [
            {"id": node.id, "name": node.name, "gone": shown(node.gone), "spans": [*map(asdict, node.spans)]}
            for node in history.nodes
        ],
        "rounds": [{**vars(this), "broken_by": shown(this.broken_by)} for this in history.rounds],
        "events": [event_document(event) for event in history.events],
    }
