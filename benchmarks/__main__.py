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
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.report import MISSED, RESULTS, markdown, regressions, summary, tables_of

BENCHMARKS: Final = ("rendezvous", "scale", "store", "recovery", "agent", "start", "crowd", "load")
DEFAULT: Final = BENCHMARKS[:-1]  # load looks for limits and compares nothing
WORK: Final = ("user", "nice", "system", "irq", "softirq")  # of /proc/stat, where `user` includes guests
README: Final = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- results -->", "<!-- end of results -->"


def measure(name: str, folder: Path, *, quick: bool, limit: float) -> bool:
    """Run one benchmark in a process group of its own; returns whether it ended well and in time.

    Reports the CPU that a virtual machine's host took away meanwhile: it changes ratios too.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", "--plots", str(folder)]
    command += ["--json", str(folder / f"{name}.json")]
    before = psutil.cpu_times()
    with subprocess.Popen([*command, *(["--quick"] if quick else [])], start_new_session=True) as process:
        try:
            return process.wait(limit) == 0
        except subprocess.TimeoutExpired:
            sys.stderr.write(f"{name}: not within {limit:g} s\n")
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            share = stolen(before, psutil.cpu_times())
            sys.stderr.write(f"{name}: of the cores' time that it wanted, the host gave {share:.1%} to others\n")


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


def kept(folder: Path) -> dict[str, dict[str, Any]]:
    """A folder's documents, by benchmark."""
    return {name: json.loads(path.read_text()) for name in BENCHMARKS if (path := folder / f"{name}.json").exists()}


def setting_of(found: dict[str, Any]) -> str:
    """When and where a document's figures were measured."""
    where = f"{found['cores']} cores, torch {found['torch']}, Redis {found['redis']}, commit {found['commit']}"
    return f"{found['date']}, {where}"


def targets(documents: dict[str, dict[str, Any]]) -> list[str]:
    """A row for each target."""
    return list(summary((command_of(name), table) for name in documents for table in tables_of(documents[name])))


def pages(folder: Path) -> Iterator[tuple[str, str]]:
    """The pages beside the documents, by file name: all targets, then each benchmark's tables and pictures."""
    documents = kept(folder)
    yield "targets.md", "\n".join(["# Targets", "", *targets(documents), ""])
    for name, found in documents.items():
        lines = [f"# `{command_of(name)}`", "", setting_of(found), ""]
        for table in tables_of(found):
            lines += [*markdown(table), ""]
            lines += [f"![{table.title}]({table.name}.png)", ""] if table.log is not None else []
        yield f"{name}.md", "\n".join(lines)


def overview(folder: Path) -> Iterator[str]:
    """The targets missed, and where all tables are."""
    documents = kept(folder)
    head, rule, *rows = targets(documents)
    missed = [row for row in rows if MISSED in row]
    yield f"{len(rows) - len(missed)} of {len(rows)} [targets](results/targets.md) are met. Missed:"
    yield from ("", head, rule, *missed, "", "| tables | measured |", "|---|---|")
    for name, found in documents.items():
        yield f"| [{name}](results/{name}.md) | {setting_of(found)} |"
    yield ""


def with_results(page: str, folder: Path) -> str:
    """The page with its results replaced by these."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n" + "\n".join(overview(folder)) + f"\n{END}{rest.partition(END)[2]}"


def main() -> int:
    """Measure, and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all but load)")
    parser.add_argument("--quick", action="store_true", help="only whether they work; nothing is kept")
    parser.add_argument("--limit", type=float, default=600, help="seconds for each (default: 600)")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="write the figures into this folder too")
    parser.add_argument(
        "--keep", action="store_true", help="write tables and pictures to benchmarks/results and benchmarks/README.md"
    )
    options = parser.parse_args()
    names = options.names or (BENCHMARKS if options.quick else DEFAULT)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        failed = [name for name in names if not measure(name, folder, quick=options.quick, limit=options.limit)]
        lost = [] if options.quick else list(lost_ground(folder))
        for what, found in (("these failed", failed), ("against the same contender, slower than before", lost)):
            if found:
                sys.stderr.write(f"{what}:\n" + "\n".join(found) + "\n")
        for path in folder.glob("*.json") if options.json else ():
            (options.json / path.name).write_bytes(path.read_bytes())
        if options.keep and not options.quick:
            RESULTS.mkdir(exist_ok=True)
            for path in folder.iterdir():
                (RESULTS / path.name).write_bytes(path.read_bytes())
            for name, text in pages(RESULTS):
                (RESULTS / name).write_text(text)
            README.write_text(with_results(README.read_text(), RESULTS))
    return 1 if failed or lost else 0


def lost_ground(folder: Path) -> Iterator[str]:
    """Where new results are worse than the kept ones."""
    old, new = kept(RESULTS), kept(folder)
    for name in old.keys() & new.keys():
        yield from regressions(tables_of(old[name]), tables_of(new[name]))


if __name__ == "__main__":
    sys.exit(main())
