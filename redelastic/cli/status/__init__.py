"""``redelastic status``: the state of a run, and what is wrong with it."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Final

from redelastic.cli.common import NO, OK, add_run_argument, add_server_arguments, open_run
from redelastic.cli.output import add_json_argument, open_console, write_json

if TYPE_CHECKING:
    from redelastic.monitoring.documents import Status
    from redelastic.monitoring.operator import Run

    from .view import Screen

NAME = "status"
SUMMARY = "show the state of a run, and what is wrong with it"
DESCRIPTION = """\
The state of a run: a verdict, what is wrong (lines with "!"), the nodes by rank,
and the last events. heard: time since the last heartbeat; step: the lowest of
the node's workers; idle: the longest time since one of its workers made progress;
cpu: percent of one core; gpu: number, lowest and highest utilisation, fullest
memory, highest temperature; G: GiB; restarts: of the node's workers, for any reason.
Effective training time (ETTR) is the share of the nodes' time, spares excluded,
in which workers made new steps, since the run began; redone: in which they made
steps again. Both follow from redelastic.progress(step), as the reference says.

Verdicts: running; forming and regrouping (a round is being completed); closed;
stopped (workers were ended too); empty (no node is there); dead (all nodes have
been silent for longer than their lease).

Exit code: 0 for running, forming, regrouping and closed; 1 for stopped, empty
and dead; 3 if Redis cannot be reached; 4 if there is no such run. With --watch
an outage is shown, and Ctrl-C ends the command with 0."""

BAD_PHASES: Final = frozenset({"stopped", "empty", "dead"})
ROWS: Final = 25  # nodes, if no terminal's height limits them
PAUSE: Final = 0.25  # between two reads at least, in seconds: a thousand joins must not cause a thousand reads


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_run_argument(parser)
    parser.add_argument("--watch", action="store_true", help="keep updating until Ctrl-C")
    parser.add_argument("--workers", action="store_true", help="show each node's workers too")
    parser.add_argument(
        "--all", action="store_true", help=f"show all nodes, not only {ROWS} (nodes with problems first, then by rank)"
    )
    add_server_arguments(parser)
    add_json_argument(
        parser,
        "run, time, verdict, phase, epoch, size, min_nodes, max_nodes, age,\n"
        "broken, closed, stopped, deadline, lease, waits_for, restarts,\n"
        "restarts_without_progress, step, idle, ettr, redone, failures, barred, failure, problems\n"
        "(of the run), nodes, events. failure, of the last round or the one before, or null: epoch,\n"
        "time, cause (failed, lost, left; null: not known), node, rank and more of the worker,\n"
        "log, waits, others, survived, stopped, charged, excluded, ended, next_epoch, down, lines (in\n"
        "words). A node: id, name, host, pid, rank, standing (member, candidate, spare), state, draining,\n"
        "heard, lease, agent, restarts, shares_logs, cpu, memory, memory_available, memory_total, step,\n"
        "idle, workers, gpus, gpus_hidden (why\n"
        "its GPUs are not shown), problems.\n"
        "With --watch: one document per line, with trouble (why it is out of date).",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command; see :data:`DESCRIPTION`."""
    opened = open_run(arguments)
    report = opened.status()
    if arguments.watch:
        try:
            _watch(opened, arguments, report)
        except KeyboardInterrupt:
            return OK
    if arguments.json:
        write_json(report)
    else:
        _screen(arguments).print(report)
    return NO if report["phase"] in BAD_PHASES else OK


def _screen(arguments: argparse.Namespace) -> Screen:
    from .view import Screen

    return Screen(open_console(), rows=None if arguments.all else ROWS, workers=arguments.workers)


def _watch(opened: Run, arguments: argparse.Namespace, report: Status) -> None:
    """Show the run until a signal ends the command."""
    from redelastic.monitoring.control import UnknownRunError
    from redelastic.redis.errors import RedelasticError

    screen = _screen(arguments)

    def show(trouble: str) -> None:
        if arguments.json:
            write_json({**report, "trouble": trouble})
        else:
            screen.update(report, trouble)

    with screen.live(shown=not arguments.json):
        show("")
        for seen in opened.control.follow(opened.last_read):
            trouble = str(seen) if isinstance(seen, Exception) else ""
            if not trouble:
                try:
                    report = opened.status()
                except (RedelasticError, UnknownRunError) as e:
                    trouble = str(e)
            show(trouble)
            time.sleep(PAUSE)
