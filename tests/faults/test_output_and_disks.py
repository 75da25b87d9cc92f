"""What workers print under `redelastic run`: 100 MB of it, a reader that is slow, a disk that is full."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from redelastic.monitoring.control import RunControl
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.agent_job import FAILED, REFUSED, STOPPED, AgentJob
from tests.support.long_tests import quick_first, quick_rows
from tests.support.torchrun_job import LIMIT
from tests.support.unruly_job import REDELASTIC_RUN, UNRULY, environment, run_standalone
from tests.support.waiting import Within
from tests.support.workers.unruly import FLOOD, LINE

until = Within(LIMIT)

pytestmark = pytest.mark.timeout(150)


# -- output


@pytest.mark.parametrize("how", quick_first(["--redirects=3", "--tee=3"]))
def test_100_mb_of_output_into_files(tmp_path: Path, how: str) -> None:
    with (tmp_path / "console").open("wb") as console:
        done = run_standalone(tmp_path, "flood", how, f"--log-dir={tmp_path / 'logs'}", stdout=console)
    assert done.returncode == 0
    [log] = (tmp_path / "logs").rglob("stdout.log")
    assert log.stat().st_size == FLOOD
    printed = (tmp_path / "console").stat().st_size
    assert printed == 0 if how == "--redirects=3" else printed > FLOOD


@pytest.mark.parametrize("options", quick_first([(), ("--tee=1",)]), ids=["console", "tee"])
def test_100_mb_of_output_to_a_slow_reader(
    server: RedisServer, run_id: str, tmp_path: Path, options: tuple[str, ...]
) -> None:
    """While nobody reads, the worker or the copy of its log waits, and the node keeps its lease; nothing is lost."""
    control = RunControl(Connection.open(server.url), RunKeys(run_id))
    where = [f"--rdzv-id={run_id}", f"--rdzv-endpoint={server.url}", "--rdzv-conf=keep_alive_interval=0.3"]
    command = [*REDELASTIC_RUN, *where, *options, str(UNRULY), str(tmp_path)]
    with subprocess.Popen(command, env=environment("flood"), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        until(lambda: _full(process.stdout), "the pipe is full")
        [node] = control.state().members
        silent_since = time.monotonic()
        until(lambda: time.monotonic() - silent_since > 2 * control.state().lease, "two leases have passed")
        assert [still.id for still in control.state().members] == [node.id]
        until(lambda: control.state().members[0].lease > 0, "it renews its lease")
        assert process.poll() is None, "it waits"
        size = 0
        while data := process.stdout.read(1 << 20):
            size += len(data)
        assert process.wait(LIMIT) == 0
    prefix = len("[default0]:") if options else 0
    assert size == FLOOD + prefix * FLOOD // LINE


def _full(pipe: Any) -> bool:
    """Whether a write into a pipe would block; how many bytes fill it depends on how they were written."""
    writer = os.open(f"/proc/self/fd/{pipe.fileno()}", os.O_WRONLY)
    try:
        return not select.select([], [writer], [], 0)[1]
    finally:
        os.close(writer)


@pytest.mark.fault(
    "the reader of an agent's stderr stops reading, and a peer dies",
    "the node goes on, ends with the right exit code, and its lines are there when they are read",
)
def test_an_agent_does_not_wait_for_the_reader_of_its_stderr(server: RedisServer, tmp_path: Path) -> None:
    """The reader may be a stopped terminal, or a network disk that hangs."""
    with AgentJob(server, tmp_path, "1:3") as job:
        stderr = tmp_path / "b.err"
        os.mkfifo(stderr)
        reader = os.open(stderr, os.O_RDWR | os.O_NONBLOCK)
        job.begin("a", "b", "c", options=("--redirects=3", f"--log-dir={tmp_path / 'logs'}"))
        job.wait_round("abc")
        _fill(reader)
        job.nodes["c"].kill()
        job.wait_round("ab")
        text = b""

        def has_reported() -> bool:
            nonlocal text
            with contextlib.suppress(BlockingIOError):
                text += os.read(reader, 2**16)
            return b"Round 1 of run" in text

        job.wait("it says why", has_reported)
        _fill(reader)
        job.tell("finish")
        assert [job.wait_end(name) for name in "ab"] == [0, 0]
        os.close(reader)


def _fill(pipe: int) -> None:
    """Fill a pipe, so that writes into it block."""
    for size in (4096, 1):
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(pipe, b"\n" * size)


@pytest.mark.parametrize("closed", quick_first([">&-", "2>&-", "<&- >&- 2>&-"]))
@pytest.mark.parametrize("options", quick_first([(), ("--preload=json", "--redirects=3")]), ids=["cold", "warm"])
def test_closed_standard_streams_change_nothing(tmp_path: Path, closed: str, options: tuple[str, ...]) -> None:
    (tmp_path / "finish").touch()
    node = [*REDELASTIC_RUN, "--standalone", f"--log-dir={tmp_path / 'logs'}", *options, str(UNRULY), str(tmp_path)]
    shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *node]
    assert subprocess.run(shell, env=environment("wait"), timeout=LIMIT, check=False).returncode == 0
    assert (tmp_path / "a-started").exists()


@pytest.mark.fault("the disk of an agent's stderr is full", "its exit code is the right one")
@pytest.mark.parametrize(
    ("options", "code"),
    quick_rows([(("--health-command=false",), REFUSED), (("--max-job-restarts=1",), STOPPED), ((), FAILED)]),
)
def test_a_full_stderr_does_not_change_the_exit_code(tmp_path: Path, options: tuple[str, ...], code: int) -> None:
    (tmp_path / "finish").touch()
    command = [*REDELASTIC_RUN, "--standalone", *options, str(UNRULY), str(tmp_path)]
    with Path("/dev/full").open("wb") as full:  # a process of its own, since the interpreter's last flush fails too
        ended = subprocess.run(command, env=environment("fail_at_the_end"), stderr=full, timeout=LIMIT, check=False)
    assert ended.returncode == code


# -- disks


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
    done = run_standalone(tmp_path, "flood", "--redirects=3", f"--log-dir={small_disk}")
    assert done.returncode == REFUSED
    assert done.stderr.count("\n") == 1
    assert f"the log directory {small_disk} has" in done.stderr
    assert not (tmp_path / "a-started").exists()


@pytest.mark.fault("the disk of the log directory is full", "the job goes on")
def test_a_log_directory_that_fills_up(small_disk: Path, tmp_path: Path) -> None:
    done = run_standalone(tmp_path, "flood", "--health-check=none", "--tee=3", f"--log-dir={small_disk}")
    assert os.statvfs(small_disk).f_bavail == 0
    assert done.returncode == FAILED, "a worker that cannot write has failed, as under torchrun"
    assert "exitcode  : 1 (" in done.stderr
    assert "Traceback" not in done.stderr
