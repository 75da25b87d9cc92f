"""What pytest skipped, so that nothing is skipped everywhere.

With REDELASTIC_LEFT_OUT=FILE, it lists those tests in FILE; ``pytest @FILE`` then runs them. With
REDELASTIC_MAY_SKIP=REGEX, the run fails if a test is skipped for any other reason, or was expected to fail.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import pytest

_left_out: Final[dict[str, str]] = {}  # tests, and modules that are skipped as a whole, with the reason


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _note(report)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    if into := os.environ.get("REDELASTIC_LEFT_OUT"):
        Path(into).write_text("".join(f"{test}\n" for test in _left_out), encoding="utf-8")
    if _refused() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
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
