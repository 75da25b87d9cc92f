"""With REDELASTIC_LEFT_OUT=FILE, pytest lists in FILE the tests that it skipped; ``pytest @FILE`` then runs those."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

_left_out: Final[dict[str, None]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped:
        _left_out[report.nodeid] = None


def pytest_sessionfinish(session: pytest.Session) -> None:
    into = os.environ.get("REDELASTIC_LEFT_OUT")
    if into and not hasattr(session.config, "workerinput"):
        Path(into).write_text("".join(f"{test}\n" for test in _left_out), encoding="utf-8")
