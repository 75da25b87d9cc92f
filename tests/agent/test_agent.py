"""`redelastic run` and its agent: real jobs whose nodes hang, fail, are barred, and are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from redelastic.agent import AgentOptions, RedisElasticAgent
from redelastic.agent.monitor import STALL_TIMEOUT
from redelastic.monitoring.events import Barred, Hung, Lost, Refused, Stopped
from redelastic.monitoring.failure import last_failure
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.node import RunStoppedError
from redelastic.rendezvous.view import View
from tests.support import launchers
from tests.support.agent_job import NO_PROGRESS, REFUSED, STOPPED, AgentJob
from tests.support.liveness import lives
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.servers import reserved_port
from tests.support.torchrun_job import LIMIT, LONG_LEASES, TRAIN, Job

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("agent", quick_first([True, False]), ids=["redelastic run", "torchrun"])
def test_a_change_of_the_run_does_not_wait_for_the_monitor_interval(
    server: RedisServer, tmp_path: Path, agent: bool
) -> None:
    with Job(server, tmp_path, "1:3", agent=agent) as job:
        job.start("a", "b", "c", options=(f"--monitor-interval={20 * LIMIT}",))
        epoch = job.wait_round("abc")
        job.nodes["b"].terminate()  # under `redelastic run` b drains first
        epoch = job.wait_round("ac", epoch)
        job.nodes["a"].kill()
        job.wait_round("c", epoch)


def test_the_end_of_a_worker_does_not_wait_for_the_monitor_interval(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=(f"--monitor-interval={20 * LIMIT}", "--max-job-restarts=1"))
        epoch = job.wait_round("a")
        os.kill(job.lines("step")[-1].pid, signal.SIGKILL)
        job.wait_round("a", epoch)
        job.tell("finish")
        assert job.wait_end("a") == 0


def test_the_log_says_which_round_began_and_how_the_run_ended(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.begin("a", "b")
        epoch = job.wait_round("ab")
        job.nodes["b"].kill()
        job.wait_round("a", epoch)
        job.tell("finish")
        assert job.wait_end("a") == 0
        said = job.nodes["a"].stderr
        assert re.search(f"is rank [01] of 2 in round {epoch} of run '{job.run_id}'", said)
        end = f"redelastic run: finished: {epoch + 1} rounds, 1 loss; see `redelastic timeline {job.run_id}`\n"
        assert said.endswith(end)


@pytest.mark.fault("a worker hangs", "it is found after `--hang-timeout`, its stack is reported, workers are restarted")
def test_a_worker_that_hangs_is_found_and_restarted(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        job.begin("a", options=("--hang-timeout=60", "--hang-start-timeout=60"))  # its worker waits for b's
        job.begin("b", options=("--hang-timeout=6", "--hang-start-timeout=60"))
        epoch = job.wait_round("ab")
        job.tell("hang-b")
        job.wait_round("ab", epoch)
        hung = {event.node: event for event in job.events(Hung)}
        node = job.id_of("b")
        assert 6000 <= (hung[node].idle_ms or 0) < 1000 * LIMIT
        assert hung[node].step is not None
        assert "in hang" in hung[node].stacks, "the stacks show where"
        assert "in hang" in job.nodes["b"].stderr, "in the log as well"
        assert job.control.state().restarts == 1, "the hang of a round counts once"
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


@pytest.mark.fault(
    "an agent alone is killed (as by the OOM killer), with a lease of 30 s",
    "its workers end with it, a roll call misses its node, the others regroup",
)
def test_an_agent_that_is_killed_takes_its_workers_along(server: RedisServer, tmp_path: Path) -> None:
    conf = {"keep_alive_interval": 2, "keep_alive_max_attempt": 15, "last_call_timeout": 1}
    with AgentJob(server, tmp_path, "1:3", conf=conf) as job:
        job.start("a", "b", "c")
        epoch = job.wait_round("abc")
        node = job.id_of("b")
        fault = job.note("SIGKILL of b's agent")
        workers = job.nodes["b"].kill_agent_alone()
        epoch = job.wait_round("ac", epoch, fault=fault)
        assert workers
        job.wait("its workers have ended", lambda: not any(map(lives, workers)))
        [lost] = job.events(Lost)
        assert lost.node == node
        assert lost.cause == "roll_call"
        assert job.control.state().restarts == 0, "no node loses a restart"
        failure = last_failure(job.control.events())
        assert failure is not None
        assert (failure.cause, failure.charged) == (lost, False), (
            "the fault is the loss, not the workers' failures that follow"
        )

        job.start("d")  # a supervisor starts the node again
        job.wait_round("acd", epoch)
        job.finish("a", "c", "d")


@pytest.mark.fault("workers fail again and again", "the job has one budget of restarts")
def test_the_job_has_one_budget_of_restarts(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        job.tell("patient")  # else both agents report a failure, in either order
        job.begin("a", "b", options=("--max-job-restarts=2",), max_restarts=9)
        epoch = job.wait_round("ab")
        for restarts, name in ((1, "a"), (2, "b")):
            job.tell(f"fail-{name}")
            epoch = job.wait_round("ab", epoch)
            assert job.control.state().restarts == restarts
        for node in job.nodes.values():
            node.may_end = True
        job.tell("fail-a")
        assert job.wait_end("a") == job.wait_end("b") == STOPPED
        state = job.control.state()
        assert state.phase == "stopped"
        assert isinstance(state.closed, Stopped)
        assert (state.closed.cause, state.closed.restarts, state.closed.exit_code) == ("restarts", 2, 1)
        assert state.restarts == 2, "the third failure led to no restart"
        assert "the job has used up its 2 restarts: a-" in job.nodes["b"].stderr


@pytest.mark.fault("workers fail at the same step, again and again", "the job stops, with an exit code of its own")
def test_a_job_that_makes_no_progress_stops(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        (tmp_path / "poison").write_text("2")
        job.begin("a", "b", options=("--max-idle-restarts=2",), max_restarts=9, may_end=True)
        assert job.wait_end("a") == job.wait_end("b") == NO_PROGRESS
        state = job.control.state()
        assert isinstance(state.closed, Stopped)
        assert (state.closed.cause, state.closed.restarts, state.closed.last_step) == ("progress", 2, 1)
        assert state.restarts == 2
        assert state.epoch == 3
        assert "was stopped: no progress in 2 restarts, still at step 1: " in job.nodes["a"].stderr


@pytest.mark.fault("workers fail in each round, a step later than before", "the job goes on")
def test_a_job_that_advances_by_a_step_in_each_round_goes_on(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        job.tell("limp")
        job.begin("a", "b", options=("--max-idle-restarts=1",), max_restarts=99)
        job.wait("it has failed four times", lambda: int((job.redis("run") or {}).get("restarts", 0)) >= 4)
        (tmp_path / "limp").unlink()
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


@pytest.mark.fault(
    "the node of rank 0 is killed in each round, at a step that an earlier round had made",
    "the job stops, with an exit code of its own",
)
def test_a_job_that_loses_rank_0_and_makes_no_progress_stops(server: RedisServer, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step"
    checkpoint.write_text("1000")
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        options = ("--max-idle-restarts=2",)
        job.begin("a", options=options, max_restarts=9)
        stays, epoch = "a", 0
        for comes in "bcd":
            job.begin(comes, options=options, max_restarts=9)
            epoch = job.wait_round(stays + comes, epoch)
            leader, other = job.by_rank(epoch)
            stays, other.may_end = other.name, comes == "d"
            checkpoint.write_text("0")
            leader.kill()
        assert job.wait_end(stays) == NO_PROGRESS
        state = job.control.state()
        assert isinstance(state.closed, Stopped)
        assert (state.closed.cause, state.closed.restarts) == ("progress", 2)


@pytest.mark.fault("a host's worker fails first, again and again", "the host is barred until it is readmitted")
def test_a_host_that_fails_again_and_again_is_barred(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.tell("patient")  # else both agents report a failure, and their order is by chance
        job.begin("a", "b", options=("--max-failed-rounds=2",), max_restarts=9)
        epoch = job.wait_round("ab")
        job.tell("fail-b")
        epoch = job.wait_round("ab", epoch)
        job.tell("fail-b")
        job.wait_event(Barred)
        job.wait_round("a", epoch)
        state = job.control.state()
        assert state.barred == ["b"]
        assert state.failures == {"b": 2}
        assert job.nodes["b"].process.poll() is None, "it waits"
        epoch = job.epoch
        assert job.control.readmit("b", "a test")
        job.wait_round("ab", epoch)
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


def test_a_node_whose_health_command_fails_does_not_join(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=("--health-command=echo the fan is broken; exit 3",), may_end=True)
        assert job.wait_end("a") == REFUSED
        assert "the fan is broken" in job.nodes["a"].stderr
        assert job.wait_event(Refused).reason == "command: the fan is broken"
        assert not job.lines()


def test_a_heartbeat_carries_the_status_of_its_node(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1", nproc=2) as job:
        job.begin("a")
        job.wait_round("a")

        def reported() -> dict[str, Any]:
            [node] = job.control.state().nodes
            return dict(node.status) if node.step and "cpu" in node.status else {}

        status = job.wait("the status has the workers' steps and cpu", reported)
        agent, *workers = job.nodes["a"].tree()
        assert (status["name"], status["pid"], status["state"], status["agent"]) == (
            "a",
            agent.pid,
            "running",
            "redelastic",
        )
        assert [worker["rank"] for worker in status["workers"]] == [0, 1]
        assert {worker["pid"] for worker in status["workers"]} <= {process.pid for process in workers}
        for worker in status["workers"]:
            assert worker["state"] == "running"
            assert worker["memory"] == pytest.approx(psutil.Process(worker["pid"]).memory_info().rss, rel=0.2)
            assert worker["idle"] < LIMIT
        assert len(json.dumps(status)) < 8192
        job.tell("finish")
        assert job.wait_end("a") == 0


@pytest.mark.long
def test_standalone_needs_no_server_and_no_run_id(tmp_path: Path) -> None:
    """It starts an embedded server; two workers train on gloo."""
    (tmp_path / "finish").touch()
    env = {name: value for name, value in os.environ.items() if name != "REDELASTIC_REDIS_URL"}
    env |= {"TEST_NODE": "a", "TEST_GLOO": "1", "OMP_NUM_THREADS": "1"}
    arguments = ["--standalone", "--nproc-per-node=2", str(TRAIN), str(tmp_path)]
    done = launchers.run([sys.executable, "-m", "redelastic", "run", *arguments], env, LIMIT)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert [line["rank"] for line in lines if line["event"] == "end"] in ([0, 1], [1, 0])


def test_torchs_event_log_has_the_events_of_the_run(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=("--event-log-handler=console",))
        job.wait_round("a")
        job.tell("finish")
        assert job.wait_end("a") == 0
        lines = [
            json.loads(line[line.index("{") :]) for line in job.nodes["a"].stderr.splitlines() if '"source"' in line
        ]
        [started] = [line for line in lines if line["name"] == "redelastic.started"]
        assert started["source"] == "AGENT"
        assert started["metadata"]["run_id"] == job.run_id
        assert started["metadata"]["reason"] == "rank 0 of 1"


def test_livez_fails_when_the_loop_has_stalled(new_node: NodeFactory, tmp_path: Path) -> None:
    """The loop stalls within a round, and the endpoint, which has its own threads, reports it."""
    entered, release = threading.Event(), threading.Event()

    class Stalling(RedisElasticAgent):
        def _act_on_requests(self) -> None:
            super()._act_on_requests()
            self._monitor.allow(-STALL_TIMEOUT)  # as if that and more had passed
            entered.set()
            assert release.wait(LIMIT)

    node = new_node(1, 1)
    spec = WorkerSpec("test", 1, node, entrypoint="sleep", args=("60",))
    with reserved_port() as port, ThreadPoolExecutor(1) as pool:
        options = AgentOptions(health_port=port)
        agent = Stalling(spec, DefaultLogsSpecs(str(tmp_path)), shutdown_timeout=1, options=options)
        ended = pool.submit(agent.run)
        try:
            assert entered.wait(LIMIT)
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/livez", timeout=10)
            assert refused.value.code == 503
            assert re.fullmatch(r"the agent's loop is \d+ s late", refused.value.read().decode().strip())
        finally:
            why = Stopped(cause="asked", reason="the test is over")
            node.node.watch.update(View.apply_closing, why.as_cause(), stop=True)
            release.set()
        with pytest.raises(RunStoppedError, match="the test is over"):
            ended.result(LIMIT)
