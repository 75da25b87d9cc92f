"""``redelastic doctor``: check whether Redis, this host and the installation are fit for a run."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, Final

from redelastic.monitoring.wording import clean

from .common import NO, OK, UNREACHABLE, add_server_arguments, endpoint
from .output import open_console, write_json

if TYPE_CHECKING:
    from rich.console import Console

    from redelastic.doctor import Finding, Level

NAME = "doctor"
SUMMARY = "check Redis, this host and the installation, and say what to change"
DESCRIPTION = """\
Check the Redis server, try a rendezvous and a store on it, and check this host.
Takes a few seconds, changes nothing, leaves no keys.

levels:
  ok        as it should be
  note      worth knowing
  warning   works, but may fail one day
  problem   does not work

exit codes:
  0  no problem (there may be warnings)
  1  a problem
  3  Redis cannot be reached, or refuses the login; the rest is shown anyway

--json prints version (1) and findings: a list of group (server, trial, host),
name, level, found, advice (what to do) and numbers (what was measured, with
the unit in the name)."""

_TITLES: Final = {"server": "Redis", "trial": "a run on it", "host": "this host"}
_COLOURS: Final[dict[Level, str]] = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_server_arguments(parser)
    parser.add_argument(
        "--run", metavar="RUN", default="", help="the run that the Redis user is for, if it may use no other keys"
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Examine and report; see :data:`DESCRIPTION`."""
    from redelastic.doctor import examine

    findings = examine(endpoint(arguments), arguments.key_prefix, arguments.run)
    if arguments.json:
        write_json({"findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        _show(findings)
    if any(finding.name == "reachable" and finding.level == "problem" for finding in findings):
        return UNREACHABLE
    return NO if any(finding.level == "problem" for finding in findings) else OK


def _show(findings: list[Finding]) -> None:
    console = open_console()
    with console.capture() as captured:
        _show_table(console, findings)
        _show_what_to_do(console, findings)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _show_table(console: Console, findings: list[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    from redelastic.doctor import LEVELS

    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for group, title in _TITLES.items():
        of_group = [finding for finding in findings if finding.group == group]
        if of_group:
            table.add_row(Text(title, style="bold"))
        for finding in sorted(of_group, key=lambda finding: LEVELS.index(finding.level)):
            fact = Text(clean(finding.found))
            if finding.level == "note" and finding.advice:
                fact.append(f". {clean(finding.advice)}", style="dim")
            table.add_row(Text(f"  {finding.name}"), Text(finding.level, style=_COLOURS[finding.level]), fact)
    console.print(table)


def _show_what_to_do(console: Console, findings: list[Finding]) -> None:
    from rich.padding import Padding
    from rich.text import Text

    for level in ("warning", "problem"):  # the worst last, where the reader looks
        found = [finding for finding in findings if finding.level == level]
        if found:
            title = f"{len(found)} {level}{'s' if len(found) > 1 else ''}"
            console.print(Text(f"\n{title}", style=_COLOURS[level]))
        for finding in found:
            console.print(Padding(Text(f"{finding.name}: {clean(finding.found)}"), (0, 0, 0, 2)))
            if finding.advice:
                console.print(Padding(Text(clean(finding.advice)), (0, 0, 0, 4)))
    if not any(finding.level in ("warning", "problem") for finding in findings):
        console.print(Text("\nfit for a run", style=_COLOURS["ok"]))
