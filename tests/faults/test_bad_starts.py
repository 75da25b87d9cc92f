"""Starts of `redelastic run` that fail or have to wait: nothing hangs or is left, and a message gives the cause."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path
from typing import Final

import pytest

from redelastic.cli import main
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.workers.stacks import catches
from tests.support import launchers
from tests.support.agent_job import DRAINED, FAILED
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LIMIT, Job
from tests.support.unruly_job import REDELASTIC_RUN, UNRULY, UnrulyJob, environment, run_standalone
from tests.support.waiting import Within

pytestmark = pytest.mark.timeout(150)

USAGE, UNREACHABLE = 2, 3  # exit codes
ASCII_ONLY: Final = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--standalone", "no-such-script.py"), "No script 'no-such-script.py'"),
        (("--standalone", "--run-path", "no-such-script.py"), "No script 'no-such-script.py'"),
        (("--standalone", "--no-python", "no-such-command"), "No executable 'no-such-command'"),
        (("--rdzv-endpoint=127.0.0.1:1", str(UNRULY)), "--rdzv-id is missing"),
        (("--rdzv-endpoint=127.0.0.1:1", "--rdzv-id=", str(UNRULY)), "--rdzv-id is empty (is a variable unset?): give"),
        (("--standalone", "--nnodes=1-2", str(UNRULY)), "--nnodes=1-2 is invalid: use N (4) or MIN:MAX (2:4)"),
        (("--standalone", "--nnodes=2:1", str(UNRULY)), "--nnodes=2:1 is invalid: use N (4) or MIN:MAX (2:4)"),
        (("--standalone", "--health-check=luck", str(UNRULY)), "Unknown health check 'luck'"),
        (("--standalone", "--hang-start-timeout=3", str(UNRULY)), "hang_start_timeout needs hang_timeout"),
        (("--standalone", "--drain-timeout=nan", str(UNRULY)), "drain_timeout=nan"),
        (("--standalone", "--numa-binding=node", str(UNRULY)), "--numa-binding=node needs GPUs, and this host has no"),
        (("--standalone", "--signals-to-handle=SIGTERM,SIGFOO", str(UNRULY)), "SIGFOO in --signals-to-handle is no"),
        (("--standalone", "--health-port=70000", str(UNRULY)), "70000"),
        (("--standalone", "--log-dir=/proc/here", "--redirects=3", str(UNRULY)), "/proc/here"),
        (
            ("--standalone", f"--log-dir={UNRULY}", "--redirects=3", str(UNRULY)),
            f"{UNRULY} cannot be made: File exists",
        ),
    ],
)
def test_bad_arguments_are_one_line(
    arguments: tuple[str, ...], message: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["run", *arguments]) == USAGE
    err = capfd.readouterr().err
    assert message in err
    assert err.startswith("redelastic run: ")
    assert err.count("\n") == 1


@pytest.mark.fault("Redis comes up after the nodes", "they wait for it, say so once, and train")
@pytest.mark.parametrize("agent", quick_first([True, False]), ids=["redelastic run", "torchrun"])
def test_nodes_that_start_before_redis_wait_for_it(tmp_path: Path, agent: bool) -> None:
    with RedisServer() as server, Job(server, tmp_path, "2:2", agent=agent) as job:
        server.kill()
        job.start("a", "b")
        said = "Waiting for it, up to the join_timeout of 60 s; `redelastic server` starts one here."
        job.wait("they say that they wait", lambda: all(said in node.stderr for node in job.nodes.values()))
        assert not any(node.process.poll() for node in job.nodes.values())
        server.start()
        job.wait_round("ab")
        job.finish("a", "b")
        for node in job.nodes.values():
            assert node.stderr.count(said) == 1, "and once only"
            assert f"Redis at redis://{server.endpoint}" in node.stderr


@pytest.mark.fault("redelastic run: Redis is unreachable, or refuses the password", "a one-line error, exit code 3")
def test_an_unreachable_server_or_a_wrong_password_is_one_line(
    server: RedisServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    where = server.url.rpartition("@")[2]
    for endpoint, message in (("127.0.0.1:1", "could not be reached"), (f"redis://:not-it@{where}", "password")):
        where_to = [f"--rdzv-endpoint={endpoint}", "--rdzv-id=x", "--rdzv-conf=join_timeout=0.5"]
        assert main(["run", *where_to, str(UNRULY)]) == UNREACHABLE
        err = capfd.readouterr().err
        assert err.startswith("redelastic run: Redis at redis://")
        assert message in err
        assert "not-it" not in err
        assert err.count("\n") == 1


def test_a_failure_record_of_another_type_is_reported(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job, server.get_client() as client:
        key = RunKeys(job.run_id).failures
        client.set(key, "another program's", ex=60)
        job.begin("a", options=["--max-failed-rounds=2"])
        assert job.wait_end("a") == FAILED
        assert f"redelastic run: The key '{key}' in Redis" in job.nodes["a"].stderr
        assert "Traceback" not in job.nodes["a"].stderr


def test_a_health_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run_standalone(tmp_path, "wait", f"--health-port={port}")
    assert done.returncode == FAILED
    assert done.stderr.startswith(f"redelastic run: The health endpoint cannot listen on port {port}")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "a-started").exists()


def test_a_node_with_another_nnodes_than_the_run_fails(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "1:1") as job:
        job.begin("a")
        job.wait_file("a-started")
        job.begin("b", nnodes="2:3")
        assert job.wait_end("b") == FAILED
        assert job.nodes["b"].stderr.startswith("redelastic run: ")
        assert "wants 2 to 3 nodes, but run" in job.nodes["b"].stderr.splitlines()[0]
        assert "Traceback" not in job.nodes["b"].stderr
        job.tell("finish")
        assert job.wait_end("a") == 0


def test_an_interrupt_while_it_waits_for_others(server: RedisServer, tmp_path: Path) -> None:
    with UnrulyJob(server, tmp_path, "2:2") as job:
        job.begin("a")
        job.wait("a waits", lambda: job.redis("candidates"))
        job.nodes["a"].process.send_signal(signal.SIGINT)
        assert job.wait_end("a") == 128 + signal.SIGINT  # Python's own, as torchrun's
        assert "Traceback" not in job.nodes["a"].stderr
        assert not job.redis("candidates")


@pytest.mark.fault("the locale is not UTF-8, or LOGLEVEL is meant for another program", "the job runs")
def test_an_unusual_locale_or_loglevel_does_not_stop_a_job(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    command = [*REDELASTIC_RUN, "--standalone", str(script)]
    env = environment() | ASCII_ONLY | {"LOGLEVEL": "verbose"}
    done = subprocess.run(command, env=env, capture_output=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stdout) == (0, b"ran\n"), done.stderr
    assert done.stderr.startswith(b"LOGLEVEL='verbose' is no level of Python's logging: WARNING is used.\n")


@pytest.mark.long
def test_loglevel_sets_what_is_logged(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    command = [*REDELASTIC_RUN, "--standalone", str(script)]
    informed = launchers.run(command, environment() | {"LOGLEVEL": "info"}, LIMIT)
    assert (informed.returncode, informed.stdout) == (0, "ran\n"), informed.stderr
    assert informed.stderr.startswith("I")


@pytest.mark.long
def test_the_help_in_an_unusual_locale() -> None:
    env = environment() | ASCII_ONLY | {"LOGLEVEL": "info"}
    done = subprocess.run([*REDELASTIC_RUN, "--help"], env=env, capture_output=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.fault("a node is asked to drain while it waits for Redis", "it leaves at once")
@pytest.mark.parametrize("how", ["SIGTERM", "drain file"])
def test_a_drain_while_redis_is_awaited(tmp_path: Path, how: str) -> None:
    with RedisServer() as server, UnrulyJob(server, tmp_path, "1:1") as job:
        server.kill()
        job.begin("a", options=(f"--drain-file={tmp_path / 'notice'}",))
        job.wait("it waits", lambda: "Waiting for it" in job.nodes["a"].stderr)
        if how == "SIGTERM":
            job.nodes["a"].terminate()
        else:
            job.tell("notice")
        assert job.wait_end("a") == DRAINED
        assert "Traceback" not in job.nodes["a"].stderr
        assert job.nodes["a"].stderr.splitlines()[-1] == "redelastic run: drained by SIGTERM, while it ran no workers"
        assert how == "SIGTERM" or f"Draining: the file {tmp_path / 'notice'} exists." in job.nodes["a"].stderr


@pytest.mark.fault("a node gets SIGTERM while it imports torch, as PID 1 of a container", "it leaves at once")
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_sigterm_while_torch_is_imported(tmp_path: Path, swallowed: bool) -> None:
    """The kernel drops a signal that PID 1 does not handle, and a module that is imported may drop the exception."""
    torch = tmp_path / "torch.py"  # one whose import does not end before the signal comes
    torch.write_text(f"""
import pathlib, time
try:
    pathlib.Path({str(tmp_path / "imported")!r}).touch()
    time.sleep({LIMIT})
except BaseException:
    if not {swallowed}:
        raise
""")
    command = [*REDELASTIC_RUN, "--standalone", str(UNRULY), str(tmp_path)]
    env = environment("wait") | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as process:
        Within(LIMIT)((tmp_path / "imported").exists, "that it imports torch")
        assert catches(process.pid, signal.SIGTERM)
        process.terminate()
        _, err = process.communicate(timeout=LIMIT)
    assert (process.returncode, err) == (DRAINED, "redelastic run: drained by SIGTERM, while it ran no workers\n")
    assert not (tmp_path / "a-started").exists()
