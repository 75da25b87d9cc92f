"""Jobs of `redelastic run --survive`: what is lost is one process or one node, never the state of the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import pytest

from redelastic.agent.surviving import NCCL_VARIABLES
from redelastic.monitoring.events import Failed, Left, Progressed, Started, Stopped
from redelastic.monitoring.report import describe
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, FAILED, NO_PROGRESS, STOPPED
from tests.support.surviving_job import SurvivingJob
from tests.support.torchrun_job import LONG_LEASES

EAGER: Final = {"last_call_timeout": 0}  # two nodes wait for no third

pytestmark = pytest.mark.timeout(400)  # above what waits take together: they say what did not happen


@pytest.fixture
def job(server: RedisServer, tmp_path: Path) -> Iterator[SurvivingJob]:
    with SurvivingJob(server, tmp_path, "2:3", conf=LONG_LEASES) as job:
        yield job


@pytest.fixture
def losing_job(server: RedisServer, tmp_path: Path) -> Iterator[SurvivingJob]:
    """With a short lease, after which a node counts as lost."""
    with SurvivingJob(server, tmp_path, "2:3") as job:
        yield job


def status(job: SurvivingJob) -> dict[str, Any]:
    """What `redelastic status --json` prints."""
    run = job.control.state()
    return describe(run, job.control.events(), run.time)


def states(job: SurvivingJob) -> dict[str, str]:
    return {node["name"]: node["state"] for node in status(job)["nodes"]}


NODE_KILLED: Final = pytest.mark.fault(
    "a node is killed whose peers' workers survive", "the same processes go on from the newest step"
)
WORKER_KILLED: Final = pytest.mark.fault(
    "a worker is killed whose peers survive", "they go on at once; its node joins when a new one is ready"
)


@NODE_KILLED
@WORKER_KILLED
def test_processes_survive_whatever_ends_their_peers(server: RedisServer, tmp_path: Path) -> None:
    """In one job: each process takes seconds to start."""
    with SurvivingJob(server, tmp_path, "2:3", conf={**LONG_LEASES, "last_call_timeout": 2}) as job:
        job.tell("loader")
        job.begin("a", "b", "c")
        epoch = job.wait_round("abc")
        before = job.pids(epoch)
        [victim] = before["b"]
        [loader] = psutil.Process(victim).children()
        job.tell("late-b")
        loader.suspend()  # it has the worker's connections, and does not end by itself
        variables = Path(f"/proc/{victim}/environ").read_bytes().split(b"\0")
        assert {f"{name}=0".encode() for name in NCCL_VARIABLES} <= {*variables}, "NCCL's watchdog would end it"
        os.kill(victim, signal.SIGKILL)
        epoch = job.wait_round("ac", epoch)
        assert job.pids(epoch) == {name: before[name] for name in "ac"}
        assert loader.is_running(), "they do not wait for its end, as their node does"
        loader.kill()

        step = max(job.committed())
        killed, other = job.by_rank(epoch)
        killed.kill()
        job.wait("the last node has parked", lambda: states(job) == {other.name: "parked"})
        assert dict(status(job)["failure"]["lines"])["others"] == "the workers of 1 more node survived it"
        (tmp_path / "late-b").unlink()
        left = ["b", other.name]
        epoch = job.wait_round(left, epoch)
        after = job.pids(epoch)
        assert after[other.name] == before[other.name]
        assert after["b"] != before["b"]
        assert [event.node for event in job.events(Failed)] == [job.events(Left)[0].node]
        assert states(job) == dict.fromkeys(left, "running")
        assert min(line.step for line in job.lines("start") if line.epoch == epoch) >= step
        job.end(*left)
        progressed = job.events(Progressed)
        assert progressed[-1].epoch == epoch
        assert not any(event.redone for event in progressed), progressed


@pytest.mark.fault("a worker fails at the same step, again and again, and its peers' workers survive", "the job stops")
def test_survivors_whose_peer_always_fails_at_the_same_step_stop(server: RedisServer, tmp_path: Path) -> None:
    with SurvivingJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        (tmp_path / "poison-b").write_text("3")
        job.begin("a", "b", options=("--max-idle-restarts=2",), may_end=True)
        assert job.wait_end("a", 200) == job.wait_end("b") == NO_PROGRESS
        [stopped] = job.events(Stopped)
        assert (stopped.cause, stopped.restarts, stopped.last_step) == ("progress", 2, 3)


@NODE_KILLED
@pytest.mark.long
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
    job.end(*left)


@WORKER_KILLED
@pytest.mark.long
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
    started = {(event.epoch, event.node[0]): event.survived for event in job.events(Started)}
    new = {place for place, survived in started.items() if not survived}
    assert new == {(first, "a"), (first, "b"), (first, "c"), (third, "b")}

    os.kill(min(after["b"]), signal.SIGKILL)
    job.wait_round("ac", third)
    job.end("a", "c")
    assert job.wait_end("b") == 0, "its job has finished, with it or without it"
    assert not psutil.pid_exists(victim)


NEVER_COMES: Final = pytest.mark.fault(
    "a new node for which all workers have paused is gone", "they go on without it, in the same processes"
)


def pause_for_a_node_that_is_gone(job: SurvivingJob, epoch: int) -> int:
    """Ask all to save for a node c; returns the number of the round that the same nodes form then."""
    with job.server.get_client() as client:
        asked = {"event": "save", "node": "c-1-0", "timeout": "30000", "epoch": str(epoch)}
        client.xadd(RunKeys(job.run_id).wake, asked)
    return job.wait_round("ab", epoch)


@NEVER_COMES
@pytest.mark.fault(
    "a node joins or drains whose peers survive", "they go on in the same processes; no step is made twice"
)
def test_planned_changes_cost_no_step(job: SurvivingJob) -> None:
    """In one job: each process takes seconds to start."""
    job.begin("a", "b", conf=EAGER)
    first = job.wait_round("ab")
    before = job.pids(first)
    first = pause_for_a_node_that_is_gone(job, first)
    assert job.pids(first) == before
    job.begin("c", conf=EAGER)
    second = job.wait_round("abc", first)
    assert {name: pids for name, pids in job.pids(second).items() if name != "c"} == before
    leaver = job.by_rank(second)[0].name
    job.nodes[leaver].terminate()
    assert job.wait_end(leaver) == DRAINED
    left = [name for name in "abc" if name != leaver]
    third = job.wait_round(left, second)
    assert job.pids(third) == {name: job.pids(second)[name] for name in left}
    job.end(*left)
    for pid in set().union(*before.values()):
        steps = job.begun(pid)
        assert steps == list(range(len(steps))), "each once"
    [newcomer] = job.pids(second)["c"]
    begun = job.begun(newcomer)
    assert begun == list(range(begun[0], begun[-1] + 1))


@NEVER_COMES
@pytest.mark.long
def test_a_pause_for_a_node_that_is_gone(server: RedisServer, tmp_path: Path) -> None:
    with SurvivingJob(server, tmp_path, "2:3", nproc=2, conf=LONG_LEASES) as job:
        job.begin("a", "b", conf=EAGER)
        first = job.wait_round("ab")
        before = job.pids(first)
        second = pause_for_a_node_that_is_gone(job, first)
        assert job.pids(second) == before
        job.end("a", "b")
        for pid in set().union(*before.values()):
            assert job.begun(pid) == list(range(len(job.begun(pid)))), "each once"


@pytest.mark.fault("a node is frozen whose peers survive, and thaws", "it goes on with its process, in the next round")
def test_a_thawed_node_comes_back_with_its_process(losing_job: SurvivingJob) -> None:
    job = losing_job
    job.begin("a", "b", "c")
    first = job.wait_round("abc")
    before = job.pids(first)
    job.nodes["b"].freeze()
    second = job.wait_round("ac", first)
    job.nodes["b"].thaw()
    third = job.wait_round("abc", second)
    assert job.pids(third) == before
    job.end("a", "b", "c")


@pytest.mark.fault("a surviving worker does not leave its round", "its node starts it anew; the others go on meanwhile")
def test_a_worker_that_does_not_leave_its_round_is_started_anew(job: SurvivingJob) -> None:
    job.begin("a", "b", "c", options=("--park-timeout=1",))
    first = job.wait_round("abc")
    before = job.pids(first)
    job.tell("stuck-b")
    job.wait("b is stuck", lambda: job.lines("stuck"))
    os.kill(min(before["c"]), signal.SIGKILL)
    job.wait("b leaves", lambda: [left for left in job.events(Left) if left.node.startswith("b-")])
    (job.directory / "stuck-b").unlink()
    last = job.wait_round("abc", first)
    after = job.pids(last)
    assert after["a"] == before["a"]
    assert after["b"] != before["b"]
    job.end("a", "b", "c")


@pytest.mark.fault("a collective fails on all ranks, again and again", "the job ends with its restart budget")
def test_an_error_that_repeats_uses_up_the_restarts(losing_job: SurvivingJob) -> None:
    job = losing_job
    job.tell("lonely-b")
    job.begin("a", "b", nnodes="2:2", options=("--max-job-restarts=1",), may_end=True, max_restarts=1)
    assert {job.wait_end(name) for name in "ab"} <= {FAILED, STOPPED}
    assert FAILED in {node.process.returncode for node in job.nodes.values()} or job.events(Stopped)
