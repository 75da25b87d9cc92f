"""Scripts that misbehave under `redelastic run`: they ignore signals, take all memory, or leave processes behind."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Closed, Failed
from redelastic.monitoring.sentences import sentence
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import launchers
from tests.support.agent_job import DRAINED, FAILED
from tests.support.cgroups import limited_memory
from tests.support.liveness import lives
from tests.support.long_tests import quick_rows
from tests.support.torchrun_job import LIMIT
from tests.support.unruly_job import REDELASTIC_RUN, UNRULY, UnrulyJob, environment, read_pid, run_standalone

pytestmark = pytest.mark.timeout(150)


@pytest.mark.parametrize(
    ("source", "code"), quick_rows([("", 0), ("import no_such_module", 1)]), ids=["ends", "does not start"]
)
def test_a_script_that_ends_at_once(tmp_path: Path, source: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    command = [*REDELASTIC_RUN, "--standalone", "--nproc-per-node=2", str(script)]
    done = launchers.run(command, environment(), LIMIT)
    assert done.returncode == code
    begun, *rest = done.stderr.splitlines()
    assert "redelastic.rendezvous.handler] Node" in begun
    if code:
        assert "No module named 'no_such_module'" in done.stderr
        assert f"{script} FAILED" in done.stderr
        assert "/redelastic/" not in done.stderr, "no traceback of redelastic"
    else:
        assert rest == ["redelastic run: finished: 1 round, 0 losses"]


def test_a_daemon_ends_with_the_run(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job:
        job.begin("a", action="leave_daemon", options=("--shutdown-timeout=4",))
        daemon = read_pid(job.wait_file("daemon"))
        assert lives(daemon)
        job.tell("finish")
        assert job.wait_end("a") == 0
        assert not lives(daemon)
        log = job.nodes["a"].stderr
        assert re.search(rf"left processes behind, which will get SIGTERM in \d s: {daemon} \(", log)
        assert f"did not exit within 4 s of SIGTERM: {daemon}." in log
        assert f"had left behind: {daemon}." in log


@pytest.mark.fault("workers have ended well, and an upload that they started goes on", "it may finish")
def test_an_upload_that_outlives_its_worker_may_finish(tmp_path: Path) -> None:
    done = run_standalone(tmp_path, "leave_upload")
    assert done.returncode == 0
    assert (tmp_path / "uploaded").exists()
    assert "that the workers had left behind" not in done.stderr


@pytest.mark.fault(
    "SIGTERM while processes that workers left behind may finish", "they get SIGTERM; the run has succeeded"
)
def test_sigterm_while_an_agent_waits_for_leftovers_is_a_success(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job:
        job.begin("a", action="leave_sleeper", options=(f"--shutdown-timeout={10 * LIMIT:.0f}",))
        job.wait("it waits", lambda: "left processes behind" in job.nodes["a"].stderr)
        sleeper = read_pid(job.wait_file("sleeper"))
        assert lives(sleeper)
        job.nodes["a"].terminate()
        assert job.wait_end("a") == 0
        assert not lives(sleeper)
        assert job.events(Closed), "the run is done"


@pytest.mark.fault("a worker fails, and a process that it started still runs", "it gets SIGTERM, and time to clean up")
def test_processes_of_a_failed_worker_may_clean_up(tmp_path: Path) -> None:
    done = run_standalone(tmp_path, "leave_cleaner")
    assert done.returncode == FAILED
    assert (tmp_path / "cleaned").exists()
    assert f"had left behind: {read_pid(tmp_path / 'cleaner')}." in done.stderr


@pytest.mark.fault("an agent is killed whose worker has started a daemon", "the daemon ends too")
def test_a_daemon_ends_with_an_agent_that_is_killed(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job:
        job.begin("a", action="leave_daemon")
        daemon, worker = read_pid(job.wait_file("daemon")), read_pid(job.wait_file("a-started"))
        job.nodes["a"].process.kill()
        assert job.wait_end("a") == -signal.SIGKILL
        job.wait("nothing of it is left", lambda: not lives(daemon) and not lives(worker))


@pytest.mark.fault("a worker ignores SIGTERM", "it is killed after `--shutdown-timeout`")
def test_a_worker_that_ignores_sigterm_is_killed_when_its_time_is_up(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job:
        job.begin("a", action="ignore_sigterm", options=("--shutdown-timeout=4", "--drain-timeout=0"))
        worker = read_pid(job.wait_file("a-started"))
        job.wait("it has begun to ignore it", lambda: _catches(worker, signal.SIGTERM))
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert (tmp_path / "ignored").exists()
        assert not lives(worker)


def _catches(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.long
def test_a_worker_that_closes_its_output(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job:
        job.begin("a", action="close_output", options=("--tee=3",))
        worker = read_pid(job.wait_file("a-started"))
        job.wait("it has closed it", lambda: not {"1", "2"} & {fd.name for fd in Path(f"/proc/{worker}/fd").iterdir()})
        job.tell("finish")
        assert job.wait_end("a") == 0


@pytest.mark.fault("the kernel's OOM killer ends a worker", "the log, the event and the report say so")
def test_a_worker_that_the_oom_killer_ended(server: RedisServer, run_id: str, tmp_path: Path) -> None:
    """The log, the event and the report of failures give the OOM kill as the cause."""
    where = [f"--rdzv-id={run_id}", f"--rdzv-endpoint={server.url}"]
    env = environment("take_all_memory")
    with limited_memory(2000) as members:  # room for an agent, 650 MB with the CUDA build, but not for a greedy worker
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members)]
        command = [*enter, *REDELASTIC_RUN, *where, str(UNRULY), str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == FAILED
    cause = "was killed for lack of memory, by the kernel's OOM killer (1 kill since the start)"
    log, _, report = done.stderr.partition(" FAILED\n")
    assert "worker 0 (rank 0, pid" in log
    assert cause in log
    assert cause in report
    control = RunControl(Connection.open(server.url), RunKeys(run_id))
    [event] = [event for event in control.events() if isinstance(event, Failed)]
    assert (event.local_rank, event.signal, event.oom_kills) == (0, "SIGKILL", 1)
    assert cause in sentence(event)
