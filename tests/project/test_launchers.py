"""The process from which the suite forks launchers."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support import launchers

LAST_PID = Path("/proc/sys/kernel/ns_last_pid")  # the next process gets the next number that is free


def test_imports_of_tests_do_not_prevent_forked_launchers() -> None:
    """All tests' modules are imported by now. One that sets a variable such as TORCH_… doubles the suite's time."""
    template = launchers.template()
    changed = launchers.read_at_start(os.environ).items() ^ template.variables.items()
    assert {name for name, _ in changed} <= {"OMP_NUM_THREADS"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert template.fits([sys.executable, "-m", "redelastic", "run"], environment)


@pytest.mark.skipif(not os.access(LAST_PID, os.W_OK), reason="pids cannot be chosen here")
def test_a_launcher_with_the_pid_of_an_earlier_one_has_not_ended() -> None:
    with tempfile.TemporaryFile() as out:

        def start(module: str) -> launchers.Launcher:
            command, environment = [sys.executable, "-m", module], {**os.environ, "OMP_NUM_THREADS": "1"}
            return launchers.template().start(command, environment, [out.fileno()] * 3, Path.cwd())

        earlier = start("platform")
        assert earlier.wait(60) == 0
        while True:  # another process may get the number first
            LAST_PID.write_text(str(earlier.pid - 1))
            later = start("http.server")
            if later.pid == earlier.pid:
                break
            later.kill()
            later.wait(60)
        try:
            assert later.poll() is None
        finally:
            later.kill()
        assert later.wait(60) == -9
        assert earlier.poll() == 0
