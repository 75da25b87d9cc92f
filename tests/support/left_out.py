"""A pytest plugin: long tests are left out, and skipped tests are listed, or fail the run.

Tests with the marker ``long`` run only with REDELASTIC_LONG=1; else the summary has their number.

With REDELASTIC_LEFT_OUT=FILE, the names of skipped tests go into FILE, and ``pytest @FILE`` runs them elsewhere. With
REDELASTIC_MAY_SKIP=REGEX, the run fails if a test is skipped for a reason that does not match, or is expected to fail.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.long_tests import LONG

_left_out: Final[dict[str, str]] = {}  # reasons, by the id of a test, or of a module that is skipped as a whole
_long: Final[set[str]] = set()  # ids of tests; with xdist, each process has collected them all
_KEY: Final = "long tests"  # in what a process of xdist sends to the one that reports


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: runs only with REDELASTIC_LONG=1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = [] if LONG else [item for item in items if item.get_closest_marker("long")]
    if left:
        _long.update(item.nodeid for item in left)
        items[:] = [item for item in items if item.nodeid not in _long]
        config.hook.pytest_deselected(items=left)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _long.update(getattr(node, "workeroutput", {}).get(_KEY, ()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_KEY] = list(_long)
        return
    if into := os.environ.get("REDELASTIC_LEFT_OUT"):
        Path(into).write_text("".join(f"{test}\n" for test in _left_out), encoding="utf-8")
    if _refused() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _long:
        terminalreporter.section("long")
        terminalreporter.write_line(f"{len(_long)} long tests were left out; .ci/long runs them")
    if refused := _refused():
        terminalreporter.section("may not be skipped here")
        for test in refused:
            terminalreporter.write_line(f"{test}: {_left_out[test]}")


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    expected = getattr(report, "wasxfail", None)
    why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    _left_out[report.nodeid] = why if expected is None else f"expected to fail: {expected}"


def _refused() -> list[str]:
    allowed = os.environ.get("REDELASTIC_MAY_SKIP")
    return [] if allowed is None else [test for test, why in _left_out.items() if not re.search(allowed, why)]
