"""A pytest plugin: the summary has the time of each folder's tests, with setup and teardown."""

from __future__ import annotations

from collections import Counter
from typing import Final

import pytest

_seconds: Final[Counter[str]] = Counter()
_tests: Final[Counter[str]] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    folder = report.nodeid.partition("::")[0].rpartition("/")[0]
    _seconds[folder] += report.duration  # type: ignore[assignment]  # a Counter adds up floats too
    _tests[folder] += report.when == "call"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if len(_seconds) < 2:
        return
    terminalreporter.section("time by folder, over all processes")
    for folder, seconds in _seconds.most_common():
        terminalreporter.write_line(f"{seconds:7.1f} s  {_tests[folder]:5} tests  {folder}")
