"""Bad input and bad days of `redelastic run`: nothing hangs, nothing stays, and a few words say what was wrong."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from agent_job import AWARE, AgentJob
from cgroups import limited_memory
from torchrun_job import LIMIT, Job
from workers.unruly import FLOOD, LINE

from redelastic.cli import main
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.run.control import RunControl

pytestmark = pytest.mark.timeout(150)

WORKERS: Final = Path(__file__).parents[1] / "support" / "workers"
UNRULY: Final = WORKERS / "unruly.py"
OURS: Final = (sys.executable, "-m", "redelastic.cli", "run")
SHORT: Final = {"read_timeout": 2, "close_timeout": 1, "join_timeout": 4}  # for calls, in seconds
FAILED, USAGE, UNREACHABLE, DRAINED, REFUSED = 1, 2, 3, 75, 77


def environment(action: str = "", more: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("REDELASTIC_", "TORCHELASTIC_"))}
    return env | {"OMP_NUM_THREADS": "1", "UNRULY": action} | dict(more or {})


def run(directory: Path, action: str, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """One node on a server of its own, whose worker misbehaves."""
    command = [*OURS, "--standalone", *options, str(UNRULY), str(directory)]
    more = {"capture_output": True} | more
    return subprocess.run(command, env=environment(action), text=True, timeout=LIMIT, check=False, **more)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def pid_in(file: Path) -> int:
    return int(file.read_text())


class Unruly(AgentJob):
    """Nodes whose workers misbehave."""

    def begin(self, *names: str, action: str = "wait", **more: Any) -> None:
        self.start(*names, script=UNRULY, env={"UNRULY": action}, may_end=True, **more)

    def lose_redis(self) -> None:
        """Kill the server for good, once all workers run, and wait until the nodes know."""
        for name in self.nodes:
            self.wait_file(f"{name}-started")
        self.server.kill()
        knows = "Redis is away"
        self.wait("all know", lambda: all(knows in node.stderr for node in self.nodes.values()))

    def wait_file(self, name: str) -> Path:
        self.wait(f"there is a file {name}", (self.directory / name).exists)
        return self.directory / name


# -- the command line


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--standalone", "no-such-script.py"), "There is no script 'no-such-script.py'"),
        (("--standalone", "--run-path", "no-such-script.py"), "There is no script 'no-such-script.py'"),
        (("--standalone", "--no-python", "no-such-command"), "There is no command 'no-such-command'"),
        (("--rdzv-endpoint=127.0.0.1:1", str(UNRULY)), "--rdzv-id is missing"),
        (("--standalone", "--nnodes=1-2", str(UNRULY)), "--nnodes=1-2 is invalid: use N (4) or MIN:MAX (2:4)"),
        (("--standalone", "--nnodes=2:1", str(UNRULY)), "--nnodes=2:1 is invalid: use N (4) or MIN:MAX (2:4)"),
        (("--standalone", "--health-check=luck", str(UNRULY)), "There is no health check 'luck'"),
        (("--standalone", "--hang-start-timeout=3", str(UNRULY)), "hang_start_timeout needs hang_timeout"),
        (("--standalone", "--drain-timeout=nan", str(UNRULY)), "drain_timeout=nan"),
        (("--standalone", "--health-port=70000", str(UNRULY)), "70000"),
        (("--standalone", "--log-dir=/proc/here", "--redirects=3", str(UNRULY)), "/proc/here"),
        (("--standalone", f"--log-dir={UNRULY}", "--redirects=3", str(UNRULY)), f"{UNRULY} is a file"),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], told: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["run", *arguments]) == USAGE
    err = capfd.readouterr().err
    assert told in err
    assert err.startswith("redelastic run: ")
    assert err.count("\n") == 1


@pytest.mark.fault("Redis comes up after the nodes", "they wait for it, say so once, and train")
@pytest.mark.parametrize("agent", [True, False], ids=["redelastic run", "torchrun"])
def test_nodes_that_are_there_before_redis(tmp_path: Path, agent: bool) -> None:
    with RedisServer() as server, Job(server, tmp_path, "2:2", agent=agent) as job:
        server.kill()
        job.start("a", "b")
        said = "It is waited for, up to the join_timeout of 60 s"
        job.wait("they say that they wait", lambda: all(said in node.stderr for node in job.nodes.values()))
        assert not any(node.process.poll() for node in job.nodes.values())
        server.start()
        job.wait_round("ab")
        job.finish("a", "b")
        for node in job.nodes.values():
            assert node.stderr.count(said) == 1, "and once only"
            assert f"Redis at redis://{server.endpoint}" in node.stderr


@pytest.mark.fault("redelastic run: Redis is not there, or refuses us", "an error in words, exit code 3")
def test_a_server_that_is_not_there_or_does_not_let_us_in(
    server: RedisServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    where = server.url.rpartition("@")[2]
    for endpoint, told in (("127.0.0.1:1", "could not be reached"), (f"redis://:not-it@{where}", "password")):
        where_to = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=x", "--rdzv-conf=join_timeout=0.5"]
        assert main(["run", *where_to, str(UNRULY)]) == UNREACHABLE
        err = capfd.readouterr().err
        assert err.startswith("redelastic run: Redis at redis://")
        assert told in err
        assert "not-it" not in err
        assert err.count("\n") == 1


def test_a_health_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run(tmp_path, "wait", f"--health-port={port}")
    assert done.returncode == FAILED
    assert done.stderr.startswith(f"redelastic run: The health endpoint cannot listen on port {port}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a-started").exists()


def test_another_nnodes_than_the_others(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "1:1") as job:
        job.begin("a")
        job.wait_file("a-started")
        job.begin("b", nnodes="2:3")
        assert job.wait_end("b") == FAILED
        assert job.nodes["b"].stderr.startswith("redelastic run: ")
        assert "2" in job.nodes["b"].stderr.splitlines()[0]
        assert "Traceback" not in job.nodes["b"].stderr
        job.tell("finish")
        assert job.wait_end("a") == 0


def test_an_interrupt_while_it_waits_for_others(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "2:2") as job:
        job.begin("a")
        job.wait("a waits", lambda: job.redis("candidates"))
        job.nodes["a"].process.send_signal(signal.SIGINT)
        assert job.wait_end("a") == 128 + signal.SIGINT  # Python's own, as torchrun's
        assert "Traceback" not in job.nodes["a"].stderr
        assert not job.redis("candidates")


# -- scripts


@pytest.mark.parametrize(("source", "code"), [("", 0), ("import no_such_module", 1)], ids=["ends", "does not start"])
def test_a_script_that_ends_at_once(tmp_path: Path, source: str, code: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(source)
    command = [*OURS, "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == code
    assert "redelastic" not in done.stderr.replace("redelastic.agent.budget] worker", "").replace(str(tmp_path), "")
    if code:
        assert "No module named 'no_such_module'" in done.stderr
        assert f"{script} FAILED" in done.stderr
    else:
        assert not done.stderr


def test_a_daemon_ends_with_the_run(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "1:1") as job:
        job.begin("a", action="leave_daemon", options=("--shutdown-timeout=1",))
        daemon = pid_in(job.wait_file("daemon"))
        assert lives(daemon)
        job.tell("finish")
        assert job.wait_end("a") == 0
        assert not lives(daemon)
        log = job.nodes["a"].stderr
        assert re.search(rf"left processes behind, which get SIGTERM in \d s: {daemon} \(", log)
        assert f"did not heed SIGTERM within 1 s: {daemon}." in log
        assert f"had left behind were ended: {daemon}." in log


@pytest.mark.fault("workers have ended well, and an upload that they started goes on", "it may finish")
def test_an_upload_that_outlives_its_worker_may_finish(tmp_path: Path) -> None:
    done = run(tmp_path, "leave_upload")
    assert done.returncode == 0
    assert (tmp_path / "uploaded").exists()
    assert "had left behind were ended" not in done.stderr


@pytest.mark.fault("SIGTERM while what workers left behind may finish", "it gets SIGTERM; the run has succeeded")
def test_who_ends_an_agent_that_waits_for_leftovers_ends_a_success(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "1:1") as job:
        job.begin("a", action="leave_sleeper", options=(f"--shutdown-timeout={10 * LIMIT:.0f}",))
        job.wait("it waits", lambda: "left processes behind" in job.nodes["a"].stderr)
        sleeper = pid_in(job.wait_file("sleeper"))
        assert lives(sleeper)
        job.nodes["a"].terminate()
        assert job.wait_end("a") == 0
        assert not lives(sleeper)
        assert [event.reason for event in job.control.events() if event.event == "closed"], "the run is done"


@pytest.mark.fault("a worker fails, and what it has started still runs", "SIGTERM, and time to clean up")
def test_what_a_failed_worker_leaves_may_clean_up(tmp_path: Path) -> None:
    done = run(tmp_path, "leave_cleaner")
    assert done.returncode == FAILED
    assert (tmp_path / "cleaned").exists()
    assert f"had left behind were ended: {pid_in(tmp_path / 'cleaner')}." in done.stderr


@pytest.mark.fault("an agent is killed whose worker has started a daemon", "the daemon ends too")
def test_a_daemon_ends_with_an_agent_that_is_killed(server: RedisServer, tmp_path: Path) -> None:
    """And Redis shows that death, though nobody else is there to notice it."""
    with Unruly(server, tmp_path, "1:1") as job:
        job.begin("a", action="leave_daemon")
        daemon, worker = pid_in(job.wait_file("daemon")), pid_in(job.wait_file("a-started"))
        assert len(job.control.state().members) == 1
        job.nodes["a"].process.kill()
        assert job.wait_end("a") == -signal.SIGKILL
        job.wait("nothing of it is left", lambda: not lives(daemon) and not lives(worker))
        job.wait("it has left", lambda: not job.control.state().members)


@pytest.mark.fault("a worker ignores SIGTERM", "it is killed after `--shutdown-timeout`")
def test_a_worker_that_ignores_sigterm_is_killed_when_its_time_is_up(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "1:1") as job:
        job.begin("a", action="ignore_sigterm", options=("--shutdown-timeout=1", "--drain-timeout=0"))
        worker = pid_in(job.wait_file("a-started"))
        job.wait("it has begun to ignore it", lambda: _catches(worker, signal.SIGTERM))
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert (tmp_path / "ignored").exists()
        assert not lives(worker)


def _catches(pid: int, number: signal.Signals) -> bool:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (number - 1) & 1)


def test_a_worker_that_closes_its_output(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "1:1") as job:
        job.begin("a", action="close_output", options=("--tee=3",))
        worker = pid_in(job.wait_file("a-started"))
        job.wait("it has closed it", lambda: not {"1", "2"} & {fd.name for fd in Path(f"/proc/{worker}/fd").iterdir()})
        job.tell("finish")
        assert job.wait_end("a") == 0


# -- output


@pytest.mark.parametrize("how", ["--redirects=3", "--tee=3"])
def test_100_mb_of_output_into_files(tmp_path: Path, how: str) -> None:
    with (tmp_path / "console").open("wb") as console:
        done = run(tmp_path, "flood", how, f"--log-dir={tmp_path / 'logs'}", stdout=console, capture_output=False)
    assert done.returncode == 0
    [log] = (tmp_path / "logs").rglob("stdout.log")
    assert log.stat().st_size == FLOOD
    printed = (tmp_path / "console").stat().st_size
    assert printed == 0 if how == "--redirects=3" else printed > FLOOD


@pytest.mark.parametrize("options", [(), ("--tee=1",)], ids=["console", "tee"])
def test_100_mb_of_output_to_a_slow_reader(
    server: RedisServer, run_id: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """While nobody reads, the worker or the copy of its log waits, and the node keeps its lease; nothing is lost."""
    control = RunControl(Connection.open(server.url), RunKeys(run_id))
    where = [f"--rdzv-id={run_id}", f"--rdzv-endpoint={server.url}", "--rdzv-conf=keep_alive_interval=0.3"]
    command = [*OURS, *where, *options, str(UNRULY), str(tmp_path)]
    with subprocess.Popen(command, env=environment("flood"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        _wait(lambda: _full(process.stdout), "the pipe is full")
        [node] = control.state().members
        silent_since = time.monotonic()
        _wait(lambda: time.monotonic() - silent_since > 2 * control.state().lease, "two leases have passed")
        assert [still.id for still in control.state().members] == [node.id]
        assert control.state().members[0].lease > 0
        assert process.poll() is None, "it waits"
        size = 0
        while data := process.stdout.read(1 << 20):
            size += len(data)
        assert process.wait(LIMIT) == 0
    prefix = len("[default0]:") if options else 0
    assert size == FLOOD + prefix * FLOOD // LINE


def _full(pipe: Any) -> bool:
    """Whether who writes into a pipe has to wait; how many bytes that takes goes by how they were written."""
    writer = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY)
    try:
        return not select.select([], [writer], [], 0)[1]
    finally:
        os.close(writer)


def _wait(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, f"not within {LIMIT:g} s: {what}"
        time.sleep(0.02)


@pytest.mark.fault("a node is refused while Redis goes away", "it says why it was refused")
def test_a_refusal_outlives_redis(own_server: RedisServer, run_id: str, tmp_path: Path) -> None:
    where = [f"--rdzv-id={run_id}", f"--rdzv-endpoint={own_server.url}", "--rdzv-conf=read_timeout=1,close_timeout=1"]
    check = f"--health-command=kill -9 {own_server.pid}; echo the fan is broken; exit 3"
    command = [*OURS, *where, check, str(UNRULY), str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == REFUSED
    [said] = [line for line in done.stderr.splitlines() if "the fan is broken" in line]
    assert said == f"redelastic run: This node does not join run {run_id!r}: command: the fan is broken."


# -- disks and memory


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=False)
    if mounted.returncode != 0:
        pytest.skip("no file system can be mounted here: that takes root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_full_log_directory_is_refused(small_disk: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "flood", "--redirects=3", f"--log-dir={small_disk}")
    assert done.returncode == REFUSED
    assert done.stderr.count("\n") == 1
    assert f"the log directory {small_disk} has" in done.stderr
    assert not (tmp_path / "a-started").exists()


@pytest.mark.fault("the disk of the log directory is full", "the job goes on")
def test_a_log_directory_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    done = run(tmp_path, "flood", "--health-check=none", "--tee=3", f"--log-dir={small_disk}")
    assert os.statvfs(small_disk).f_bavail == 0
    assert done.returncode == FAILED, "a worker that cannot write has failed, as under torchrun"
    assert "exitcode  : 1 (" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.fault("a worker is ended by the kernel, out of memory", "it is told as that")
def test_a_worker_that_the_oom_killer_ended(server: RedisServer, run_id: str, tmp_path: Path) -> None:
    """The log says so, and the event, and the report of failures."""
    where = [f"--rdzv-id={run_id}", f"--rdzv-endpoint={server.url}"]
    env = environment("take_all_memory")
    with limited_memory(2000) as members:  # room for an agent, 650 MB with the CUDA build, but not for a greedy worker
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(members)]
        command = [*enter, *OURS, *where, str(UNRULY), str(tmp_path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == FAILED
    told = "was killed for lack of memory, by the kernel's OOM killer (1 kill since its start)"
    log, _, report = done.stderr.partition(" FAILED\n")
    assert "worker 0 (rank 0, pid" in log
    assert told in log
    assert told in report
    control = RunControl(Connection.open(server.url), RunKeys(run_id))
    [event] = [event for event in control.events() if event.event == "failed"]
    assert told in event.reason


# -- nodes and servers


@pytest.mark.fault("an agent is frozen, and thawed", "I4: it comes back as a new node")
def test_a_frozen_agent_comes_back_as_a_new_node(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2") as job:
        job.begin("a", "b")
        epoch = job.wait_round("ab")
        agent, *others = job.nodes["b"].tree()
        [worker] = [process for process in others if str(AWARE) in process.cmdline()]
        before = job.id_of("b")
        agent.suspend()
        epoch = job.wait_round("a", epoch)
        assert [event.node for event in job.events("lost")] == [before]
        assert agent.status() == psutil.STATUS_STOPPED
        agent.resume()
        job.wait_round("ab", epoch)
        assert job.id_of("b") != before
        assert not lives(worker.pid)
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


@pytest.mark.fault("an agent is frozen, its workers are not", "they are stopped once it is thawed")
def test_a_frozen_agents_workers_are_stopped(server: RedisServer, tmp_path: Path) -> None:
    """Those that would never have ended by themselves."""
    with Unruly(server, tmp_path, "1:2", conf={"last_call_timeout": 0.2}) as job:
        job.begin("b")
        worker = pid_in(job.wait_file("b-started"))
        [agent, *_] = job.nodes["b"].tree()
        before = job.control.state().members[0].id
        agent.suspend()
        job.wait("its lease is over", lambda: job.control.state().members[0].lease < 0)
        job.begin("a")
        job.wait("b is lost", lambda: before in [event.node for event in job.events("lost")])
        assert lives(worker), "nobody could stop it"
        agent.resume()
        job.wait("it is stopped", lambda: not lives(worker))
        job.wait("b is back", lambda: len(job.control.state().members) == 2)
        assert before not in [node.id for node in job.control.state().members]
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


@pytest.mark.fault("workers fail while Redis is away for good", "the agent ends in time, with its workers' error")
@pytest.mark.parametrize(
    ("max_restarts", "told"),
    [(0, "exitcode  : 5 ("), (3, "redelastic run: Redis at redis://")],
    ids=["the last time", "with restarts left"],
)
def test_workers_fail_while_redis_is_gone_for_good(
    own_server: RedisServer, tmp_path: Path, max_restarts: int, told: str
) -> None:
    """The node ends within the times that are set for calls."""
    with Unruly(own_server, tmp_path, "1:1", conf=SHORT) as job:
        job.begin("a", action="fail_at_the_end", max_restarts=max_restarts)
        job.lose_redis()
        job.tell("finish")
        assert job.wait_end("a") == FAILED
        assert told in job.nodes["a"].stderr
        assert "could not be told that this node leaves" in job.nodes["a"].stderr
        assert "Traceback" not in job.nodes["a"].stderr


@pytest.mark.fault("workers finish while Redis is away for good", "the agent ends in time, with success")
@pytest.mark.parametrize("names", ["a", "ab"])
def test_workers_succeed_while_redis_is_gone_for_good(own_server: RedisServer, tmp_path: Path, names: str) -> None:
    """Then so have the nodes, which cannot know of each other any more."""
    with Unruly(own_server, tmp_path, f"{len(names)}:{len(names)}", conf=SHORT) as job:
        job.begin(*names)
        job.lose_redis()
        job.tell("finish")
        for name in names:
            assert job.wait_end(name) == 0
            err = job.nodes[name].stderr
            assert "could not be told that this node leaves" in err
            assert ("whether the others have is not known" in err) == (names == "ab")
            assert "Traceback" not in err


@pytest.mark.fault("a node drains while Redis is away", "it leaves when its workers have saved")
def test_a_drain_while_redis_is_gone(own_server: RedisServer, tmp_path: Path) -> None:
    """Whoever stops the node does not wait in vain: it has nobody to ask, and goes."""
    with Unruly(own_server, tmp_path, "1:1", conf=SHORT) as job:
        job.begin("a", options=("--drain-timeout=600",))
        job.lose_redis()
        worker = pid_in(tmp_path / "a-started")
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        assert not lives(worker)
        assert len(job.nodes["a"].stderr.splitlines()) < 12


@pytest.mark.fault("a node dies while another waits for its end", "the other ends")
def test_a_node_that_dies_while_another_waits_for_its_end(server: RedisServer, tmp_path: Path) -> None:
    with Unruly(server, tmp_path, "2:2") as job:
        first, second = _one_ends_first(job, tmp_path)
        assert job.nodes[first].process.poll() is None, "it waits for the other one"
        job.nodes[second].kill()
        assert job.wait_end(first) == 0
        assert "others have to go on without it" in job.nodes[first].stderr


@pytest.mark.fault("Redis goes away while a node waits for the others' end", "it ends when they do")
def test_an_outage_while_a_node_waits_for_the_others_end(own_server: RedisServer, tmp_path: Path) -> None:
    """It must not take a Redis that is away for the end, and close the run of those who still work."""
    with Unruly(own_server, tmp_path, "2:2") as job:
        first, second = _one_ends_first(job, tmp_path)
        pid = own_server.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        time.sleep(4)  # longer than a call and all its retries there
        os.kill(pid, signal.SIGCONT)
        job.wait("it has heard of it", lambda: "Redis is back" in job.nodes[first].stderr)
        assert "closed" not in job.redis("run")
        assert job.nodes[first].process.poll() is None, "it still waits"
        job.nodes[second].kill()
        assert job.wait_end(first) == 0


def _one_ends_first(job: Unruly, directory: Path) -> tuple[str, str]:
    """Start two nodes of which one ends its workers and waits; returns its name, and that of the one that works on."""
    job.begin("a", "b", action="end_first")
    job.wait_file("a-started")
    job.wait_file("b-started")
    job.wait("the first has ended", lambda: job.redis("store:1") and _exited(job) == 1)
    [first] = [n for n in "ab" if not lives(pid_in(directory / f"{n}-started"))]
    [second] = {"a", "b"} - {first}
    return first, second


def _exited(job: Unruly) -> int:
    return sum(key.startswith("redelastic/exit/") for key in job.redis("store:1") or {})
