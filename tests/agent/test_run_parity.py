"""`redelastic run` against torchrun: the same scripts see, print, log and end the same under both."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import psutil
import pytest

from redelastic.cli import main
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.addresses import INTERFACE_VARIABLES
from tests.support import launchers
from tests.support.long_tests import quick_first, quick_rows
from tests.support.waiting import Within

pytestmark = pytest.mark.timeout(180)

TORCHRUN: Final = ("-m", "torch.distributed.run")
REDELASTIC: Final = ("-m", "redelastic", "run")
ALONE: Final = ("--standalone",)
WITNESS: Final = Path(__file__).parents[1] / "support" / "workers" / "witness.py"
TOKEN: Final = "TEST_TOKEN"
GRACE: Final = 10.0  # in seconds: for processes that outlive their launcher to end
LIMIT: Final = 90.0  # in seconds, for each wait: far above what it takes
# Variables that differ from run to run, or that only `redelastic run` sets.
OWN: Final = re.compile(
    r"TEST_TOKEN|MASTER_PORT|TORCHELASTIC_(RUN_ID|ERROR_FILE|TIMER_FILE)|REDELASTIC_(AGENT|WORKER|PID_NAMESPACE|EPOCH|KEY_PREFIX)"
)
until = Within(LIMIT)
Process: TypeAlias = "subprocess.Popen[bytes] | launchers.Launcher"


@dataclass
class Ended:
    """A launcher that has ended."""

    code: int
    out: str
    err: str
    directory: Path  # of the workers
    time: float  # when it had ended
    left: list[int]  # pids of processes that it started and did not end

    def workers(self, attempt: int = 0) -> dict[int, dict[str, Any]]:
        """The reports of an attempt's workers, by rank."""
        found = {int(path.name.split("-")[0]): path for path in self.directory.glob(f"[0-9]*-{attempt}.json")}
        return {rank: json.loads(found[rank].read_text()) for rank in sorted(found)}

    @property
    def report(self) -> str:
        """The report of the worker that failed first, without the parts that differ from run to run."""
        [report] = re.findall(r"={20,}\n([^\n]* FAILED\n.*)={20,}", self.err, re.DOTALL)
        title, root = report.split("\n", 1)[0], report.split("Root Cause")[1]
        report = re.sub(r"(time +: |pid: |error_file: |PID |\[)[^\s)\]]+", r"\1", f"{title}\n{root}")
        return re.sub("={20,}|-{20,}", "rule", report)  # a rule is as long as the longest line, which may have the pid

    @property
    def log_files(self) -> dict[str, str]:
        """The text of each file in the log directory, without the run's id and the random part of names."""
        base = self.directory / "logs"
        named = {str(path.relative_to(base)): path.read_text() for path in sorted(base.rglob("*")) if path.is_file()}
        return {re.sub(r"^[^/]+_\w{8}/", "RUN/", name): text for name, text in named.items()}


def command(launcher: Sequence[str], directory: Path, options: Sequence[str], script: Sequence[str]) -> list[str]:
    """A command line, in which @here stands for the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    return [sys.executable, *launcher, *(word.replace("@here", str(directory)) for word in (*options, *script))]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("REDELASTIC_", "TORCHELASTIC_"))}
    # `redelastic run` sets gloo's interface unless the environment has it; an earlier test may have set it.
    return env | {"OMP_NUM_THREADS": "1"} | dict.fromkeys(INTERFACE_VARIABLES, "lo") | dict(more or {})


def survivors(token: str) -> list[psutil.Process]:
    """The processes that a launcher has left, found by its token."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(TOKEN) == token and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            pass
    return found


@contextmanager
def started(arguments: list[str], token: str, env: Mapping[str, str], *files: Any, **more: Any) -> Iterator[Process]:
    """A launcher, which is killed at the end with all of its processes."""
    process = launchers.start(arguments, {**env, TOKEN: token}, *files, **more)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for other in survivors(token):
            other.kill()


def run(
    launcher: Sequence[str],
    directory: Path,
    options: Sequence[str],
    script: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    act: Callable[[Process, Path], None] | None = None,
) -> Ended:
    """Run a launcher to its end; `act` may do something to it meanwhile."""
    out, err = directory.with_suffix(".out"), directory.with_suffix(".err")
    arguments = command(launcher, directory, options, script)
    given = {name: value.replace("@here", str(directory)) for name, value in (env or {}).items()}
    token = uuid.uuid4().hex
    with (
        out.open("w") as o,
        err.open("w") as e,
        Path(__file__).open() as stdin,
        started(arguments, token, environment(given), o, e, stdin=stdin, cwd=directory.parent) as process,
    ):
        if act is not None:
            act(process, directory)
        code, ended = process.wait(LIMIT), time.time()
        deadline = time.monotonic() + GRACE
        while (left := survivors(token)) and time.monotonic() < deadline:
            time.sleep(0.02)
    return Ended(code, out.read_text(), err.read_text(), directory, ended, [one.pid for one in left])


def both(directory: Path, options: Sequence[str], *more: Any, **named: Any) -> tuple[Ended, Ended]:
    """The same job under torchrun and `redelastic run`, at the same time; each with a rendezvous of its own."""
    with ThreadPoolExecutor(2) as pool:
        by_torchrun = pool.submit(run, TORCHRUN, directory / "by_torchrun", (*ALONE, *options), *more, **named)
        by_redelastic = pool.submit(run, REDELASTIC, directory / "by_redelastic", (*ALONE, *options), *more, **named)
        return by_torchrun.result(), by_redelastic.result()


def seen(ended: Ended, *, alone: bool = True) -> list[dict[str, Any]]:
    """What the workers saw, by rank, without values that differ from run to run or only `redelastic run` sets."""
    workers: list[dict[str, Any]] = json.loads(
        json.dumps([*ended.workers().values()]).replace(str(ended.directory), "@here")
    )
    for worker in workers:
        env, is_redelastic = worker["environment"], "REDELASTIC_AGENT" in worker["environment"]
        assert env.pop("PYTHONFAULTHANDLER", None) == ("1" if is_redelastic else None), (
            "a crash in C leaves a traceback"
        )
        worker["names"] = sorted(name for name in env if not name.startswith("REDELASTIC_"))
        if alone:  # both are this host
            assert env.pop("MASTER_ADDR") in ("localhost", "127.0.0.1")
        worker["environment"] = {name: value for name, value in env.items() if not OWN.fullmatch(name)}
        if not {str(WITNESS), "tests.support.workers.witness"} & set(worker["orig_argv"][:3]):  # multiprocessing's
            del worker["orig_argv"], worker["files"]
    return workers


# -- what workers get


def test_workers_get_the_same_environment_and_arguments(server: RedisServer, tmp_path: Path) -> None:
    """Both on Redis, each as a run of its own."""
    where = ("--rdzv-backend=redis", f"--rdzv-endpoint={server.url}", "--nproc-per-node=2", "--role=trainer")
    script = (str(WITNESS), "@here", "", "-x", "--y=1")

    def one(launcher: Sequence[str], name: str) -> Ended:
        return run(launcher, tmp_path / name, (*where, f"--rdzv-id={uuid.uuid4().hex}"), script)

    with ThreadPoolExecutor(2) as pool:
        by_torchrun, by_redelastic = pool.map(one, (TORCHRUN, REDELASTIC), ("by_torchrun", "by_redelastic"))
    assert (by_torchrun.code, by_redelastic.code) == (0, 0), by_redelastic.err
    assert [worker["environment"]["RANK"] for worker in seen(by_torchrun, alone=False)] == ["0", "1"]
    assert seen(by_redelastic, alone=False) == seen(by_torchrun, alone=False)
    assert seen(by_redelastic, alone=False)[1]["argv"] == [str(WITNESS), "@here", "", "-x", "--y=1"]
    assert seen(by_redelastic, alone=False)[0]["stdin"] == __file__, "standard input is the launcher's"


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "script"),
    [
        (
            ("-m", "--role=a", "--nproc-per-node=cpu", "--monitor-interval=0.3"),
            ("tests.support.workers.witness", "@here"),
        ),
        (
            ("--no-python", "--virtual-local-rank", "--nproc-per-node=2"),
            (sys.executable, str(WITNESS), "@here", "", "${local_rank}"),
        ),
        (
            ("--run-path", "--start-method=fork", "--max-restarts=3", "--nproc-per-node=auto"),
            (str(WITNESS), "@here"),
        ),
        (("--run-path", "--start-method=spawn"), (str(WITNESS), "@here", "", "x")),
        (("--run-path", "--start-method=forkserver"), (str(WITNESS), "@here", "", "x")),
    ],
    ids=["module", "no-python", "fork", "spawn", "forkserver"],
)
def test_ways_to_start_workers(tmp_path: Path, options: tuple[str, ...], script: tuple[str, ...]) -> None:
    more = {"PYTHONPATH": str(WITNESS.parents[3]), "CUDA_VISIBLE_DEVICES": "3,5"}
    by_torchrun, by_redelastic = both(tmp_path, options, script, more)
    assert (by_torchrun.code, by_redelastic.code) == (0, 0), by_redelastic.err
    assert seen(by_torchrun)
    assert seen(by_redelastic) == seen(by_torchrun)


# -- what they print


@pytest.mark.parametrize(
    "options",
    quick_first(
        [
            ("--redirects=3",),
            ("--tee=3", "--duplicate-stdout-filters=line 1 ,line 2 ", "--duplicate-stderr-filters=rank 1"),
            ("--tee=0:1,1:2", "--redirects=0:2,1:1", "--local-ranks-filter=1"),
        ]
    ),
    ids=["redirects", "tee", "each its own"],
)
def test_logs_and_output_are_the_same(tmp_path: Path, options: tuple[str, ...]) -> None:
    more = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${role_name} ${rank}/${local_rank}> "}
    by_torchrun, by_redelastic = both(
        tmp_path, ("--nproc-per-node=2", "--log-dir=@here/logs", *options), (str(WITNESS), "@here", "print", "5"), more
    )
    assert (by_torchrun.code, by_redelastic.code) == (0, 0), by_redelastic.err
    assert any("line 4 of rank" in text for text in by_torchrun.log_files.values())
    # in a file that several workers share, the order of their lines is by chance
    own_lines, torchrun_lines = (
        {name: sorted(text.splitlines()) for name, text in run.log_files.items()}
        for run in (by_redelastic, by_torchrun)
    )
    assert own_lines == torchrun_lines
    assert sorted(by_redelastic.out.splitlines()) == sorted(by_torchrun.out.splitlines())
    of_workers = [line for line in by_redelastic.err.splitlines() if "redelastic" not in line]
    assert sorted(of_workers) == sorted(by_torchrun.err.splitlines())


# -- how they end


@pytest.mark.parametrize(
    ("action", "message"),
    quick_rows(
        [
            (("exit", "3"), "exitcode  : 3 ("),
            (("die", "SIGSEGV"), "(SIGSEGV)"),
            (("raise",), "exitcode  : 1 ("),
            (("record",), "RuntimeError: the worker was told to record"),
        ]
    ),
    ids=["exit", "signal", "exception", "record"],
)
def test_failures_are_reported_alike(tmp_path: Path, action: tuple[str, ...], message: str) -> None:
    more = {"TORCHELASTIC_ERROR_FILE": "@here/error.json"}
    by_torchrun, by_redelastic = both(tmp_path, ("--nproc-per-node=2",), (str(WITNESS), "@here", *action), more)
    assert (by_torchrun.code, by_redelastic.code) == (1, 1), by_redelastic.err
    assert message in by_torchrun.report
    assert "rank      : 1 (local_rank: 1)" in by_torchrun.report
    assert by_redelastic.report == by_torchrun.report
    handed_up = [
        json.loads(p.read_text()) for e in (by_torchrun, by_redelastic) if (p := e.directory / "error.json").exists()
    ]
    assert len(handed_up) == (2 if action == ("record",) else 0), (
        "the first error is written to the launcher's error file"
    )
    assert all(message.endswith(one["message"]["message"]) for one in handed_up)


@pytest.mark.long
def test_a_second_attempt_is_numbered_alike(tmp_path: Path) -> None:
    by_torchrun, by_redelastic = both(tmp_path, ("--max-restarts=2",), (str(WITNESS), "@here", "fail-once"))
    assert (by_torchrun.code, by_redelastic.code) == (0, 0), by_redelastic.err
    for ended in (by_torchrun, by_redelastic):
        counts = [ended.workers(n)[0]["environment"]["TORCHELASTIC_RESTART_COUNT"] for n in (0, 1)]
        assert counts == ["0", "1"]
        assert not ended.workers(2)


def waits(launcher: Process, directory: Path, attempt: str = "0-0") -> None:
    until(lambda: (directory / f"{attempt}-waits.json").exists() or launcher.poll() is not None, "the worker waits")
    assert launcher.poll() is None, "the launcher has ended"


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR2])
def test_workers_get_the_signal_that_ends_the_launcher(tmp_path: Path, number: signal.Signals) -> None:
    """Both launchers then exit with 1."""

    def act(launcher: Process, directory: Path) -> None:
        waits(launcher, directory)
        launcher.send_signal(number)
        until((directory / f"0-0-{number.name}.json").exists, "the worker got the signal")

    options, env = ("--signals-to-handle=SIGINT,SIGUSR2",), {"PET_SHUTDOWN_TIMEOUT": "1"}  # torchrun: from 2.12 on
    by_torchrun, by_redelastic = both(tmp_path, options, (str(WITNESS), "@here", "wait", number.name), env, act=act)
    assert (by_torchrun.code, by_redelastic.code) == (1, 1), by_redelastic.err
    assert f"ended by {signal.Signals(number).name}" in by_redelastic.err
    assert not by_redelastic.left, "a worker that ignores the signal is killed at the timeout"
    assert "Traceback" not in by_redelastic.err


@pytest.mark.long
def test_a_worker_that_ignores_sigterm_is_killed_at_the_shutdown_timeout(tmp_path: Path) -> None:
    """Rank 1 fails, and rank 0 ignores SIGTERM; the timeout is neither 0 nor the default of 30 s."""
    by_redelastic = run(
        REDELASTIC,
        tmp_path / "by_redelastic",
        (*ALONE, "--nproc-per-node=2", "--shutdown-timeout=2"),
        (str(WITNESS), "@here", "deaf"),
    )
    assert by_redelastic.code == 1
    failed = by_redelastic.directory / "0-0-SIGTERM.json"
    assert failed.exists(), "it was sent SIGTERM"
    assert "(SIGKILL)" in by_redelastic.err
    assert 2 <= by_redelastic.time - failed.stat().st_mtime < 20
    assert not by_redelastic.left


@pytest.mark.long
def test_torchs_file_timer_ends_a_worker_that_overstays(tmp_path: Path) -> None:
    """torch's timer also ends the launcher by the same signal."""
    by_torchrun, by_redelastic = both(
        tmp_path, (), (str(WITNESS), "@here", "timer"), {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}
    )
    for ended in (by_torchrun, by_redelastic):
        assert (ended.directory / "0-0-overstays.json").exists()
        assert not ended.left
    assert by_redelastic.code == by_torchrun.code == -signal.SIGKILL


# -- what is wrong with the command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--nnodes=2:1",), "--nnodes="),
        (("--nnodes=1:2:3",), "1:2:3"),
        (("--nnodes=one",), "one"),
        (("--nnodes=0",), "--nnodes="),
        (("--nproc-per-node=many",), "many"),
        (("--nproc-per-node=gpu",), "Cuda"),
        (("--max-restarts=-1",), "max_restarts"),
        (("--max-restarts=x",), "--max-restarts"),
        (("--redirects=9",), "9"),
        (("--local-ranks-filter=a",), "local_ranks_filter"),
        (("--start-method=clone",), "clone"),
        (("--shutdown-timeout=-1",), "-1"),
        (("--no-such-option",), "--no-such-option"),
        (("--rdzv-conf=what",), "what"),
        (("--rdzv-conf=lease=3",), "lease"),
        (("--rdzv-backend=c10d",), "c10d"),
        (("--logs-specs=mine",), "mine"),
        (("--no-python", "-m"), "--module"),
        (("--monitor-interval=-1",), "monitor"),
    ],
)
def test_a_wrong_command_line_is_a_short_error(
    options: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        code: object = main(["run", "--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=x", *options, str(WITNESS)])
    except SystemExit as e:
        code = e.code
    err = capfd.readouterr().err
    assert code == 2, err
    assert message in err
    assert err.startswith(("redelastic run: ", "usage: redelastic run"))
    assert len(err.splitlines()[-1]) < 400
    assert err.startswith("usage") or err.count("\n") == 1


def test_no_script_is_a_usage_error(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--standalone"])
    assert "training_script" in capfd.readouterr().err
