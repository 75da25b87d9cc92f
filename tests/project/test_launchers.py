"""The process from which the suite forks launchers."""

from __future__ import annotations

import json
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import launchers


def test_imports_of_tests_do_not_prevent_forked_launchers() -> None:
    """All tests' modules are imported by now. One that sets a variable such as TORCH_… doubles the suite's time."""
    template = launchers.template()
    changed = launchers.read_at_start(os.environ).items() ^ template.variables.items()
    assert {name for name, _ in changed} <= {"OMP_NUM_THREADS"}
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    assert template.fits([sys.executable, "-m", "redelastic", "run"], environment)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="pytest runs in one process: -n 8")
def test_the_processes_of_pytest_are_forks() -> None:
    assert "tests.support.launchers" in Path("/proc/self/cmdline").read_text().split("\0")


def test_a_launcher_with_the_pid_of_an_earlier_one_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pids are made up: to choose a real one, for a moment all new processes get those of other tests' dead ones."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(tmp_path / "socket"))
    listener.listen()
    monkeypatch.setenv(launchers.ADDRESS_VARIABLE, str(tmp_path / "socket"))
    with listener, ThreadPoolExecutor() as pool:
        accepted = pool.submit(lambda: listener.accept()[0])

        def say(**message: Any) -> None:
            accepted.result(10).send(json.dumps(message).encode())

        pool.submit(say, template=1, variables={})
        template = launchers.Template()
        with accepted.result(10):
            say(pid=7)
            earlier = template.start([sys.executable, "-m", "platform"], {}, [0], tmp_path)
            say(ended=7, status=0)
            say(pid=7)
            later = template.start([sys.executable, "-m", "platform"], {}, [0], tmp_path)
            assert (earlier.poll(), later.poll()) == (0, None)
            say(ended=7, status=-9)
            assert (earlier.wait(10), later.wait(10)) == (0, -9)
