"""Nodes that drain: what asks them to, what they wait for, and what it costs the others."""

from __future__ import annotations

import re
import signal
import sys
import time
from pathlib import Path

import pytest

from redelastic.monitoring.events import Drain, Left, Saved, Started
from redelastic.redis.server import RedisServer
from redelastic.workers.signals import SAME_REQUEST_SECONDS
from tests.support.agent_job import AWARE, DRAINED, AgentJob
from tests.support.liveness import lives
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LIMIT, LONG_LEASES

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
