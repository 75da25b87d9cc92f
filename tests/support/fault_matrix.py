"""The fault matrix: what the suite does to redelastic, what is promised in each case, and what was measured.

A test says what it does with ``@pytest.mark.fault(what, promise)``, and what it measured with the fixture ``measured``.
With REDELASTIC_FAULTS=FILE a run of pytest adds its results to FILE; ``python tests/support/fault_matrix.py FILE…``
writes them to redelastic/FAULTS.md; ``--check`` only says whether that page lists exactly what was run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import pytest

PAGE: Final = Path(__file__).parents[2] / "redelastic" / "FAULTS.md"
UNITS: Final[dict[str, tuple[tuple[float, str], ...]]] = {  # from the largest to the smallest
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "": ((1.0, ""),),
}

Measured = Callable[..., None]
_results: Final[list[dict[str, Any]]] = []
_running: Final[list[pytest.Item]] = []  # at most one


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "fault(what, promise): a row of the fault matrix, see tests/support/fault_matrix.py"
    )


@pytest.fixture
def measured() -> Measured:
    """Notes a figure for the fault matrix, like :func:`note`."""
    return note


def note(what: str, value: float, unit: str = "s") -> None:
    """Note a figure of the running test: ``note("detected", 1.2)``; units are s, B, or "" for plain numbers."""
    assert unit in UNITS
    for test in _running:
        test.user_properties.append(("measured", [what, float(value), unit]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]
    if mark := item.get_closest_marker("fault"):
        what, promise = mark.args
        title = (getattr(item, "module", None).__doc__ or "").strip().split("\n")[0]
        item.user_properties.append(("fault", [title, what, promise]))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    of = dict(report.user_properties).get("fault")
    if of and report.when == "call" and report.passed:
        figures = [value for name, value in report.user_properties if name == "measured"]
        test = report.nodeid.partition("[")[0].rpartition("/")[2]
        _results.append({"fault": of, "test": test, "measured": figures})


def pytest_sessionfinish(session: pytest.Session) -> None:
    into = os.environ.get("REDELASTIC_FAULTS")
    if into and not hasattr(session.config, "workerinput"):
        with Path(into).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in _results)


@dataclass
class Row:
    """One fault."""

    runs: int = 0
    tests: set[str] = field(default_factory=set)
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, test: str, measured: Iterable[tuple[str, float, str]]) -> None:
        self.runs += 1
        self.tests.add(test)
        for what, value, unit in measured:
            self.figures.setdefault((what, unit), []).append(value)


def shown(value: float, unit: str) -> str:
    factor, name = next((u for u in UNITS[unit] if abs(value) >= u[0]), UNITS[unit][-1])
    scaled = value / factor
    digits = f"{scaled:,.0f}" if abs(scaled) >= 10 or (not unit and scaled == round(scaled)) else f"{scaled:.2g}"
    return f"{digits} {name}".strip()


def figure(what: str, unit: str, values: list[float]) -> str:
    middle, low, high = (shown(v, unit) for v in (statistics.median(values), min(values), max(values)))
    return f"{what} {middle}" + (f" ({low} to {high})" if low != high else "")


def page(results: Iterable[dict[str, Any]]) -> Iterator[str]:
    sections: dict[str, dict[tuple[str, str], Row]] = {}
    for result in sorted(results, key=lambda r: (r["test"].partition("::")[0], r["test"])):
        title, what, promise = result["fault"]
        row = sections.setdefault(title, {}).setdefault((what, promise), Row())
        row.add(result["test"], result["measured"])
    today = datetime.now(timezone.utc)
    yield from (
        "# Faults",
        "",
        "What the suite does to redelastic, what [PROTOCOL.md](PROTOCOL.md) promises then, and what was measured:",
        "medians (lowest to highest) over all cases of the tests that are named. Written by",
        (
            f"`tests/support/fault_matrix.py` from a run of the suite on {today:%Y-%m-%d} "
            f"(Python {platform.python_version()}, {os.cpu_count()} cores)."
        ),
    )
    for title, rows in sections.items():
        yield from (
            "",
            f"## {title.rstrip('.')}",
            "",
            "| fault | promised | measured | cases | shown by |",
            "|---|---|---|---:|---|",
        )
        for (what, promise), row in rows.items():
            figures = "; ".join(figure(name, unit, values) for (name, unit), values in row.figures.items())
            tests = ", ".join(f"`{test}`" for test in sorted(row.tests))
            yield f"| {what} | {promise} | {figures or '-'} | {row.runs} | {tests} |"


def faults_of(lines: Iterable[str]) -> set[str]:
    """The faults and promises that a page lists."""
    return {" | ".join(line.split(" | ")[:2]) for line in lines if line.startswith("| ") and "| fault |" not in line}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write redelastic/FAULTS.md from results of the suite.")
    parser.add_argument("results", nargs="+", type=Path, help="what runs with REDELASTIC_FAULTS=FILE have left")
    parser.add_argument("--check", action="store_true", help="only compare the faults with those on the page")
    arguments = parser.parse_args()
    texts = [path.read_text(encoding="utf-8") for path in arguments.results]
    lines = list(page(json.loads(line) for text in texts for line in text.splitlines()))
    if arguments.check:
        listed, run = faults_of(PAGE.read_text(encoding="utf-8").splitlines()), faults_of(lines)
        differences = [f"not on the page: {row}" for row in run - listed] + [f"not run: {row}" for row in listed - run]
        if differences:
            sys.exit("\n".join([f"{PAGE.name} is not what was run:", *sorted(differences)]))
    else:
        PAGE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
