"""An agent's workers are forks of a template, or start as always where that cannot work, and people hear why."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from agent_job import AgentJob
from torch.distributed.elastic.multiprocessing import api
from torchrun_job import LIMIT
from worker_processes import lives, until

from redelastic.agent.workers import processes, template, warm
from redelastic.agent.workers.site.sitecustomize import VARIABLE
from redelastic.agent.workers.template import Fork
from redelastic.agent.workers.warm import WarmStart, refuse
from redelastic.cli import main
from redelastic.redis.server import RedisServer
from redelastic.run.control import UnknownNodeError

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="adopts orphans"),
]

WITNESS = Path(__file__).parents[1] / "support" / "workers" / "witness.py"
# What differs from one run to the next.
OWN = re.compile(r"MASTER_PORT|TORCHELASTIC_(RUN_ID|ERROR_FILE)|REDELASTIC_(AGENT|WORKER|KEY_PREFIX|REDIS_URL)")
MODEL = "import os\nthreads = os.environ.get('OMP_NUM_THREADS')\nvalue = 1\n"


def is_fork(pid: int) -> bool:
    """Whether a process was forked from a template: the kernel still shows the environment of that."""
    return VARIABLE.encode() in Path(f"/proc/{pid}/environ").read_bytes()


# -- which template, and whether any


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., WarmStart]]:
    made: list[WarmStart] = []
    processes._adopt(True)

    def start(*modules: str, is_hurried: Callable[[], bool] = lambda: False) -> WarmStart:
        arguments = ("-u", str(tmp_path / "script.py"), "--rank=${local_rank}")
        spec: Any = SimpleNamespace(entrypoint=sys.executable, args=arguments, local_world_size=2)
        made.append(WarmStart(spec, modules, {"OWN": "1"}, set(), is_hurried))
        return made[-1]

    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "script.py").write_text("import model, sys; print(model.threads, model.value, *sys.argv[1:])")
    yield start
    for one in made:
        one.close()
    processes._adopt(False)


def start_group(one: WarmStart, tmp_path: Path, **environment: str) -> list[tuple[bool, str]]:
    """Have torch start two workers, and wait for their ends: whether each is a fork, and what it says."""
    ends = []
    with one.starting():
        handlers = [
            api.get_subprocess_handler(
                entrypoint=sys.executable,
                args=("-u", str(tmp_path / "script.py"), f"--rank={rank}"),
                env={"RANK": str(rank), "REDELASTIC_EPOCH": "7", "OWN": "1", **environment},
                stdout=str(tmp_path / f"{rank}.out"),
                stderr="",
                local_rank_id=rank,
                numa_options=None,
            )
            for rank in range(2)
        ]
    for rank, handler in enumerate(handlers):
        assert handler.proc.wait(LIMIT) == 0
        assert handler._stdout
        handler._stdout.close()
        ends.append((isinstance(handler.proc, Fork), (tmp_path / f"{rank}.out").read_text().strip()))
    return ends


def pid_of(one: WarmStart) -> int:
    assert one._template is not None
    return one._template.pid


def test_a_template_serves_as_long_as_it_fits(make: Callable[..., WarmStart], tmp_path: Path) -> None:
    one = make("model")
    one.prepare()
    first = pid_of(one)
    assert one._spared == {first}
    assert start_group(one, tmp_path, OMP_NUM_THREADS="3", LOCAL_RANK="0")[0] == (True, "3 1 --rank=0")
    second = pid_of(one)
    assert second != first, "what imports may have read was another"
    more = {
        "LOCAL_RANK": "5",
        "MASTER_PORT": "9",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "REDELASTIC_EPOCH": "8",
        "CUDA_VISIBLE_DEVICES": "4",
        "GLOO_SOCKET_IFNAME": "x",
    }
    assert start_group(one, tmp_path, OMP_NUM_THREADS="3", **more)[1] == (True, "3 1 --rank=1")
    assert pid_of(one) == second
    (tmp_path / "model.py").write_text(MODEL + "value = 22\n")
    assert start_group(one, tmp_path, OMP_NUM_THREADS="3")[0] == (True, "3 22 --rank=0")
    assert pid_of(one) not in (first, second)
    assert one._spared == {pid_of(one)}
    template_process = psutil.Process(pid_of(one))
    one.close()
    assert not lives(template_process)
    assert one._spared == set()


def test_workers_do_not_wait_for_ever_for_a_template(
    make: Callable[..., WarmStart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm, "PATIENCE", 0.01)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    one = make("slow")
    one.prepare()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    assert [r.getMessage() for r in caplog.records] == [
        (
            "Nothing is preloaded, and workers start as new processes: "
            "the template did not finish its imports within 0.01 s."
        )
    ]
    (tmp_path / "fifo").write_text("")
    monkeypatch.undo()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [True, True], "it is there for the next ones"


def test_a_node_that_is_to_leave_does_not_wait_for_its_template(
    make: Callable[..., WarmStart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "PATIENCE", 100 * LIMIT)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    leaves = threading.Event()
    one = make("slow", is_hurried=leaves.is_set)
    one.prepare()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.await_template)
        until(one._lock.locked, "it waits")
        leaves.set()
        waiting.result(LIMIT)
    assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]


def test_a_template_that_dies_is_noticed_though_a_process_of_its_own_lives(
    make: Callable[..., WarmStart], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Which has the agent's socket too, so that nobody hangs up."""
    told = f"open({str(tmp_path / 'child')!r}, 'w').write(str(child))"
    (tmp_path / "dies.py").write_text(f"import os, time\nchild = os.fork() or time.sleep(600)\n{told}\nos._exit(3)")
    one = make("dies")
    one.prepare()
    dead = one._template
    assert dead
    until(lambda: not dead.lives(), "its end")
    try:
        one.tend()
    finally:
        os.kill(int((tmp_path / "child").read_text()), signal.SIGKILL)
    assert one._template is None
    assert one._spared == set()
    assert "the template ended with status 3 during its imports" in caplog.text


def test_a_template_that_the_kernel_does_not_let_go_is_not_waited_for(make: Callable[..., WarmStart]) -> None:
    class Stuck:
        def wait(self, timeout: float) -> int:
            raise subprocess.TimeoutExpired("template", timeout)

        def poll(self) -> None:
            pass

    one = make("model")
    one.prepare()
    assert one._template
    real, stuck = one._template._process, Stuck()
    stuck.pid, stuck.kill = real.pid, real.kill  # type: ignore[attr-defined]
    one._template._process = stuck  # type: ignore[assignment]
    one.close()
    assert one._spared == {real.pid}, "it is nobody's worker even so"
    real.wait(LIMIT)


def test_what_cannot_be_preloaded_is_told_once(
    make: Callable[..., WarmStart], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "bad.py").write_text("import threading; t = threading.Timer(60, print); t.daemon = True; t.start()")
    one = make("model", "bad")
    one.prepare()

    def refused() -> bool:
        one.tend()
        return one._template is None

    until(refused, "that it is refused")
    for _ in range(2):
        assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    [record] = caplog.records
    assert record.getMessage() == (
        "Nothing is preloaded, and workers start as new processes: "
        "bad starts 1 thread, which a fork would lose, when it is imported."
    )


def test_a_template_that_was_killed_is_replaced_once_until_workers_need_it(
    make: Callable[..., WarmStart], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = make("model")
    assert start_group(one, tmp_path)[0][0]
    for replaced in (True, False):
        before = one._template
        assert before is not None
        before.await_ready(LIMIT)
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: not before.lives(), "its end")  # noqa: B023  # called at once
        one.tend()
        assert (one._template is not None) == replaced
        assert one._spared == ({pid_of(one)} if replaced else set()), "another process may get its number"
    assert [fork for fork, _ in start_group(one, tmp_path)] == [True, True]
    told = "The worker template was ended by SIGKILL; {}."
    what_next = ("creating a new one", "the next workers get a new one")
    assert [record.getMessage() for record in caplog.records] == [told.format(then) for then in what_next]


def test_a_template_that_is_ready_is_watched_without_looking_at_it_again(
    make: Callable[..., WarmStart], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking each second took an agent a tenth of all its CPU time."""
    one = make("model")
    one.prepare()
    one.await_template()
    monkeypatch.setattr(warm, "REST", 0.3)
    began = time.monotonic()
    one.tend()
    assert time.monotonic() - began >= 0.3, "while it lives, only the limit ends the wait"
    monkeypatch.setattr(warm, "REST", 2 * LIMIT)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(one.tend)
        os.kill(pid_of(one), signal.SIGKILL)
        waiting.result(LIMIT)


def test_a_template_is_known_to_be_ready_before_workers_need_it(make: Callable[..., WarmStart]) -> None:
    one = make("model")
    one.prepare()
    assert one._template
    until(lambda: one._template._has_spoken(0.1), "that it has imported everything")  # type: ignore[union-attr]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warm, "REST", 0.0)
        one.tend()
    assert one._template.ready


def test_a_template_that_hangs_is_given_up_for_this_group(
    make: Callable[..., WarmStart], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(template, "HAND_OVER", 0.2)
    one = make("model")
    assert start_group(one, tmp_path)[0][0]
    frozen = psutil.Process(pid_of(one))
    frozen.suspend()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [False, False]
    assert not lives(frozen)
    assert len(caplog.records) == 1
    assert "workers start as new processes: the template failed: it does not answer" in caplog.text
    monkeypatch.undo()
    assert [fork for fork, _ in start_group(one, tmp_path)] == [True, True]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"entrypoint": print}, "workers are functions"),
        ({"entrypoint": print, "args": (3, None)}, "workers are functions"),
        ({"entrypoint": "ls"}, "workers are started by ls, not by this Python"),
        ({"args": ("-u", "-I", "x.py")}, "-I is a Python option"),
        ({"numa_options": object()}, "NUMA nodes"),
        ({"owns_process": False}, "this process is not the agent's own"),
    ],
)
def test_what_no_template_can_be_made_for_is_refused(wrong: dict[str, Any], told: str) -> None:
    settings = {"entrypoint": sys.executable, "args": ("-u", "-m", "x", "-I"), "numa_options": None, **wrong}
    owns_process = settings.pop("owns_process", True)
    spec: Any = SimpleNamespace(**settings)
    with pytest.raises(ValueError, match=f"Nothing can be preloaded here: .*{told}.* Remove preload"):
        refuse(spec, owns_process=owns_process)


def test_a_spec_that_is_right_is_not_refused() -> None:
    for args in (("-u", "x.py", "-c"), ("-uOO", "-m", "x", "-I"), ("x.py",)):
        spec: Any = SimpleNamespace(entrypoint=sys.executable, args=args, numa_options=None)
        refuse(spec, owns_process=True)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--preload=torch", "--no-python", "ls"], "workers are started by ls, not by this Python"),
        (["--preload=torch", "--run-path", str(WITNESS)], "workers are functions"),
        (["--preload=torch,1x", str(WITNESS)], "preload='1x' is not a module name"),
    ],
)
def test_the_command_line_is_refused_with_the_reason(
    arguments: list[str], told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--standalone", "--nproc-per-node=1", *arguments]) == 2
    assert told in capfd.readouterr().err


# -- whole jobs


def launch(directory: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """`redelastic run` on this host alone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("REDELASTIC_")}
    return subprocess.Popen(
        [sys.executable, "-m", "redelastic.cli", "run", "--standalone", *arguments],
        env={**env, "OMP_NUM_THREADS": "1", **environment},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_workers_see_and_log_the_same_as_without(tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--tee=0:1,1:2", "--redirects=0:2,1:1", "--log-dir=logs", "--role=trainer")
    runs = {}
    for name, preload in (("cold", ()), ("warm", ("--preload=json,logging",))):
        (tmp_path / name).mkdir()
        runs[name] = launch(tmp_path / name, *preload, *options, str(WITNESS), ".", "print", "5")
    seen, logged = {}, {}
    for name, run in runs.items():
        out, err = run.communicate(timeout=LIMIT)
        assert run.returncode == 0, err
        told = [json.loads((tmp_path / name / f"{rank}-0.json").read_text()) for rank in range(2)]
        for worker in told:
            worker["environment"] = {n: v for n, v in worker["environment"].items() if not OWN.fullmatch(n)}
            worker["cwd"] = Path(worker["cwd"]).name == name
        seen[name] = told
        files = sorted((tmp_path / name / "logs").rglob("*.log"))
        logged[name] = [(file.name, file.read_text()) for file in files], sorted(out.splitlines())
    assert seen["warm"] == seen["cold"]
    assert logged["warm"] == logged["cold"]
    assert any("line 4 of rank 1" in text for _, text in logged["warm"][0])


def test_an_error_is_reported_as_ever(tmp_path: Path) -> None:
    run = launch(tmp_path, "--preload=torch", "--nproc-per-node=2", str(WITNESS), ".", "record")
    _, err = run.communicate(timeout=LIMIT)
    assert run.returncode == 1
    assert "RuntimeError: the worker was told to record" in err
    assert "Nothing is preloaded" not in err


def template_of(agent: psutil.Process) -> psutil.Process | None:
    for child in agent.children():
        with contextlib.suppress(psutil.Error):
            if " ".join(child.cmdline()) == "redelastic template":
                return child
    return None


@pytest.mark.fault(
    "a node is killed whose workers are forks of a template",
    "the others go on without it, their workers forks again; none is a child of the template, and all end with the job",
)
def test_forks_train_and_regroup(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2") as job:
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
    "SIGKILL to an agent with a template of its workers", "the template ends with the workers, at the warden's hand"
)
def test_nothing_outlives_an_agent_with_a_template(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", options=("--preload=torch",))
        job.wait_round("a")
        left = job.nodes["a"].kill_agent_alone()
        assert len(left) == 3, "the warden, the template and the worker"
        until(lambda: not any(lives(process) for process in left), "their end")


@pytest.mark.fault(
    "the template of the workers is killed", "the workers are not touched; the next ones are forks of another"
)
def test_a_template_that_is_killed_is_replaced(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.start("a", options=("--preload=torch",))
        epoch = job.wait_round("a")
        worker = job.lines("start")[0].pid
        agent = psutil.Process(job.nodes["a"].process.pid)
        killed = until(lambda: template_of(agent), "the template")
        killed.kill()
        until(lambda: template_of(agent) not in (None, killed), "another one")
        assert {line.pid for line in job.lines()} == {worker}
        job.tell("fail-a")
        epoch = job.wait_round("a", epoch)
        [worker] = {line.pid for line in job.lines("start") if line.epoch == epoch}
        assert is_fork(worker)
        job.finish("a")
        assert job.nodes["a"].stderr.count("The worker template was ended by SIGKILL") == 1


def test_a_node_imports_before_it_joins(server: RedisServer, tmp_path: Path) -> None:
    """Those that train go on meanwhile."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "slow.py").write_text(f"open({str(tmp_path / 'fifo')!r}).read()")
    with AgentJob(server, tmp_path, "1:2", conf={"last_call_timeout": 0.1}) as job:
        job.start("a")
        epoch = job.wait_round("a")
        job.start("b", options=("--preload=slow",), env={"PYTHONPATH": str(tmp_path)})
        with (tmp_path / "fifo").open("w"):  # waits for who reads
            with pytest.raises(UnknownNodeError):
                job.id_of("b")
            assert job.epoch == epoch
        job.wait_round("ab")
        job.finish("a", "b")


def test_a_drained_node_ends_its_template(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=("--preload=torch",))
        job.wait_round("a")
        processes_of_node = job.nodes["a"].tree()
        job.nodes["a"].terminate()
        job.wait_end("a")
        assert not any(lives(process) for process in processes_of_node)
        assert "left behind" not in job.nodes["a"].stderr


def test_the_agents_log_says_when_a_module_was_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("import threading; t = threading.Timer(60, print); t.daemon = True; t.start()")
    (tmp_path / "script.py").write_text("import bad; print('the script ran')")
    run = launch(tmp_path, "--nproc-per-node=2", "script.py", PET_PRELOAD="json,bad")
    out, err = run.communicate(timeout=LIMIT)
    assert (run.returncode, out.count("the script ran")) == (0, 2), err
    assert err.count("workers start as new processes: bad starts 1 thread") == 1
