"""The process from which the suite forks launchers."""

from __future__ import annotations

import os
import sys

from tests.support import launchers


def test_imports_of_tests_do_not_prevent_forked_launchers() -> None:
    """All tests' modules are imported by now. One that sets a variable such as TORCH_… doubles the suite's time."""
    template = launchers.template()
    changed = launchers.read_at_start(os.environ).items() ^ template.variables.items()
    assert {name for name, _ in changed} <= {"OMP_NUM_THREADS"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert template.fits([sys.executable, "-m", "redelastic", "run"], environment)
