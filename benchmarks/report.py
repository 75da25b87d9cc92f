"""A benchmark's results as tables: printed, written as JSON, and compared with earlier results.

A benchmark is a module with a function ``run(quick, progress)`` that yields tables; its docstring's first sentence is
the question that it answers. ``report.main(run, …)`` is its command line.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import provenance

RESULTS: Final = Path(__file__).parent / "results"
UNITS: Final[dict[str, tuple[tuple[float, str], ...]]] = {  # from the largest to the smallest
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "/s": ((1e6, "M/s"), (1e3, "k/s"), (1.0, "/s")),
    "%": ((1.0, "%"),),
    "": ((1.0, ""),),
}
MISSED: Final = "**missed**"
WITHIN_NOISE: Final = "within noise"
SLOWER: Final = 1.5  # a ratio that grew by this factor is a regression: less is this machine's noise

Progress = Callable[[str], None]
Run = Callable[[bool, Progress], Iterator["Table"]]


@dataclass(frozen=True)
class Spread:
    """Something measured several times.

    Attributes:
        median, low, high: of all values; 99 % of them are at most ``p99``.
        n: how many values.
    """

    median: float
    low: float
    high: float
    p99: float
    n: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """From the values themselves."""
        ordered = sorted(values)
        p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
        return cls(statistics.median(ordered), ordered[0], ordered[-1], p99, len(ordered))


@dataclass
class Table:
    """Cases against contenders.

    Attributes:
        name: the table's name, usable as a file name.
        title: the question, in a few words.
        case: what distinguishes the rows, such as "nodes".
        unit: of all cells: "s", "B", "/s", "%" or "".
        base: the column that ratios refer to: ours.
        cells: by row and column; a text says why there is no figure.
        targets: by row, what ``base`` has to reach, or the first column if no contender is ours.
        leads: by column, the minimum ratio of that contender's time to ours, in every row.
        yardstick: the column that regressions are judged by: one that computes rather than sleeps; empty for all.
    """

    name: str
    title: str
    case: str
    unit: str = "s"
    base: str = "redelastic"
    cells: dict[str, dict[str, Spread | str]] = field(default_factory=dict)
    targets: dict[str, float] = field(default_factory=dict)
    leads: dict[str, float] = field(default_factory=dict)
    yardstick: str = ""

    def put(self, row: object, column: str, found: Iterable[float] | float | str) -> None:
        """Enter a result: values, one value, or why there is none."""
        values = [found] if isinstance(found, int | float) else found
        self.cells.setdefault(str(row), {})[column] = values if isinstance(values, str) else Spread.of(values)

    @property
    def columns(self) -> list[str]:
        """The columns in order of entry, ours first."""
        found = dict.fromkeys(column for row in self.cells.values() for column in row)
        return sorted(found, key=lambda column: column != self.base)

    def ratio(self, row: str, column: str) -> float | None:
        """A contender's value as a multiple of ours."""
        ours, theirs = (self.cells[row].get(name) for name in (self.base, column))
        known = isinstance(ours, Spread) and isinstance(theirs, Spread) and ours.median > 0
        return theirs.median / ours.median if known else None  # type: ignore[union-attr]


def shown(value: float, unit: str) -> str:
    """A figure with its unit, to three digits."""
    factor, name = next((u for u in UNITS[unit] if abs(value) >= u[0]), UNITS[unit][-1])
    scaled = value / factor
    return f"{scaled:,.0f} {name}".strip() if scaled >= 100 else f"{scaled:.3g} {name}".strip()


def times(ratio: float) -> str:
    """A ratio, with meaningful digits only."""
    return f"{ratio:,.0f} x" if ratio >= 9.95 else f"{ratio:.2g} x"


def markdown(table: Table) -> Iterator[str]:
    """The table as a README shows it: medians, their ratios to ours, and the target."""
    heads = [table.case, *table.columns, *(["target"] if table.targets else [])]
    yield from (f"**{table.title}**", "", f"| {' | '.join(heads)} |", f"|---:|{'---:|' * (len(heads) - 1)}")
    for row, cells in table.cells.items():
        texts = [row]
        for column in table.columns:
            cell = cells.get(column, "-")
            if isinstance(cell, Spread):
                ratio = table.ratio(row, column) if column != table.base else None
                cell = shown(cell.median, table.unit) + (f" · {times(ratio)}" if ratio is not None else "")
            texts.append(cell)
        texts += [shown(table.targets[row], table.unit) if row in table.targets else "-"] if table.targets else []
        yield f"| {' | '.join(texts)} |"


def judged(table: Table) -> Iterator[tuple[str, str, str, str, bool]]:
    """For each target: the case, the target, the result, its share of the target, and whether it is met."""
    for row, target in table.targets.items():
        ours = table.cells[row].get(table.base, next(iter(table.cells[row].values())))
        case, most = f"{table.case}: {row}", f"at most {shown(target, table.unit)}"
        if isinstance(ours, Spread):
            share = f"{ours.median / target:.0%}" if ours.median > 0 else WITHIN_NOISE
            yield case, most, shown(ours.median, table.unit), share, ours.median <= target
        else:
            yield case, most, ours or "-", "-", False
    for column, lead in table.leads.items():
        found = {row: ratio for row in table.cells if (ratio := table.ratio(row, column)) is not None}
        for row in sorted(found, key=lambda row: found[row])[:1]:
            case, least = f"{table.case}: {row}, where {column} is nearest", f"{column} at least {times(lead)} ours"
            yield case, least, times(found[row]), f"{found[row] / lead:.0%}", found[row] >= lead


def summary(tables: Iterable[tuple[str, Table]]) -> Iterator[str]:
    """All targets in one table, with the command that measures each."""
    yield from ("| what | case | to be reached | median | of that | | command |", "|---|---|---:|---:|---:|---|---|")
    for command, table in tables:
        for case, target, found, share, reached in judged(table):
            mark = "" if reached else MISSED
            yield f"| {table.title} | {case} | {target} | {found} | {share} | {mark} | `{command}` |"


def document(name: str, tables: Iterable[Table]) -> dict[str, Any]:
    """The document to write as JSON."""
    return {"benchmark": name, **provenance(), "tables": [asdict(table) for table in tables]}


def tables_of(found: dict[str, Any]) -> list[Table]:
    """The tables of a document."""
    tables = [Table(**entry) for entry in found["tables"]]
    for table in tables:
        table.cells = {
            row: {name: cell if isinstance(cell, str) else Spread(**cell) for name, cell in cells.items()}  # type: ignore[arg-type]
            for row, cells in table.cells.items()
        }
    return tables


def ratios(page: str) -> dict[tuple[str, str, str], float]:
    """The contenders' ratios in a page of :func:`markdown` tables, by table, row and column."""
    found: dict[tuple[str, str, str], float] = {}
    title, heads = "", list[str]()
    for line in page.splitlines():
        if line.startswith("**"):
            title, heads = line.strip("*"), []
        row, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        heads = heads or cells
        for column, cell in zip(heads, cells, strict=False):
            if ratio := re.search(r" · (\S+) x$", cell):
                found[title, row, column] = float(ratio[1].replace(",", ""))
    return found


def regressions(before: str, now: Iterable[Table]) -> Iterator[str]:
    """Where we have lost ground against a contender since a page was written: times depend on the machine."""
    known = ratios(before)
    for table in now:
        for row, column in product(table.cells, [table.yardstick] if table.yardstick else table.columns):
            was, is_now = known.get((table.title, row, column)), table.ratio(row, column)
            if was and is_now and (is_now / was if table.unit == "/s" else was / is_now) > SLOWER:
                yield f"{table.title}, {row}, {column} / {table.base}: {was:.3g} x before, {is_now:.3g} x now"


def main(run: Run, name: str, question: str) -> int:
    """The command line of one benchmark."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=question)
    parser.add_argument("--quick", action="store_true", help="few and small cases: whether it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    tables = []
    for table in run(options.quick, show_progress(name)):
        tables.append(table)
        sys.stdout.write("\n".join(markdown(table)) + "\n\n")
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(document(name, tables), indent=1) + "\n")
    return 0


def show_progress(name: str) -> Progress:
    """Show on standard error what is being measured: in place on a terminal, else one line each."""
    began = time.monotonic()

    def tell(what: str) -> None:
        line = f"{time.monotonic() - began:6.1f} s  {name}: {what}"
        sys.stderr.write(f"\r{line[:100]:<100}" if sys.stderr.isatty() else line + "\n")
        sys.stderr.flush()

    return tell
