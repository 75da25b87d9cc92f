"""The fault matrix, a pytest plugin and the command that writes FAULTS.md: faults, promises and measurements.

A test declares a fault with ``@pytest.mark.fault(what, promise)`` and notes measurements with the fixture ``measured``.
With REDELASTIC_FAULTS=FILE a run of pytest appends its results to FILE; ``python -m tests.support.fault_matrix FILE…``
puts them into redelastic/FAULTS.md, where the rows of tests that did not run keep their measurements. ``--check``
fails if that page has other faults than tests declare, or names other tests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

import pytest

TESTS: Final = Path(__file__).parents[1]
PAGE: Final = TESTS.parent / "redelastic" / "FAULTS.md"
UNITS: Final[dict[str, tuple[tuple[float, str], ...]]] = {  # factor and name, the largest first
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "B": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")),
    "": ((1.0, ""),),
}

Measured = Callable[..., None]
_results: Final[list[dict[str, Any]]] = []
_running: Final[list[pytest.Item]] = []  # the test that runs, if one does


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "fault(what, promise): a row of the fault matrix, see tests/support/fault_matrix.py"
    )


@pytest.fixture
def measured() -> Measured:
    """:func:`note`."""
    return note


def note(what: str, value: float, unit: str = "s") -> None:
    """Note a measurement of this test: ``note("detected", 1.2)``; the unit is s, B, or "" for a plain number."""
    assert unit in UNITS
    for test in _running:
        test.user_properties.append(("measured", [what, float(value), unit]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _running[:] = [item]
    item.user_properties.append(("faults", faults_of(item)))


def faults_of(item: pytest.Item) -> list[list[str]]:
    """Section, fault and promise of each fault that a test declares."""
    title = (getattr(item, "module", None).__doc__ or "").strip().split("\n")[0]
    return [[title.rstrip("."), *mark.args] for mark in item.iter_markers("fault")]


def name_of(node_id: str) -> str:
    """A test's name on the page: file and function, without folder and parameters."""
    return node_id.partition("[")[0].rpartition("/")[2]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    faults: Any = dict(report.user_properties).get("faults", ())
    if report.when == "call" and report.passed:
        figures = [value for name, value in report.user_properties if name == "measured"]
        for fault in faults:  # a figure does not say which of several it belongs to
            _results.append({"fault": fault, "measured": figures if len(faults) == 1 else []})


def pytest_sessionfinish(session: pytest.Session) -> None:
    into = os.environ.get("REDELASTIC_FAULTS")
    if into and not hasattr(session.config, "workerinput"):
        with Path(into).open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in _results)


Fault = tuple[str, str, str]  # section, fault, promise


@dataclass
class Row:
    """The measurements of one fault; as a string, its cells on the page."""

    runs: int = 0
    figures: dict[tuple[str, str], list[float]] = field(default_factory=dict)

    def add(self, measured: Iterable[tuple[str, float, str]]) -> None:
        self.runs += 1
        for what, value, unit in measured:
            self.figures.setdefault((what, unit), []).append(value)

    def __str__(self) -> str:
        figures = "; ".join(format_figure(name, unit, values) for (name, unit), values in self.figures.items())
        return f"{figures or '-'} | {self.runs}"


def format_value(value: float, unit: str) -> str:
    """A value with two digits or more, in the largest unit that it has one of."""
    factor, name = next((u for u in UNITS[unit] if abs(value) >= u[0]), UNITS[unit][-1])
    scaled = value / factor
    digits = f"{scaled:,.0f}" if abs(scaled) >= 10 or (not unit and scaled == round(scaled)) else f"{scaled:.2g}"
    return f"{digits} {name}".strip()


def format_figure(what: str, unit: str, values: list[float]) -> str:
    """The median of values, with the lowest and the highest."""
    middle, low, high = (format_value(v, unit) for v in (statistics.median(values), min(values), max(values)))
    return f"{what} {middle}" + (f" ({low} to {high})" if low != high else "")


def declared_faults() -> dict[Fault, set[str]]:
    """The faults that tests declare, with the names of the tests; long tests too."""
    found: dict[Fault, set[str]] = {}

    class Collected:
        def pytest_itemcollected(self, item: pytest.Item) -> None:
            for section, what, promise in faults_of(item):
                found.setdefault((section, what, promise), set()).add(name_of(item.nodeid))

    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(["--collect-only", "-q", str(TESTS)], plugins=[Collected()])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        sys.exit(output.getvalue())
    return found


def faults_on_page(lines: Iterable[str]) -> dict[Fault, tuple[str, set[str]]]:
    """The faults on a page: the cells with measurements and cases, and the names of the tests."""
    found, section = {}, ""
    for line in lines:
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif line.startswith("| ") and not line.startswith("| fault |"):
            what, promise, measured, runs, tests = line.strip("| ").split(" | ")
            found[section, what, promise] = (f"{measured} | {runs}", set(re.findall("`([^`]+)`", tests)))
    return found


def page_lines(faults: dict[Fault, set[str]], measured: Mapping[Fault, object]) -> Iterator[str]:
    """The lines of the page, its rows in the order of the tests' names."""
    sections: dict[str, list[Fault]] = {}
    for fault in sorted(faults, key=lambda fault: sorted(faults[fault])):
        sections.setdefault(fault[0], []).append(fault)
    today = datetime.now(timezone.utc)
    yield from (
        "# Faults",
        "",
        "What the suite does to redelastic, what [PROTOCOL.md](PROTOCOL.md) promises then, and what was measured:",
        "medians (lowest to highest) over all cases of the tests that are named. Written by",
        (
            f"`tests/support/fault_matrix.py` (Python {platform.python_version()}, {os.cpu_count()} cores); a row "
            f"keeps its figures until its test is measured again, the newest are of {today:%Y-%m-%d}."
        ),
    )
    for section, rows in sections.items():
        yield from (
            "",
            f"## {section}",
            "",
            "| fault | promised | measured | cases | shown by |",
            "|---|---|---|---:|---|",
        )
        for fault in rows:
            tests = ", ".join(f"`{test}`" for test in sorted(faults[fault]))
            yield f"| {fault[1]} | {fault[2]} | {measured.get(fault, '- | 0')} | {tests} |"


def differences(faults: dict[Fault, set[str]], on_page: dict[Fault, tuple[str, set[str]]]) -> Iterator[str]:
    """A line for each fault that tests declare otherwise than the page has it."""
    for fault in sorted({*faults, *on_page}):
        row = " | ".join(fault[1:])
        if fault not in on_page:
            yield f"not on the page: {row}"
        elif fault not in faults:
            yield f"declared by no test: {row}"
        elif faults[fault] != on_page[fault][1]:
            yield f"shown by other tests, {', '.join(sorted(faults[fault]))}: {row}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write redelastic/FAULTS.md from results of the suite.")
    parser.add_argument("results", nargs="*", type=Path, help="files that runs with REDELASTIC_FAULTS=FILE wrote")
    parser.add_argument("--check", action="store_true", help="only compare the page with what tests declare")
    arguments = parser.parse_args()
    faults, on_page = declared_faults(), faults_on_page(PAGE.read_text(encoding="utf-8").splitlines())
    if arguments.check:
        if found := list(differences(faults, on_page)):
            sys.exit("\n".join([f"{PAGE.name} is not what tests declare:", *found]))
        return
    rows: dict[Fault, Row] = {}
    for path in arguments.results:
        for line in path.read_text(encoding="utf-8").splitlines():
            result = json.loads(line)
            section, what, promise = result["fault"]
            rows.setdefault((section, what, promise), Row()).add(result["measured"])
    measured = {fault: text for fault, (text, _) in on_page.items()} | rows
    PAGE.write_text("\n".join(page_lines(faults, measured)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
