"""Workers that hang: who is found, who is blamed, and who is left alone."""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Final

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from redelastic.agent import AgentOptions
from redelastic.monitoring.events import Closed, Failed, Hung, Joined, Unwatched, decode_cause
from redelastic.monitoring.failure import last_failure, lines
from redelastic.monitoring.sentences import sentence
from redelastic.redis.server import RedisServer
from redelastic.workers.group import Workers
from tests.support.agent_job import AgentJob
from tests.support.commands import run_command
from tests.support.flight_recorder import records_gloo
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LIMIT, Job
from tests.support.unruly_job import UNRULY

pytestmark = pytest.mark.timeout(180)

WATCHES_KERNEL: Final = "uninterruptible_state_timeout" in inspect.signature(LocalElasticAgent).parameters


@pytest.mark.skipif(not WATCHES_KERNEL, reason="this torch does not look for workers that hang in the kernel")
@pytest.mark.fault("a worker hangs in the kernel (state D)", "the node fails and says so; the run is not finished")
@pytest.mark.parametrize("agent", quick_first([True, False]), ids=["redelastic run", "torchrun"])
def test_a_worker_that_hangs_in_the_kernel_is_a_failure(server: RedisServer, tmp_path: Path, agent: bool) -> None:
    """torch calls its group unhealthy, which its own launcher takes for success."""
    with Job(server, tmp_path, "1:1", agent=agent) as job:
        env = {"UNRULY": "hang_in_kernel", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}
        job.start("a", script=UNRULY, env=env, may_end=True, max_restarts=0)
        hangs = tmp_path / "hangs"
        pid = int(job.wait("the worker hangs", lambda: hangs.exists() and hangs.read_text()))
        assert job.wait_end("a") == 1, job.report()
        report = job.nodes["a"].stderr
        assert "hangs in the kernel (state D)" in report
        assert re.search(rf"exitcode  : -\d+ \(pid: {pid}\)", report), "how the agent ended it"
        if agent:
            closed = decode_cause(job.redis("run")["closed"])
            assert isinstance(closed, Closed)
            assert (closed.cause, closed.pid) == ("failed", pid)
            assert "hangs in the kernel" in closed.message


@pytest.mark.long
def test_the_report_of_a_hang_has_the_exit_code_of_its_end(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=("--hang-timeout=1", "--hang-start-timeout=50"), max_restarts=0, may_end=True)
        job.wait_round("a")
        job.tell("hang-a")
        assert job.wait_end("a") == 1
        report = job.nodes["a"].stderr
        assert re.search(r"made no progress for \S+ s, since step", report)
        assert f"exitcode  : {-signal.SIGTERM} (pid: " in report, "not by SIGKILL"


WAITS = """
import sys, time
import torch
import torch.distributed as dist
import redelastic
dist.init_process_group("gloo")
for step in range(3):
    redelastic.progress(step)
    if step == 2 and dist.get_rank() == 1:
        time.sleep(float(sys.argv[2]))
        redelastic.progress(step)
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
"""


@records_gloo
@pytest.mark.fault(
    "ranks wait in a collective for one that does not come",
    "the failure names it, and the collective; no host that waits is blamed",
)
@pytest.mark.parametrize("finder", quick_first(["waits", "is late"]))
def test_a_hang_names_the_rank_that_the_others_wait_for(server: RedisServer, tmp_path: Path, finder: str) -> None:
    """Whichever node finds it, the one whose worker waits for the other one is not to blame."""
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with AgentJob(server, tmp_path, "2:2") as job:
        names = "ab" if finder == "waits" else "ba"  # the first one's node is rank 0, whose worker waits
        for name in names:
            timeout = 2 if name == "a" else 3  # by then a has found it, and b's workers have been idle for long
            options = (f"--hang-timeout={timeout}", "--hang-start-timeout=50")
            job.start(name, script=script, arguments=["0"], options=options, max_restarts=0, may_end=True)
            job.wait_event(Joined)
        for name in "ab":
            job.wait_end(name)
        failure = last_failure(job.control.events())
        assert failure is not None
        why = "rank 0 waits in all_reduce(Float[4]), collective 3 of default_pg, rank 1 has not come to it"
        assert (finder == "is late") or (failure.waits == why and ("waits", why) in lines(failure))
        blamed = failure.cause.node[:1] if failure.cause else ""
        assert blamed == job.redis("run")["blamed"] == ("" if finder == "waits" else "a")


@records_gloo
@pytest.mark.fault(
    "a worker stops after another one of its node has begun to wait for it", "it is named, though its time is not over"
)
def test_of_a_nodes_workers_that_hang_the_one_that_waits_for_nobody_is_named(
    server: RedisServer, tmp_path: Path
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with AgentJob(server, tmp_path, "1:1", nproc=2) as job:
        options = ("--hang-timeout=4", "--hang-start-timeout=50")
        job.start("a", script=script, arguments=["0.5"], options=options, max_restarts=0, may_end=True)
        job.wait_end("a")
        [failed] = job.events(Failed)
        assert failed.rank == 1
        assert job.redis("run")["blamed"] == "a"


@pytest.mark.fault("a worker hangs", "its host is blamed by the time of its last progress, not that of the look")
def test_a_hang_is_blamed_by_the_time_of_the_last_progress(server: RedisServer, tmp_path: Path) -> None:
    """Of two hosts whose workers wait for each other, the one that stopped first is to blame."""
    timeout = 10
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=(f"--hang-timeout={timeout}", "--hang-start-timeout=50"))
        epoch = job.wait_round("a")
        job.tell("hang-a")
        job.wait_event(Hung)
        failed_at = job.wait("it is counted", lambda: job.redis("run").get("failed_at"))
        last = max(line.time for line in job.lines("step") if line.epoch == epoch)
        assert abs(float(failed_at) / 1000 - last) < timeout / 2
        failure = last_failure(job.control.events())
        assert failure is not None
        assert failure.cause is not None, "no other node can be it"
        assert job.redis("run")["blamed"] == "a"
        job.wait_round("a", epoch)
        job.tell("finish")
        assert job.wait_end("a") == 0


@pytest.mark.fault(
    "a phase takes longer than `--hang-timeout`, or than its own", "no hang; a hang, by the phase's name"
)
def test_a_phase_has_a_time_limit_of_its_own(server: RedisServer, tmp_path: Path) -> None:
    script = tmp_path / "export.py"
    script.write_text("""
import os, time, redelastic
redelastic.progress(1)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    with redelastic.phase("export", timeout=600):
        time.sleep(8)
    with redelastic.phase("upload", timeout=1):
        time.sleep(600)
""")
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", script=script, options=("--hang-timeout=6",))
        assert job.wait_end("a") == 0, job.report()
        [hung] = job.events(Hung)
        assert hung.phase == "upload"
        assert "since step 1, in phase 'upload'" in sentence(hung)


@pytest.mark.fault("progress() is called on rank 0 only", "the others are not taken for hung; the node says so once")
def test_ranks_that_never_report_progress_are_not_restarted(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1", nproc=2) as job:
        job.tell("mute")
        job.begin("a", options=("--hang-timeout=20", "--hang-start-timeout=8"))
        event = job.wait_event(Unwatched)
        assert (event.ranks, event.waited_ms) == (("1",), 8000)
        assert "never called redelastic.progress() in the 8.0 s since the start: rank 1. " in job.nodes["a"].stderr
        assert "in main" in event.stacks, "it imports redelastic: its stacks are had"
        seen = len(job.lines("step"))
        job.wait("they train on", lambda: len(job.lines("step")) > seen + 40)
        job.tell("finish")
        assert job.wait_end("a") == 0
        assert len(job.events(Unwatched)) == 1
        assert job.events(Hung) == []
        assert job.control.state().epoch == 1
        assert job.nodes["a"].stderr.count("Stacks of worker 1 (rank 1") == 1


@pytest.mark.fault("a script never calls progress(), nor imports redelastic", "it is not restarted, whatever it does")
def test_a_script_that_knows_nothing_of_us_is_not_restarted(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", script=UNRULY, env={"UNRULY": "wait"}, options=("--hang-timeout=0.5", "--hang-start-timeout=8"))
        stacks = job.wait_event(Unwatched).stacks
        assert "wait (" in stacks or "has not imported redelastic" in stacks, "from py-spy, if there is one"
        shown = run_command("status", job.run_id, "--json", "--endpoint", server.url).json
        assert shown["idle"] is None
        assert "last progress" not in shown["verdict"], "it has made none"
        job.tell("finish")
        assert job.wait_end("a") == 0
        assert job.control.state().epoch == 1


def test_without_pidfds_a_worker_that_has_ended_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux before 5.3; 5.3 has them, but cannot wait for one."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    for lacking in ("pidfd_open", "waitid"):
        with monkeypatch.context() as patched, subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
            patched.setattr(os, lacking, refuse)
            woken = threading.Event()
            workers = Workers(1, AgentOptions(hang_timeout=1), 0.1, {0}, woken.set)
            try:
                workers.started({0: process.pid})
                assert lacking == "pidfd_open" or woken.wait(LIMIT)
                assert workers.ended(0)
            finally:
                workers.close()
