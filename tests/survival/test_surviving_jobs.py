"""Jobs of `redelastic run --survive`: what is lost is one process or one node, never the state of the others."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from redelastic.monitoring.events import Failed, Left
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.workers.surviving import reference

SCRIPT = Path(__file__).parents[1] / "support" / "workers" / "surviving.py"


class SurvivingJob(AgentJob):
    def begin(self, *names: str, options: tuple[str, ...] = (), **more: Any) -> None:
        self.start(*names, script=SCRIPT, options=("--survive", *options), **more)

    def pids(self, epoch: int) -> dict[str, set[int]]:
        """The workers' processes in a round, by node."""
        found: dict[str, set[int]] = {}
        for line in self.lines("start"):
            if line.epoch == epoch:
                found.setdefault(line.node, set()).add(line.pid)
        return found

    def committed(self) -> list[int]:
        """Each step that rank 0 has made, in order."""
        return [line.step for line in self.lines("step") if line.rank == 0]

    def end(self, *names: str) -> None:
        """Let the job finish; all must have the weights of a run in one process."""
        self.tell("finish")
        for name in names:
            assert self.wait_end(name) == 0, self.report()
            for local_rank in range(self.nproc):
                final = json.loads((self.directory / f"final-{name}-{local_rank}.json").read_text())
                assert final["weights"] == pytest.approx(reference(final["step"]), abs=1e-10), name


@pytest.fixture
def job(server: RedisServer, tmp_path: Path) -> Iterator[SurvivingJob]:
    with SurvivingJob(server, tmp_path, "2:3") as job:
        yield job


@pytest.mark.fault("a node is killed whose peers' workers survive", "the same processes go on from the newest step")
def test_survivors_of_a_killed_node_keep_their_processes(job: SurvivingJob) -> None:
    job.begin("a", "b", "c")
    first = job.wait_round("abc")
    lost = job.by_rank(first)[0].name
    before, step = job.pids(first), max(job.committed())
    fault = job.note(f"node {lost} is killed")
    job.nodes[lost].kill()
    left = [name for name in "abc" if name != lost]
    second = job.wait_round(left, first, fault=fault)
    assert job.pids(second) == {name: before[name] for name in left}
    assert min(line.step for line in job.lines("start") if line.epoch == second) >= step
    job.begin(lost)
    third = job.wait_round("abc", second)
    after = job.pids(third)
    assert {name: after[name] for name in left} == {name: before[name] for name in left}
    job.end("a", "b", "c")


@pytest.mark.fault("a worker is killed whose peers survive", "they go on without its node, which joins once it is ready")
def test_a_killed_worker_costs_the_others_nothing(job: SurvivingJob) -> None:
    job.begin("a", "b", "c")
    first = job.wait_round("abc")
    before = job.pids(first)
    [victim] = before["b"]
    fault = job.note("a worker is killed")
    os.kill(victim, signal.SIGKILL)
    second = job.wait_round("ac", first, fault=fault)
    assert job.pids(second) == {name: before[name] for name in "ac"}
    third = job.wait_round("abc", second)
    after = job.pids(third)
    assert {name: after[name] for name in "ac"} == {name: before[name] for name in "ac"}
    assert after["b"] != before["b"]
    assert [event.node for event in job.events(Failed)] == [job.events(Left)[0].node]
    job.end("a", "b", "c")
    assert not psutil.pid_exists(victim)
