"""Jobs whose agents preload: workers behave as without preloading, regroup, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from redelastic.cli import main
from redelastic.monitoring.control import UnknownNodeError
from redelastic.redis.server import RedisServer
from redelastic.workers.site.sitecustomize import VARIABLE
from tests.support.agent_job import AgentJob
from tests.support.liveness import lives
from tests.support.torchrun_job import LIMIT, LONG_LEASES
from tests.support.worker_processes import until

pytestmark = pytest.mark.timeout(300)

WITNESS = Path(__file__).parents[1] / "support" / "workers" / "witness.py"
# Variables that differ from one run to the next.
OWN = re.compile(r"MASTER_PORT|TORCHELASTIC_(RUN_ID|ERROR_FILE)|REDELASTIC_(AGENT|WORKER|KEY_PREFIX|REDIS_URL)")


def is_fork(pid: int) -> bool:
    """Whether a process is a template or was forked from one: the kernel still shows the template's environment."""
    return VARIABLE.encode() in Path(f"/proc/{pid}/environ").read_bytes()


def launch(directory: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`redelastic run` on this host alone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("REDELASTIC_")}
    return subprocess.Popen(
        [sys.executable, "-m", "redelastic", "run", "--standalone", *arguments],
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.long
def test_preloading_does_not_change_what_workers_see_and_log(tmp_path: Path) -> None:
    options = ["--nproc-per-node=2", "--tee=0:1,1:2", "--redirects=0:2,1:1", "--log-dir=logs", "--role=trainer"]
    options += ["--local-addr=127.0.0.1"]  # else each run looks for its own, and an interface may come or go in between
    runs = {}
    ignored = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT)  # as by nohup and others
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ignored}
    try:
        for name, preload in (("cold", ()), ("warm", ("--preload=json,logging",))):
            (tmp_path / name).mkdir()
            runs[name] = launch(tmp_path / name, *preload, *options, str(WITNESS), ".", "print", "5")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    seen, logged = {}, {}
    for name, run in runs.items():
        out, err = run.communicate(timeout=LIMIT)
        assert run.returncode == 0, err
        workers = [json.loads((tmp_path / name / f"{rank}-0.json").read_text()) for rank in range(2)]
        for worker in workers:
            worker["environment"] = {n: v for n, v in worker["environment"].items() if not OWN.fullmatch(n)}
            worker["cwd"] = Path(worker["cwd"]).name == name
        seen[name] = workers
        files = sorted((tmp_path / name / "logs").rglob("*.log"))
        logged[name] = [(file.name, file.read_text()) for file in files], sorted(out.splitlines())
    for warm, cold in zip(seen["warm"], seen["cold"], strict=True):
        for what, found in cold.items():
            assert warm.pop(what) == found, what
        assert not warm
    assert logged["warm"] == logged["cold"]
    assert any("line 4 of rank 1" in text for _, text in logged["warm"][0])


@pytest.mark.long
def test_an_error_is_reported_as_without_preloading(tmp_path: Path) -> None:
    run = launch(tmp_path, "--preload=torch", "--nproc-per-node=2", str(WITNESS), ".", "record")
    _, err = run.communicate(timeout=LIMIT)
    assert run.returncode == 1
    assert "RuntimeError: the worker was told to record" in err
    assert "Nothing is preloaded" not in err


def template_of(agent: psutil.Process, worker: int) -> psutil.Process | None:
    for child in agent.children():
        with contextlib.suppress(OSError):
            if child.pid != worker and is_fork(child.pid):
                return child
    return None


@pytest.mark.fault(
    "a node is killed whose workers are forks of a template",
    "the other nodes go on with forks again; no fork is a child of the template, and all end with the job",
)
def test_forks_train_and_regroup(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.start("a", "b", options=("--preload=torch",))
        epoch = job.wait_round("ab")
        assert all(is_fork(line.pid) for line in job.lines("start"))
        fault = job.note("SIGKILL to rank 0, whose workers are forks")
        victim, survivor = job.by_rank(epoch)
        victim.kill()
        epoch = job.wait_round([survivor.name], epoch, fault=fault)
        [worker] = {line.pid for line in job.lines("start") if line.epoch == epoch}
        assert is_fork(worker)
        assert psutil.Process(worker).ppid() == survivor.process.pid
        job.finish(survivor.name)


@pytest.mark.fault(
    "SIGKILL to an agent with a template of its workers", "the reaper ends the template with the workers"
)
def test_nothing_outlives_an_agent_with_a_template(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", options=("--preload=torch",))
        job.wait_round("a")
        left = job.nodes["a"].kill_agent_alone()
        assert len(left) == 3, "the reaper, the template and the worker"
        until(lambda: not any(lives(process) for process in left), "their end")


@pytest.mark.fault(
    "the template of the workers is killed", "its workers go on; the next ones are forks of a new template"
)
def test_a_template_that_is_killed_is_replaced(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", options=("--preload=torch",))
        epoch = job.wait_round("a")
        worker = job.lines("start")[0].pid
        agent = psutil.Process(job.nodes["a"].process.pid)
        killed = until(lambda: template_of(agent, worker), "the template")
        killed.kill()
        until(lambda: template_of(agent, worker) not in (None, killed), "another one")
        assert {line.pid for line in job.lines()} == {worker}
        job.tell("fail-a")
        epoch = job.wait_round("a", epoch)
        [worker] = {line.pid for line in job.lines("start") if line.epoch == epoch}
        assert is_fork(worker)
        job.finish("a")
        assert job.nodes["a"].stderr.count("The worker template was ended by SIGKILL") == 1


@pytest.mark.long
def test_a_node_imports_before_it_joins(server: RedisServer, tmp_path: Path) -> None:
    """The nodes that train go on meanwhile."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    with AgentJob(server, tmp_path, "1:2", conf={"last_call_timeout": 0.1}) as job:
        job.start("a")
        epoch = job.wait_round("a")
        job.start("b", options=("--preload=slow",), env={"PYTHONPATH": str(tmp_path)})
        with (tmp_path / "fifo").open("w"):  # blocks until b opens it
            with pytest.raises(UnknownNodeError):
                job.id_of("b")
            assert job.epoch == epoch
        job.wait_round("ab")
        job.finish("a", "b")


@pytest.mark.long
def test_a_drained_node_ends_its_template(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=("--preload=torch",))
        job.wait_round("a")
        processes_of_node = job.nodes["a"].tree()
        job.nodes["a"].terminate()
        job.wait_end("a")
        assert not any(lives(process) for process in processes_of_node)
        assert "left behind" not in job.nodes["a"].stderr


@pytest.mark.long
def test_the_agents_log_says_when_a_module_was_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import threading; t = threading.Timer(60, print); t.daemon = True; t.start()")
    (tmp_path / "script.py").write_text("import bad; print('the script ran')")
    run = launch(tmp_path, "--nproc-per-node=2", "script.py", PET_PRELOAD="json,bad")
    out, err = run.communicate(timeout=LIMIT)
    assert (run.returncode, out.count("the script ran")) == (0, 2), err
    assert err.count("workers start as new processes: bad starts 1 thread") == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--preload=torch", "--no-python", "ls"], "workers are started by ls, not by this Python"),
        (["--preload=torch", "--run-path", str(WITNESS)], "workers are functions"),
        (["--preload=torch,1x", str(WITNESS)], "preload='1x' is not a module name"),
    ],
)
def test_the_command_line_is_refused_with_the_reason(
    arguments: list[str], reason: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--standalone", "--nproc-per-node=1", *arguments]) == 2
    assert reason in capfd.readouterr().err
