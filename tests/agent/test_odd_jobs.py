"""What few jobs do, and few machines are: `redelastic run` still restarts, saves, waits and says what it should."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from torch.distributed import DistNetworkError

from redelastic.agent.limits import Admission
from redelastic.agent.options import AgentOptions
from redelastic.agent.regrouping import EndExchange
from redelastic.host import checks
from redelastic.monitoring.events import Event
from redelastic.redis.errors import UnreachableError
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, FAILED, AgentJob
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LIMIT, LONG_LEASES
from tests.support.unruly_job import REDELASTIC_RUN, environment

pytestmark = pytest.mark.timeout(150)

UNREADABLE: Final = """
import os
from torch.distributed.elastic.multiprocessing.errors import record

@record
def main():
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ValueError(f"cannot decode image {os.fsdecode(bytes([0xe9]))}")

main()
"""
SAVES: Final = """
import pathlib, signal, sys, time
from redelastic import progress

def save(*_):
    pathlib.Path(sys.argv[1], "saved").touch()

signal.signal(signal.SIGUSR1, save)
while True:
    progress(1)
    pathlib.Path(sys.argv[1], "started").touch()
    time.sleep(0.05)
"""
STAYS: Final = """
import os, pathlib, sys, time

while os.environ["TEST_NODE"] == "b" and not pathlib.Path(sys.argv[1], "finish").exists():
    time.sleep(0.05)
"""
LEAVES: Final = """
import os, pathlib, signal, sys, time

def save(*_):
    sys.exit(0)

signal.signal(signal.SIGUSR1, save)
folder = pathlib.Path(sys.argv[1])
(folder / f"{os.environ['TEST_NODE']}-{os.environ['REDELASTIC_EPOCH']}").touch()
while not (folder / "finish").exists():
    time.sleep(0.05)
"""


def run(folder: Path, program: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(program)
    command = [*REDELASTIC_RUN, "--standalone", *options, str(script)]
    return subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False, **more
    )


@pytest.mark.long
def test_an_error_whose_text_is_no_unicode_is_a_failure_like_any(tmp_path: Path) -> None:
    """A file name of another encoding is."""
    done = run(tmp_path, UNREADABLE, "--max-restarts=1")
    assert done.returncode == 0, done.stderr
    assert r"cannot decode image \udce9" in done.stderr


def test_a_failure_is_seen_though_our_parent_ignores_sigchld(tmp_path: Path) -> None:
    done = run(tmp_path, "raise SystemExit(7)", preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
    assert done.returncode == 1, done.stderr


@pytest.mark.long
def test_a_script_that_a_shell_started_is_asked_to_save(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVES)
    shell = tmp_path / "wrapper.sh"
    shell.write_text(f"#!/bin/sh\n{sys.executable} {tmp_path / 'script.py'} {tmp_path}\nexit $?\n")
    shell.chmod(0o755)
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", script=shell, options=("--no-python", "--drain-timeout=3"), may_end=True)
        job.wait("it runs", (tmp_path / "started").exists)
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert (tmp_path / "saved").exists()


@pytest.mark.parametrize("first", quick_first(["a", "b"]))
def test_scripts_that_save_and_end_with_0_have_not_finished(server: RedisServer, tmp_path: Path, first: str) -> None:
    """As handlers of SIGUSR1 do under Slurm: the node that drains leaves, the others go on."""
    script = tmp_path / "script.py"
    script.write_text(LEAVES)
    with AgentJob(server, tmp_path, "1:3", conf=LONG_LEASES) as job:
        job.start("a", "b", "c", script=script, may_end=True)
        job.wait("all run", lambda: all((tmp_path / f"{name}-1").exists() for name in "abc"))
        job.nodes[first].terminate()
        assert job.wait_end(first) == DRAINED
        others = [name for name in "abc" if name != first]
        job.wait("the others go on", lambda: all((tmp_path / f"{name}-2").exists() for name in others))
        job.tell("finish")
        assert [job.wait_end(name) for name in others] == [0, 0]
        asked = "Local rank 0 got SIGUSR1, which it handles, as a request to save."
        assert all(asked in node.stderr for node in job.nodes.values())


def test_a_finished_node_waits_until_its_limit(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "stays.py").write_text(STAYS)
    with AgentJob(server, tmp_path, "1:2") as job:
        job.start("a", "b", script=tmp_path / "stays.py", options=("--exit-barrier-timeout=0.3",))
        assert job.wait_end("a") == FAILED
        assert "exit_barrier_timeout=0.3 s after this node's; the run stays open for them" in job.nodes["a"].stderr
        job.tell("finish")
        assert job.wait_end("b") == 0


def test_a_node_that_has_finished_does_not_press_a_redis_that_refuses_writes() -> None:
    asked: list[float] = []

    def refuse(*_: object) -> None:
        asked.append(time.monotonic())
        raise DistNetworkError("out of memory")

    over = threading.Event()
    store: Any = SimpleNamespace(set=refuse, wait=refuse)
    ends = EndExchange(store, 0, 2, is_patient=lambda: len(asked) < 5, notify=over.set)
    assert over.wait(LIMIT)
    assert ends.done
    assert len(asked) == 5
    assert asked[-1] - asked[0] > 0.4, "ten times a second at most"


def test_a_host_joins_that_cannot_ask_whether_it_is_excluded() -> None:
    """The join waits until Redis is back."""

    def unreachable(_: str) -> int:
        raise UnreachableError("away")

    noted: list[Event] = []
    admission = Admission(
        node=SimpleNamespace(must_leave=lambda: False, settings=SimpleNamespace(node_name="here")),  # type: ignore[arg-type]
        control=SimpleNamespace(failures=unreachable),  # type: ignore[arg-type]
        options=AgentOptions(health_checks=(), max_failed_rounds=2),
        checked=checks.Node(Path(), 1),
        note=noted.append,
    )
    admission.require()
    assert not admission.barred
    assert noted == []
