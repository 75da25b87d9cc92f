"""Workers that fail while they live, or seem to: who is restarted, who is blamed, and what the report says."""

from __future__ import annotations

import errno
import inspect
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import pytest
import torch
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from redelastic.agent import AgentOptions
from redelastic.monitoring.events import Closed, Failed, Hung, Joined, Unwatched, decode_cause
from redelastic.monitoring.failure import last_failure, lines
from redelastic.monitoring.logs import first_failure
from redelastic.monitoring.sentences import sentence
from redelastic.redis.server import RedisServer
from redelastic.torch_internals import version_of
from redelastic.workers.group import Workers
from tests.support.agent_job import DRAINED, UNUSED, AgentJob
from tests.support.commands import run_command
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LIMIT, LONG_LEASES, LONGEST_LEASES, Job
from tests.support.unruly_job import UNRULY, UnrulyJob

pytestmark = pytest.mark.timeout(180)

NO_RECORDS: Final = version_of(str(torch.__version__)) < (2, 11)
records_gloo = pytest.mark.skipif(NO_RECORDS, reason="the flight recorder of this torch knows nothing of gloo")
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


@pytest.mark.fault("a worker is ended while it writes its error file", "the failure is like any other")
@pytest.mark.parametrize("agent", quick_first([True, False]), ids=["redelastic run", "torchrun"])
def test_a_torn_error_file_stops_nothing(server: RedisServer, tmp_path: Path, agent: bool) -> None:
    with Job(server, tmp_path, "1:1", agent=agent, nproc=2) as job:
        job.start("a", script=UNRULY, env={"UNRULY": "tear_error"}, may_end=True, max_restarts=1)
        assert job.wait_end("a") == 0, job.report()


@pytest.mark.parametrize("agent", quick_first([True, False]), ids=["redelastic run", "torchrun"])
def test_regrouping_leaves_the_logs_of_earlier_rounds(server: RedisServer, tmp_path: Path, agent: bool) -> None:
    with Job(server, tmp_path, "1:2", agent=agent, conf=LONG_LEASES) as job:
        logs = tmp_path / "logs"
        job.start("a", "b", options=(f"--log-dir={logs}", "--redirects=3"))
        epoch = job.wait_round("ab")
        written = {log: log.stat().st_ino for log in logs.glob("*/attempt_*/0/stderr.log")}
        assert len(written) == 2
        job.nodes["b"].kill()
        job.wait_round("a", epoch)
        assert {log: log.stat().st_ino for log in written if log.exists()} == written
        assert len(set(logs.glob("*/attempt_*/0/stderr.log"))) == 3
        job.finish("a")


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
import time
import torch
import torch.distributed as dist
import redelastic
dist.init_process_group("gloo")
for step in range(3):
    redelastic.progress(step)
    if step == 2 and dist.get_rank() == 1:
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
            job.start(name, script=script, options=options, max_restarts=0, may_end=True)
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
def test_of_a_nodes_workers_that_hang_the_one_that_waits_for_nobody_is_named(
    server: RedisServer, tmp_path: Path
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    with AgentJob(server, tmp_path, "1:1", nproc=2) as job:
        options = ("--hang-timeout=2", "--hang-start-timeout=50")
        job.start("a", script=script, options=options, max_restarts=0, may_end=True)
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


@pytest.mark.fault("a worker raises, ends late, and its peer fails first", "the host is blamed where the cause is")
def test_the_host_whose_worker_raised_first_is_blamed(server: RedisServer, tmp_path: Path) -> None:
    script = tmp_path / "slow_exit.py"
    script.write_text("""
import os, sys, time
from pathlib import Path
sys.path.append(sys.argv[2])
from group import Group
directory, guilty = Path(sys.argv[1]), os.environ["TEST_NODE"] == "a"
if os.environ["REDELASTIC_EPOCH"] != "1":
    sys.exit()
if os.environ["LOCAL_RANK"] != "0":
    time.sleep(600)
os.environ.update(RANK=os.environ["GROUP_RANK"], WORLD_SIZE="2")
group = Group()
group.connect(directory)
if not guilty:
    (directory / "pid").write_text(str(os.getpid()))
group.maximum(0)
try:
    if guilty:
        raise ValueError("bad batch")
    group.maximum(0)
finally:
    group.close()
    if guilty:
        other = Path("/proc", (directory / "pid").read_text(), "stat")
        while other.exists() and other.read_text().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)
""")
    with AgentJob(server, tmp_path, "2:2", conf=LONGEST_LEASES, nproc=2) as job:
        job.start("a", "b", script=script, arguments=[str(UNRULY.parent)])
        assert [job.wait_end(name) for name in "ab"] == [0, 0], job.report()
        assert job.redis("run")["blamed"] == "a"
        events = job.control.events()
        found = first_failure(events)
        assert found is not None
        assert "ValueError: bad batch" in found["tail"]
        [failed] = [event for event in events if isinstance(event, Failed) and event.node == found["node"]]
        assert (failed.local_rank, failed.message) == (0, "ValueError: bad batch")


@pytest.mark.fault(
    "of two workers of a node one raises, ends late, and the other one fails first", "the cause is named"
)
def test_the_worker_that_raised_first_is_named(server: RedisServer, tmp_path: Path) -> None:
    script = tmp_path / "slow_exit.py"
    script.write_text("""
import os, sys, time
from pathlib import Path
directory, rank = Path(sys.argv[1]), int(os.environ["RANK"])
if os.environ["REDELASTIC_EPOCH"] != "1":
    sys.exit()
if rank == 1:
    (directory / "pid.new").write_text(str(os.getpid()))
    (directory / "pid.new").rename(directory / "pid")
    raise ConnectionResetError("Connection reset by peer")
while not (directory / "pid").exists():
    time.sleep(0.01)
try:
    raise ValueError("bad batch")
finally:
    other = Path("/proc", (directory / "pid").read_text(), "stat")
    while other.exists() and other.read_text().rpartition(")")[2].split()[0] not in "ZX":
        time.sleep(0.01)
""")
    with AgentJob(server, tmp_path, "1:1", nproc=2) as job:
        job.start("a", script=script, options=(f"--log-dir={tmp_path / 'logs'}", "--redirects=3"))
        assert job.wait_end("a") == 0, job.report()
        [failed] = job.events(Failed)
        assert (failed.rank, failed.message) == (0, "ValueError: bad batch")
        found = first_failure(job.control.events())
        assert found is not None
        assert (found["rank"], "ValueError: bad batch" in found["tail"]) == (0, True)


@pytest.mark.fault(
    "a worker raises and does not end; its peer fails, and says nothing of a peer",
    "its host is blamed, by the time in torch's error file",
)
def test_a_worker_that_has_raised_is_blamed_before_it_ends(server: RedisServer, tmp_path: Path) -> None:
    script = tmp_path / "no_exit.py"
    script.write_text("""
import atexit, os, sys, time
from pathlib import Path
if os.environ["REDELASTIC_EPOCH"] != "1":
    sys.exit()
from torch.distributed.elastic.multiprocessing.errors import record
raised = Path(sys.argv[1], "raised")
def wait():
    raised.touch()
    time.sleep(600)
@record
def main():
    if os.environ["TEST_NODE"] == "a":
        atexit.register(wait)
        raise ValueError("bad batch")
    while not raised.exists():
        time.sleep(0.01)
    raise ValueError("out of step")
main()
""")
    with AgentJob(server, tmp_path, "2:2", conf=LONGEST_LEASES) as job:
        job.start("a", "b", script=script)
        assert [job.wait_end(name) for name in "ab"] == [0, 0], job.report()
        assert job.redis("run")["blamed"] == "a"
        assert {event.message for event in job.events(Failed)} == {"ValueError: bad batch", "ValueError: out of step"}


@pytest.mark.parametrize("wrapper", [False, True])
@pytest.mark.fault(
    "a worker that saves at SIGTERM has DataLoader processes, or is started by a shell that traps SIGTERM",
    "its children live until it has ended; the shell's child gets the signal",
)
def test_sigterm_goes_to_the_worker_before_its_children(server: RedisServer, tmp_path: Path, wrapper: bool) -> None:
    script = tmp_path / "saver.py"
    script.write_text("""
import os, signal, subprocess, sys
from pathlib import Path
directory = Path(sys.argv[1])
child = subprocess.Popen(["sleep", "600"])
def save(*_):
    try:
        ended = child.wait(float(sys.argv[2]))
    except subprocess.TimeoutExpired:
        ended = "lives"
    (directory / "saved").write_text(f"child {ended}")
    sys.exit()
signal.signal(signal.SIGTERM, save)
(directory / "ready").touch()
signal.pause()
""")
    shell = tmp_path / "wrapper.sh"
    shell.write_text(f"#!/bin/sh\ntrap 'echo ends' TERM\n{sys.executable} {script} {tmp_path} 20\n")
    shell.chmod(0o700)
    with AgentJob(server, tmp_path, "1:1") as job:
        options = ("--no-python",) if wrapper else ()
        job.start("a", script=shell if wrapper else script, arguments=["1"], options=options)
        job.wait("it runs", (tmp_path / "ready").exists)
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED, job.report()
        assert (tmp_path / "saved").read_text() == ("child -15" if wrapper else "child lives")


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


@pytest.mark.fault(
    "workers fail in a run that is closed", "there is no restart; the agent and the run say why they failed"
)
def test_a_failure_in_a_closed_run_is_reported(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", may_end=True)
        job.wait_round("a")
        assert run_command("close", job.run_id, "--endpoint", server.url).code == 0
        job.tell("fail-a")
        assert job.wait_end("a") == 1
        [failed] = job.events(Failed)
        assert "told to fail" in failed.message
        assert re.search(r"cause +a-\d+: worker 0 .*told to fail", job.nodes["a"].stderr)
        failure = last_failure(job.control.events())
        assert failure is not None
        assert failure.cause == failed
        assert job.control.state().restarts == 0


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


@pytest.mark.fault("a node drains whose workers have finished", "it leaves; the others go on without it, and finish")
def test_a_drain_after_the_end_ends_no_run(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.begin("a", "b", action="end_but_rank_0")
        for name in "ab":
            job.wait_file(f"{name}-started")
        first = job.control.state().epoch
        members = {node.name: node for node in job.control.state().members}
        last, waits = sorted("ab", key=lambda name: members[name].rank or 0)
        job.wait("rank 1 waits for rank 0", lambda: "redelastic/exit/1" in job.redis(f"store:round:{first}"))
        job.nodes[waits].terminate()
        assert job.wait_end(waits) == DRAINED, job.report()
        job.wait("the other goes on", lambda: job.control.state().epoch == first + 1)
        job.tell("finish")
        assert job.wait_end(last) == 0, job.report()


def test_without_pidfds_a_worker_that_has_ended_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Linux before 5.3; 5.3 has them, but cannot wait for one."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    for lacking in ("pidfd_open", "waitid"):
        with monkeypatch.context() as patched, subprocess.Popen(["true"]) as process:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # now a zombie
            patched.setattr(os, lacking, refuse)
            told = threading.Event()
            workers = Workers(1, AgentOptions(hang_timeout=1), 0.1, {0}, told.set)
            try:
                workers.started({0: process.pid})
                assert lacking == "pidfd_open" or told.wait(LIMIT)
                assert workers.ended(0)
            finally:
                workers.close()


@pytest.mark.fault("a job is started again under a run id that is in use", "the second says at once that it is a spare")
def test_a_second_start_under_the_same_run_id_says_that_it_trains_nothing(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1", conf=LONGEST_LEASES) as job:
        job.begin("a")
        job.wait_round("a")
        job.begin("b", may_end=True)
        job.wait("it says so", lambda: "is a spare: all 1 places of run" in job.nodes["b"].stderr)
        job.tell("finish")
        assert (job.wait_end("a"), job.wait_end("b")) == (0, UNUSED)
        assert "has trained nothing: it was a spare until the run ended" in job.nodes["b"].stderr
