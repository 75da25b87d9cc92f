"""Agents whose Redis goes away, or whose peer dies, while their nodes end, drain or are refused."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Final

import pytest

from redelastic.monitoring.events import Completed
from redelastic.redis.server import RedisServer
from tests.support import launchers
from tests.support.agent_job import DRAINED, FAILED, REFUSED
from tests.support.liveness import lives
from tests.support.long_tests import quick_first, quick_rows
from tests.support.torchrun_job import LIMIT, LONG_LEASES
from tests.support.unruly_job import REDELASTIC_RUN, UNRULY, UnrulyJob, environment, read_pid

pytestmark = pytest.mark.timeout(150)

SHORT: Final = {"read_timeout": 2, "close_timeout": 1, "join_timeout": 4}  # for calls, in seconds


@pytest.mark.fault("workers fail while Redis is away for good", "the agent ends in time, with its workers' error")
@pytest.mark.parametrize(
    ("max_restarts", "message"),
    quick_rows([(0, "exitcode  : 5 ("), (3, "redelastic run: Redis at redis://")]),
    ids=["the last time", "with restarts left"],
)
def test_workers_fail_while_redis_is_gone_for_good(
    own_server: RedisServer, tmp_path: Path, max_restarts: int, message: str
) -> None:
    """The node ends within the timeouts that are set for calls."""
    with UnrulyJob(own_server, tmp_path, "1:1", conf=SHORT) as job:
        job.begin("a", action="fail_at_the_end", max_restarts=max_restarts)
        job.lose_redis()
        job.tell("finish")
        assert job.wait_end("a") == FAILED
        assert message in job.nodes["a"].stderr
        assert "that this node is leaving" in job.nodes["a"].stderr
        assert "Traceback" not in job.nodes["a"].stderr


@pytest.mark.fault("workers finish while Redis is away for good", "the agent ends in time, with success")
@pytest.mark.parametrize("names", quick_first(["a", "ab"]))
def test_workers_succeed_while_redis_is_gone_for_good(own_server: RedisServer, tmp_path: Path, names: str) -> None:
    """Each node succeeds with its own workers: without Redis it cannot learn how the others ended."""
    conf = SHORT if len(names) > 1 else {"close_timeout": 1}  # a node alone waits for no other
    with UnrulyJob(own_server, tmp_path, f"{len(names)}:{len(names)}", conf=conf) as job:
        job.begin(*names)
        job.lose_redis()
        job.tell("finish")
        for name in names:
            assert job.wait_end(name) == 0
            err = job.nodes[name].stderr
            assert "that this node is leaving" in err
            assert ("whether the other nodes' workers have is unknown" in err) == (names == "ab")
            assert "Traceback" not in err


@pytest.mark.fault("a node drains while Redis is away", "it leaves when its workers have saved")
def test_a_drain_while_redis_is_gone(own_server: RedisServer, tmp_path: Path) -> None:
    """Without Redis the node leaves long before its drain timeout."""
    with UnrulyJob(own_server, tmp_path, "1:1", conf=SHORT) as job:
        job.begin("a", options=("--drain-timeout=600",))
        job.lose_redis()
        worker = read_pid(tmp_path / "a-started")
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert not lives(worker)
        assert len(job.nodes["a"].stderr.splitlines()) < 12


@pytest.mark.fault("a node is refused while Redis goes away", "it says why it was refused")
def test_a_refusal_outlives_redis(own_server: RedisServer, run_id: str, tmp_path: Path) -> None:
    where = [f"--rdzv-id={run_id}", f"--rdzv-endpoint={own_server.url}", "--rdzv-conf=read_timeout=1,close_timeout=1"]
    check = f"--health-command=kill -9 {own_server.pid}; echo the fan is broken; exit 3"
    command = [*REDELASTIC_RUN, *where, check, str(UNRULY), str(tmp_path)]
    done = launchers.run(command, environment(), LIMIT)
    assert done.returncode == REFUSED
    [said] = [line for line in done.stderr.splitlines() if "the fan is broken" in line]
    assert said == f"redelastic run: This node does not join run {run_id!r}: command: the fan is broken."


@pytest.mark.fault("Redis goes away while a node waits for the others' end", "it ends when they do")
def test_an_outage_while_a_node_waits_for_the_others_end(own_server: RedisServer, tmp_path: Path) -> None:
    """The waiting node must not take the outage for the other node's end, and close the run."""
    with UnrulyJob(own_server, tmp_path, "2:2") as job:
        first, second = _one_ends_first(job, tmp_path)
        pid = own_server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        job.wait("it has noticed the outage", lambda: "Redis has been away" in job.nodes[first].stderr)
        time.sleep(4)  # longer than a call and all its retries there
        os.kill(pid, signal.SIGCONT)
        job.wait("it has noticed the return", lambda: "Redis is back" in job.nodes[first].stderr)
        assert "closed" not in job.redis("run")
        assert job.nodes[first].process.poll() is None, "it still waits"
        job.tell("finish")
        assert [job.wait_end(name) for name in (first, second)] == [0, 0]


@pytest.mark.fault("a node dies while another waits for its end", "the other runs its workers again, and ends")
def test_a_node_that_dies_while_another_waits_for_its_end(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        first, second = _one_ends_first(job, tmp_path)
        assert job.nodes[first].process.poll() is None, "it waits for the other one"
        job.nodes[second].kill()
        assert job.wait_end(first) == 0
        assert [event.size for event in job.events(Completed)] == [2, 1]


def _one_ends_first(job: UnrulyJob, directory: Path) -> tuple[str, str]:
    """Start two nodes of which one ends its workers and waits; returns its name, and that of the one that works on."""
    job.begin("a", "b", action="end_first")
    job.wait_file("a-started")
    job.wait_file("b-started")
    job.wait("the first has ended", lambda: job.redis("store:round:1") and _exited(job) == 1)
    [first] = [n for n in "ab" if not lives(read_pid(directory / f"{n}-started"))]
    [second] = {"a", "b"} - {first}
    return first, second


def _exited(job: UnrulyJob) -> int:
    return sum(key.startswith("redelastic/exit/") for key in job.redis("store:round:1") or {})
