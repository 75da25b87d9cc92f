"""What a node logs: lines of one form however it was launched, and a last one that says how it ended."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from redelastic.logs import LogFormatter, set_up_logging
from redelastic.monitoring.events import Left
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.replies import Beat
from redelastic.rendezvous.view import Round, View
from redelastic.rendezvous.watch import Watch
from tests.support.agent_job import DRAINED, AgentJob
from tests.support.torchrun_job import LONG_LEASES, Job

ERROR: Final = "ValueError: invalid literal for int() with base 10: 'odd'"
pytestmark = pytest.mark.timeout(180)

PREFIX: Final = r"[VIWEC]\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ "  # level, day, time, pid


def test_the_last_line_of_a_clean_drain_gives_its_cause(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a")
        job.wait_round("a")
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED
        lines = job.nodes["a"].stderr.splitlines()
        assert re.fullmatch(PREFIX + r"redelastic\.\S+\] Node a-\S+ of run \S+ was drained: SIGTERM\.", lines[-1])
        assert all(re.match(PREFIX, line) for line in lines), "torch's own lines too"


def test_a_node_does_not_log_its_own_leave_as_a_break(caplog: pytest.LogCaptureFixture) -> None:
    def hear(node: str) -> list[str]:
        cause = Left(node=node, cause="drained", reason="SIGTERM").as_cause()
        watch = Watch("run", "a-1-abc")
        watch.update(View.enter, Round(1, 0, 2, "host", 1, 1, 0, again=False))
        caplog.clear()
        wake_up = {"event": "broken", "epoch": "1", "cause": cause, "waiting": "0"}
        assert watch.update(View.apply_wake_up, "1-0", wake_up).nodes_waiting == 1
        return [record.getMessage() for record in caplog.records]

    assert hear("a-1-abc") == []
    assert hear("b-2-abc") == ["Round 1 of run 'run' is broken: b-2-abc drained: SIGTERM."]


def test_a_node_logs_that_it_was_fenced(caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch("run", "a-1-abc")
    held = Round(1, 0, 2, "host", 1, 1, 0, again=False)
    watch.update(View.enter, held)
    watch.update(View.apply_beat, "a-1-abc", held, Beat("fenced", 2, "", 0, "", 0, 0, "", 0))
    assert [record.getMessage() for record in caplog.records] == [
        "This node lost its lease: round 1 of run 'run' goes on without it."
    ]


@pytest.mark.long
def test_log_lines_under_torchrun_have_the_same_form(server: RedisServer, tmp_path: Path) -> None:
    with Job(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.start("a", "b")
        epoch = job.wait_round("ab")
        job.nodes["b"].kill()
        job.wait_round("a", epoch)
        broken = [line for line in job.nodes["a"].stderr.splitlines() if "is broken: " in line]
        assert broken
        assert all(re.match(PREFIX + r"redelastic\.\S+\] Round 1 of run ", line) for line in broken)
        job.tell("finish")
        assert job.wait_end("a") == 0


def test_each_line_of_a_message_has_the_prefix() -> None:
    try:
        int("odd")
    except ValueError:
        record = logging.LogRecord("redelastic.x", logging.ERROR, "x.py", 1, "one\n%s", ("two",), sys.exc_info())
    lines = LogFormatter().format(record).split("\n")
    assert len(lines) > 4
    assert all(re.match("E" + PREFIX.removeprefix("[VIWEC]") + r"redelastic\.x\] ", line) for line in lines)
    assert [line.rpartition("] ")[2] for line in (*lines[:2], lines[-1])] == ["one", "two", ERROR]


@contextmanager
def no_handlers(logger: logging.Logger) -> Iterator[None]:
    """A logger without the handlers that pytest has set up."""
    handlers, logger.handlers = logger.handlers, []
    try:
        yield
    finally:
        logger.handlers = handlers


def test_a_program_that_has_set_up_logging_keeps_its_handlers() -> None:
    root, logger, programs = logging.getLogger(), logging.getLogger("redelastic-test"), logging.NullHandler()
    with no_handlers(root), no_handlers(logger):
        root.addHandler(programs)
        set_up_logging(logger)
        assert logger.handlers == []
        root.removeHandler(programs)
        set_up_logging(logger)
        set_up_logging(logger)
        [handler] = logger.handlers
        record = logging.LogRecord("test", logging.ERROR, "x.py", 1, "one", (), None)
        assert handler.filter(record)
        root.addHandler(programs)
        assert not handler.filter(record), "else the record would be logged twice"


WRITES: Final = """
import atexit, os, sys
from redelastic.logs import unhurried_stderr

os.set_blocking(2, sys.argv[1] == "blocks")
with unhurried_stderr():
    sys.stderr.write("of the parent\\n")  # a thread writes it, while the child writes too: a line is one write
    if os.fork() == 0:
        sys.stderr.write("of a child\\n")
        sys.exit()
    os.wait()
    for i in range(10_000):
        print(i, "\u2713", file=sys.stderr)
    atexit.register(print, "at exit", file=sys.stderr)
print("afterwards", file=sys.stderr)
sys.exit(3)
"""


@pytest.mark.parametrize("file", ["blocks", "does not block"])
def test_unhurried_stderr_is_written_whole_and_in_order(file: str) -> None:
    done = subprocess.run([sys.executable, "-c", WRITES, file], stderr=subprocess.PIPE, check=False, timeout=60)
    *lines, afterwards, at_exit = done.stderr.decode().splitlines()
    assert (afterwards, at_exit) == ("afterwards", "at exit")
    assert {lines.pop(0), lines.pop(0)} == {"of the parent", "of a child"}
    assert lines == [f"{i} \u2713" for i in range(10_000)]
    assert done.returncode == 3
