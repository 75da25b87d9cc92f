"""Slow workers, found in real jobs by the time in which they wait for nobody."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from redelastic.monitoring.events import Started
from redelastic.monitoring.report import describe
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.flight_recorder import records_gloo
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LONG_LEASES

pytestmark = [records_gloo, pytest.mark.timeout(900)]

EVEN_STEPS = 10_000
SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import redelastic
seconds, slow, steps = float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
dist.init_process_group("gloo")
for step in range(steps):
    time.sleep(seconds * (1.6 if dist.get_rank() == slow else 1))
    dist.all_reduce(torch.ones(1000))
    redelastic.progress(step)
dist.barrier()
dist.destroy_process_group()  # torch may abort at the exit without it
"""


def problems(job: AgentJob) -> list[str]:
    report = describe(job.control.state(), (), time.time())
    return [problem for node in report["nodes"] for problem in node["problems"]]


def start(job: AgentJob, folder: Path, names: str, *arguments: object) -> None:
    script = folder / "paced.py"
    script.write_text(SCRIPT)
    job.start(*names, script=script, arguments=tuple(map(str, arguments)), may_end=True)
    job.wait_event(Started)


@pytest.mark.fault("a rank is slower than the others", "`status` names it within some two minutes")
@pytest.mark.parametrize("names", quick_first(["a", "ab"]))
def test_a_slow_rank_is_named(server: RedisServer, tmp_path: Path, names: str) -> None:
    nodes = len(names)
    slow = 2 * nodes - 1
    with AgentJob(server, tmp_path, f"{nodes}:{nodes}", nproc=2, conf=LONG_LEASES) as job:
        start(job, tmp_path, names, 0.05, slow, 10**6)
        [line] = job.wait("a rank is slow", lambda: problems(job), 180)
        assert f"(rank {slow}) is slow" in line


@pytest.mark.long
@pytest.mark.fault("all ranks are equally fast, for 10,000 steps", "no rank is called slow")
def test_equal_ranks_are_never_slow(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", nproc=2, conf=LONG_LEASES) as job:
        start(job, tmp_path, "ab", 0.01, -1, EVEN_STEPS)
        known = 0
        while any(node.process.poll() is None for node in job.nodes.values()):
            report = describe(job.control.state(), (), time.time())
            workers = [worker for node in report["nodes"] for worker in node["workers"]]
            known += sum(worker["own_time"] is not None for worker in workers)
            assert not problems(job)
            time.sleep(0.5)
        assert known > 100
        assert job.wait_end("a") == job.wait_end("b") == 0
