"""Workers that fail while they live, or seem to: who is restarted, who is blamed, and what the report says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from redelastic.monitoring.events import Failed
from redelastic.monitoring.failure import last_failure
from redelastic.monitoring.logs import first_failure
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, UNUSED, AgentJob
from tests.support.commands import run_command
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LONG_LEASES, LONGEST_LEASES, Job
from tests.support.unruly_job import UNRULY, UnrulyJob

pytestmark = pytest.mark.timeout(180)


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
    time.sleep(0.5)  # with the time that a report takes, Redis cannot tell two failures of one millisecond apart
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
