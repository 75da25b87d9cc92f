"""``redelastic list``: list the runs on a Redis."""

from __future__ import annotations

import argparse
from typing import Any

from redelastic.monitoring.wording import clean, duration, known
from redelastic.redis.keys import RunKeys

from .common import OK, add_server_arguments, open_connection
from .output import add_json_argument, open_console, phase_style, write_json, write_line

NAME = "list"
SUMMARY = "list the runs on a Redis"
DESCRIPTION = """\
List the runs on a Redis under a key prefix: those with nodes, and those that
ended recently (within their ttl).

Exit code: 0; 3 if Redis cannot be reached, or if this user may see only one
run's keys."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "runs: a list of run, phase (as in `redelastic status`, or corrupt), failed\n"
        "(whether a fault closed it, or it is dead), epoch, size (of the last round), members,\n"
        "candidates, spares, age (of that round).",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    from redelastic.monitoring.control import list_runs

    connection = open_connection(arguments)
    prefix = arguments.key_prefix
    found = [_summary(connection, prefix, run_id) for run_id in list_runs(connection, prefix)]
    runs = [summary for summary in found if summary is not None]
    if arguments.json:
        write_json({"runs": runs})
    elif not runs:
        write_line(f"Redis at {connection.name} has no run with the key prefix {prefix!r}.")
    else:
        _show(runs)
    return OK


def _summary(connection: Any, prefix: str, run_id: str) -> dict[str, Any] | None:
    from redelastic.monitoring.control import RunControl, UnknownRunError
    from redelastic.monitoring.report import summary, unread
    from redelastic.redis.errors import CorruptStateError

    try:
        state = RunControl(connection, RunKeys(run_id, prefix)).state()
    except (UnknownRunError, ValueError):  # it has just gone; no run can have that name
        return None
    except CorruptStateError:
        return unread(run_id, "corrupt")
    return summary(state)


def _show(runs: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    table.add_column("phase", no_wrap=True)
    for name in ("epoch", "members", "waiting", "spares", "round age"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in runs:
        phase = Text(one["phase"], phase_style(one["phase"], failed=one["failed"]))
        counts = [known(one[name]) for name in ("epoch", "members", "candidates", "spares")]
        age = "-" if one["age"] is None else duration(one["age"])
        table.add_row(Text(clean(one["run"])), phase, *counts, age)
    open_console().print(table)
