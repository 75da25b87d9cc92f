"""``redelastic logs``: where workers write their logs, and the end of the first failed worker's log."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from redelastic.logs import say
from redelastic.monitoring.wording import clean, duration, short

from .common import NO, OK, UNKNOWN, add_run_argument, add_server_arguments, open_run, whole_number
from .output import add_json_argument, moment, open_console, write_json, write_line

if TYPE_CHECKING:
    from redelastic.monitoring.documents import FailedWorker, Failure, Place

NAME: Final = "logs"
SUMMARY: Final = "where each rank's log is; the last lines of the worker that failed first"
DESCRIPTION: Final = """\
Where each rank of the last round writes its log, and on which node. With
--failed: why the last round that failed did, or that all nodes fell silent, and the
last lines of the worker that failed first in the latest round that lost no node:
where one is lost, the workers fail because a peer is gone. Only `redelastic run`
reports what workers did. A worker whose
output goes to a terminal or a pipe has no log file: use --log-dir with
--redirects=3 or --tee=3. Of what goes to a pipe, as in a container, the agent
keeps the last lines. Known secrets in those lines are hidden.

Exit code: 0; 1 if there is nothing to show; 3 if Redis cannot be reached; 4 if
there is no such run or rank."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument(
        "--rank", metavar="R", type=whole_number(0, 10**9), help="only this rank, with its last lines if it failed"
    )
    parser.add_argument("--failed", action="store_true", help="the last lines of the worker that failed first")
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, logs: a list of rank, node, epoch, path; failed: the worker that failed\n"
        "first, or null: rank, node, epoch, path, time, tail (the last lines); failure: why\n"
        "the last round that failed did, as in redelastic status, or null.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    rank = arguments.rank
    logs = open_run(arguments).logs(rank)
    found, failed, why = logs["logs"], logs["failed"], logs["failure"]
    code, nothing = OK, ""
    if rank is not None and not found and failed is None:
        code, nothing = UNKNOWN, f"no agent has reported a log of rank {rank} in run {arguments.run!r}."
    elif arguments.failed and failed is None and why is None:
        code, nothing = NO, f"no agent has reported a failed worker in run {arguments.run!r}."
    elif not found and failed is None and not arguments.failed:
        code, nothing = NO, f"no agent has reported a log in run {arguments.run!r} (see redelastic logs --help)."
    if arguments.json:
        write_json(logs)
    elif nothing:
        say(f"redelastic {NAME}: {clean(nothing)}")
    else:
        if arguments.failed and why:
            _show_reason(why)
        if found and not arguments.failed:
            _show_places(found)
        if failed and (arguments.failed or rank is not None):
            _show_failure(failed)
        elif failed:
            write_line(f"rank {failed['rank']} failed first in round {failed['epoch']}; --failed shows its last lines")
    return code


def _show_reason(why: Failure) -> None:
    write_line(f"round {why['epoch']} failed at {moment(why['time'], full=True)}")
    for name, line in why["lines"]:
        write_line(f"  {name:<6} {line}")


def _show_places(found: list[Place]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("rank", "node", "log"):
        table.add_column(name, justify="right" if name == "rank" else "left", overflow="fold")
    for place in found:
        table.add_row(Text(str(place["rank"])), Text(clean(short(place["node"]))), Text(clean(place["path"])))
    open_console().print(table)


def _show_failure(failed: FailedWorker) -> None:
    import time

    ago = duration(time.time() - failed["time"])
    failure = f"rank {failed['rank']} on {short(failed['node'])} failed in round {failed['epoch']}, {ago} ago"
    write_line(f"{failure} ({moment(failed['time'], full=True)}): {failed['path'] or 'it has no log file'}")
    for line in failed["tail"].splitlines():
        write_line("    " + line.expandtabs())
