"""Output of workers that goes through the agent to a pipe: passed on whole and in order, and its end kept."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Failed
from redelastic.monitoring.logs import first_failure
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.workers import relays
from redelastic.workers.logs import TAIL
from redelastic.workers.relays import Relay
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import LIMIT
from tests.support.unruly_job import REDELASTIC_RUN
from tests.support.waiting import Within

SCRIPT = """
import sys
print("step 7: loss nan", flush=True)
print("about to fail", file=sys.stderr, flush=True)
raise ValueError("bad batch")
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("joined", quick_first([False, True]), ids=["two pipes", "one pipe"])
@pytest.mark.fault(
    "a worker fails whose output goes to a pipe, as in a container", "its last lines and exception are kept"
)
def test_the_end_of_output_to_a_pipe_is_kept(server: RedisServer, tmp_path: Path, joined: bool) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [
        *REDELASTIC_RUN,
        f"--rdzv-endpoint={server.url}",
        f"--rdzv-id={tmp_path.name}",
        "--nnodes=1",
        str(script),
    ]
    errors = subprocess.STDOUT if joined else subprocess.PIPE
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, timeout=LIMIT, text=True, check=False)
    assert done.returncode == 1
    assert "step 7: loss nan\n" in done.stdout
    shown = done.stdout if joined else done.stderr
    assert shown.index("about to fail\n") < shown.index("ValueError: bad batch\n")
    if joined:
        assert shown.index("step 7") < shown.index("about to fail"), "in the order in which they were written"
    events = RunControl(Connection.open(server.url), RunKeys(tmp_path.name)).events()
    assert [event.message for event in events if isinstance(event, Failed)] == ["ValueError: bad batch"]
    found = first_failure(events)
    assert found is not None
    lines = found["tail"].splitlines()
    assert lines[:2] == ["step 7: loss nan", "about to fail"]
    assert lines[-1] == "ValueError: bad batch"
    assert found["path"] == ""


def test_all_is_passed_on_and_only_the_end_is_kept() -> None:
    read, write = os.pipe()
    tracemalloc.start()
    relay = Relay(write)
    sent, got = b"".join(b"line %d\n" % n for n in range(100_000)), bytearray()

    def receive() -> None:
        while len(got) < len(sent):
            got.extend(os.read(read, 1 << 16))

    reader = threading.Thread(target=receive)
    reader.start()
    with Path(relay.path).open("wb") as worker:
        worker.write(sent)
    end = relay.end()
    kept = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, relays.__file__)])
    tracemalloc.stop()
    relay.close()
    reader.join(LIMIT)
    assert bytes(got) == sent
    assert sum(trace.size for trace in kept.traces) < len(sent) / 2
    assert end.endswith("\nline 99999")
    assert len(end) <= TAIL
    os.close(read)
    os.close(write)


def test_a_worker_whose_reader_has_gone_gets_a_broken_pipe() -> None:
    read, write = os.pipe()
    relay = Relay(write)
    program = "import sys\nwhile True:\n    sys.stdout.write('x' * 1000)\n"
    with Path(relay.path).open("wb") as pipe:
        worker = subprocess.Popen([sys.executable, "-c", program], stdout=pipe, stderr=subprocess.DEVNULL)
    relay.close()
    os.close(read)
    with worker:
        Within(LIMIT)(lambda: worker.poll() is not None, "that it ends")
    assert worker.returncode != 0
    os.close(write)
