"""The benchmarks, one after the other: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.report import MISSED, RESULTS, markdown, regressions, summary, tables_of

# Benchmarks, and the seconds that each may take: some more than it needs on 2 cores.
LIMITS: Final = {
    "rendezvous": 240,
    "scale": 300,
    "store": 170,
    "recovery": 330,
    "survive": 900,
    "agent": 240,
    "start": 120,
    "data": 60,
    "join_secret": 90,
    "peers": 2700,
    "load": 300,
}
BENCHMARKS: Final = tuple(LIMITS)
DEFAULT: Final = BENCHMARKS[:-2]  # peers installs other tools; load looks for limits and compares nothing
WORK: Final = ("user", "nice", "system", "irq", "softirq")  # of /proc/stat, where `user` includes guests
README: Final = Path(__file__).parent / "README.md"
TARGETS: Final = "targets.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"

Document = dict[str, Any]  # as a benchmark writes it: provenance and tables


def measure(name: str, path: Path, *, quick: bool, limit: float) -> Document | None:
    """Run one benchmark in a process group of its own; returns None if it failed or took too long.

    Reports the CPU that a virtual machine's host took away meanwhile: it changes ratios too.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str(path), *(["--quick"] if quick else [])]
    before = psutil.cpu_times()
    with subprocess.Popen(command, start_new_session=True) as process:
        try:
            ended_well = process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{name}: not within {limit:g} s\n")
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            share = stolen(before, psutil.cpu_times())
            sys.stderr.write(f"{name}: of the cores' time that it wanted, the host gave {share:.1%} to others\n")
    return json.loads(path.read_text()) if ended_well else None


def stolen(before: Any, after: Any) -> float:
    """The share of the CPU time wanted by this machine that it did not get.

    Args:
        before: ``psutil.cpu_times()``.
        after: the same, later.
    """
    wanted: dict[str, float] = {name: getattr(after, name) - getattr(before, name) for name in (*WORK, "steal")}
    return wanted["steal"] / max(sum(wanted.values()), 1e-9)


def command_of(name: str) -> str:
    """The command that measures it alone."""
    return f"python -m benchmarks.{name}"


def page(name: str, found: Document) -> str:
    """A benchmark's tables, and when and where they were measured."""
    where = f"{found['cores']} cores, torch {found['torch']}, Redis {found['redis']}, commit {found['commit']}"
    lines = [f"# `{command_of(name)}`", "", f"{found['date']}, {where}", ""]
    for table in tables_of(found):
        lines += [*markdown(table), ""]
    return "\n".join(lines)


def targets(kept: str, measured: Mapping[str, Document]) -> str:
    """The page of all targets, with new rows for what was measured."""
    head, rule, *new = summary(
        (command_of(name), table) for name, found in measured.items() for table in tables_of(found)
    )
    old = [row for row in kept.splitlines() if not any(f"`{command_of(name)}`" in row for name in measured)]
    rows = [row for name in BENCHMARKS for row in (*old, *new) if f"`{command_of(name)}`" in row]
    return "\n".join(["# Targets", "", head, rule, *rows, ""])


def with_results(readme: str, folder: Path) -> str:
    """The README with the missed targets and the links to all tables in a folder."""
    _, _, head, rule, *rows = (folder / TARGETS).read_text().splitlines()
    missed = [row for row in rows if MISSED in row]
    lines = [f"{len(rows) - len(missed)} of {len(rows)} [targets](results/{TARGETS}) are met. Missed:"]
    lines += ["", head, rule, *missed, "", "| tables | measured |", "|---|---|"]
    for name in BENCHMARKS:
        if (path := folder / f"{name}.md").exists():
            lines.append(f"| [{name}](results/{name}.md) | {path.read_text().splitlines()[2]} |")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{rest.partition(END)[2]}"


def keep(measured: Mapping[str, Document], folder: Path, readme: Path) -> None:
    """Write the tables and the targets of what was measured, and name them in the README."""
    for name, found in measured.items():
        (folder / f"{name}.md").write_text(page(name, found))
    (folder / TARGETS).write_text(targets((folder / TARGETS).read_text(), measured))
    readme.write_text(with_results(readme.read_text(), folder))


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(BENCHMARKS)} (default: all but peers and load)"
    )
    parser.add_argument("--quick", action="store_true", help="only whether they work; nothing is kept")
    parser.add_argument("--limit", type=float, help="seconds for each (default: as much as each needs on 2 cores)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the figures into this folder too")
    parser.add_argument("--keep", action="store_true", help="write the tables to benchmarks/results, and the README")
    options = parser.parse_args()
    names = options.names or (BENCHMARKS if options.quick else DEFAULT)
    if unknown := set(names) - LIMITS.keys():
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    with tempfile.TemporaryDirectory() as made:
        folder = options.json or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        found = {
            name: measure(name, folder / f"{name}.json", quick=options.quick, limit=options.limit or LIMITS[name])
            for name in names
        }
    measured = {name: document for name, document in found.items() if document}
    failed = [name for name in names if name not in measured]
    lost = [] if options.quick else [line for name in measured for line in lost_ground(name, measured[name])]
    for what, lines in (("these failed", failed), ("against the same contender, slower than before", lost)):
        if lines:
            sys.stderr.write(f"{what}:\n" + "\n".join(lines) + "\n")
    if options.keep and not options.quick:
        keep(measured, RESULTS, README)
    return 1 if failed or lost else 0


def lost_ground(name: str, found: Document) -> list[str]:
    """Where new results are worse than the kept ones."""
    kept = RESULTS / f"{name}.md"
    return list(regressions(kept.read_text(), tables_of(found))) if kept.exists() else []


if __name__ == "__main__":
    sys.exit(main())
