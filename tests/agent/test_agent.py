"""`redelastic run` and its agent: real jobs whose nodes drain, hang, fail, are barred, and are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
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
from redelastic.monitoring.events import Barred, Drain, Hung, Left, Lost, Refused, Saved, Started, Stopped
from redelastic.monitoring.failure import last_failure
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.node import RunStoppedError
from redelastic.rendezvous.view import View
from redelastic.workers.signals import SAME_REQUEST_SECONDS
from tests.support import launchers
from tests.support.agent_job import AWARE, DRAINED, NO_PROGRESS, REFUSED, STOPPED, AgentJob
from tests.support.liveness import lives
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.servers import reserved_port
from tests.support.torchrun_job import LIMIT, LONG_LEASES, TRAIN, Job

pytestmark = pytest.mark.timeout(300)


@pytest.mark.fault("an agent gets SIGTERM", "all workers save, the node leaves, the others go on at once")
def test_a_node_that_is_terminated_drains(server: RedisServer, tmp_path: Path) -> None:
    """All workers of the job save, then the node leaves, and its spare is promoted."""
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.begin("a", "b")
        epoch = job.wait_round("ab")
        job.begin("c")
        job.wait("c is a spare", lambda: [node for node in job.control.state().spares if node.name == "c"])
        node = job.id_of("b")
        fault = job.note("SIGTERM to b of a, b and the spare c")
        job.nodes["b"].terminate()
        assert job.wait_end("b") == DRAINED
        epoch = job.wait_round("ac", epoch, fault=fault)

        assert [event.reason for event in job.events(Drain)] == ["SIGTERM"]
        saved = {line.node for line in job.lines("saved")}
        assert saved == {"a", "b"}, "every worker of the round saves, and only when it is asked to"
        order = [event.event for event in job.control.events() if event.event in ("saved", "left", "completed")]
        assert order[1:] == ["saved", "saved", "left", "completed"]
        assert [(event.cause, event.reason) for event in job.events(Left)] == [("drained", "SIGTERM")]
        assert job.events(Saved)[0].drains == (node,)
        assert job.control.state().restarts == 0
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("c") == 0


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


@pytest.mark.parametrize("how", quick_first(["SIGUSR1", "command", "file"]))
def test_a_signal_a_command_and_a_file_drain_a_node(server: RedisServer, tmp_path: Path, how: str) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        drain_file = tmp_path / "notice"
        job.begin("a", "b", options=(f"--drain-file={drain_file}-b",))
        job.wait_round("ab")
        job.nodes["b"].may_end = job.nodes["a"].may_end = True
        if how == "SIGUSR1":
            job.nodes["b"].process.send_signal(signal.SIGUSR1)
        elif how == "command":
            assert job.control.drain(job.id_of("b"), "by a test", 20)
        else:
            Path(f"{drain_file}-b").touch()  # both nodes have it as their drain file
        assert job.wait_end("b") == DRAINED
        assert {line.node for line in job.lines("saved")} == {"a", "b"}
        reasons = {"SIGUSR1": "SIGUSR1", "command": "by a test", "file": f"the file {drain_file}-b exists"}
        assert job.events(Drain)[0].reason == reasons[how]
        if how == "file":
            assert job.wait_end("a") == DRAINED
        else:
            job.wait_round("a", 1)


@pytest.mark.fault("a node drains, and its workers do not save", "it leaves at the drain timeout")
def test_a_drain_ends_at_its_timeout(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.tell("no-save")
        job.begin("a", "b", options=("--drain-timeout=1.5",))
        epoch = job.wait_round("ab")
        job.nodes["b"].terminate()
        assert job.wait_end("b") == DRAINED
        job.wait_round("a", epoch)
        [asked], [left] = job.events(Drain), job.events(Left)
        assert 1.4 <= left.time - asked.time < LIMIT
        assert {(event.asked, event.late) for event in job.events(Saved)} == {(1, True)}


def test_a_worker_that_cannot_be_asked_has_not_saved(server: RedisServer, tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(600)")
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", script=tmp_path / "sleeps.py", options=("--drain-timeout=0.5",))
        job.wait_event(Started)
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert [event.asked for event in job.events(Saved)] == [0]


def test_a_node_without_workers_drains_at_once(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        job.begin("a")
        job.wait("a waits", lambda: job.redis("candidates"))
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert not job.redis("candidates")


@pytest.mark.long
def test_a_second_sigterm_ends_the_node_at_once(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.tell("no-save")
        job.begin("a", "b", options=("--drain-timeout=50",))
        epoch = job.wait_round("ab")
        job.nodes["b"].terminate()
        job.wait_event(Drain)
        terminate_again(job, "b")
        assert job.wait_end("b") == 1
        job.wait_round("a", epoch)


@pytest.mark.fault("an agent gets SIGTERM twice at once, as from GNU timeout", "that is one drain: all workers save")
def test_a_sigterm_that_comes_twice_is_one_drain(server: RedisServer, tmp_path: Path) -> None:
    """GNU timeout sends the signal to the process and then to its group."""
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.begin("a", "b")
        epoch = job.wait_round("ab")
        status = Path(f"/proc/{job.nodes['b'].process.pid}/status")
        job.nodes["b"].terminate()
        while not re.search(r"^ShdPnd:\t0+$", status.read_text(), re.MULTILINE):
            pass  # the kernel would merge two pending signals
        job.nodes["b"].terminate()
        assert job.wait_end("b") == DRAINED
        assert {line.node for line in job.lines("saved")} == {"a", "b"}
        job.wait_round("a", epoch)
        job.tell("finish")
        assert job.wait_end("a") == 0


@pytest.mark.fault("an agent gets SIGTERM twice", "it ends at once, and no worker is left")
def test_a_second_sigterm_leaves_no_worker_behind(server: RedisServer, tmp_path: Path) -> None:
    """The worker ignores SIGTERM, and the second one comes while the agent waits for its end."""
    with AgentJob(server, tmp_path, "1:1") as job:
        job.tell("deaf-a")
        job.begin("a", options=("--drain-timeout=0",))
        job.wait_round("a")
        workers = job.nodes["a"].tree()[1:]
        job.nodes["a"].terminate()
        job.wait("its worker is asked to end", lambda: "closing signal SIGTERM" in job.nodes["a"].stderr)
        terminate_again(job, "a")
        assert job.wait_end("a") == 1
        assert not any(map(lives, workers))


def terminate_again(job: AgentJob, name: str) -> None:
    """Send another SIGTERM once it counts as a second request; by then the agent has acted on the first."""
    seen = time.monotonic()
    job.wait("a signal is a second request", lambda: time.monotonic() - seen > SAME_REQUEST_SECONDS)
    job.nodes[name].terminate()


@pytest.mark.fault("a node drains while its workers are slow, or end early", "the other nodes lose no restart")
@pytest.mark.parametrize("way", quick_first(["slow", "saver"]))
def test_a_drain_costs_the_others_no_restart(server: RedisServer, tmp_path: Path, way: str) -> None:
    """The other node has none to lose, and its workers fail before the node that drains has left."""
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.tell(f"{way}-b")
        job.begin("a", "b", max_restarts=0)
        drain_b(job)


def test_a_worker_that_exits_with_0_when_asked_to_save_has_not_finished(server: RedisServer, tmp_path: Path) -> None:
    """Its node is not rank 0's, and sees the exit long before the others have saved."""
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.tell("saver-b")
        job.tell("no-save")
        job.begin("a", max_restarts=0)
        job.wait("a is the first", lambda: (job.redis("run") or {}).get("arrivals") == "1")
        job.begin("b", max_restarts=0)
        drain_b(job)


def drain_b(job: AgentJob) -> None:
    """Node b drains, and a goes on without it until it has finished."""
    epoch = job.wait_round("ab")
    job.nodes["b"].terminate()
    assert job.wait_end("b") == DRAINED
    job.wait_round("a", epoch)
    assert job.control.state().closed is None
    job.tell("finish")
    assert job.wait_end("a") == 0


@pytest.mark.fault("the terminal of an agent that was started with nohup is closed", "it trains on")
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        run = [sys.executable, "-m", "redelastic", "run", f"--rdzv-id={job.run_id}", f"--rdzv-conf={job.settings()}"]
        nohup = ["sh", "-c", 'trap "" HUP USR1; exec "$@"', "sh"]
        job.launch("a", [*nohup, *run, "--nnodes=1", str(AWARE), str(tmp_path)])
        epoch = job.wait_round("a")
        for number in (signal.SIGHUP, signal.SIGUSR1):
            job.nodes["a"].process.send_signal(number)
        step = max(line.step for line in job.lines("step"))
        job.wait("it trains on", lambda: max(line.step for line in job.lines("step")) > step + 1)
        job.tell("finish")
        assert job.wait_end("a") == 0
        assert job.epoch == epoch
        assert "SIGUSR1 was ignored at the start, so it does not drain this node." in job.nodes["a"].stderr


def test_a_signal_to_all_processes_of_a_node_drains_it(server: RedisServer, tmp_path: Path) -> None:
    """Some schedulers signal all processes: the workers die, which does not count as a failure."""
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.begin("a", "b", max_restarts=0)
        epoch = job.wait_round("ab")
        agent, *others = job.nodes["b"].tree()
        job.nodes["b"].may_end = True
        agent.send_signal(signal.SIGSTOP)  # so that it finds the signal and the dead workers at once
        for process in others:
            process.terminate()
        agent.terminate()
        agent.send_signal(signal.SIGCONT)
        assert job.wait_end("b") == DRAINED
        job.wait_round("a", epoch)
        assert job.control.state().restarts == 0
        job.tell("finish")
        assert job.wait_end("a") == 0


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
