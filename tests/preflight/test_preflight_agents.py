"""`redelastic run --preflight`: hosts are measured before the first round, and after a round that failed."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from redelastic.monitoring.events import Barred, Completed, Preflight
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.commands import run_command

pytestmark = pytest.mark.timeout(400)

PREFLIGHT: Final = ("--preflight", "--exclude")
MEASURED: Final = 150.0  # seconds within which hosts are measured that share a busy machine
CONF: Final = {"last_call_timeout": 5, "keep_alive_max_attempt": 15}


@pytest.mark.long
def test_hosts_are_measured_before_the_first_round_and_after_a_loss(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:3") as job:
        job.begin("a", "b", "c", options=("--preflight",), conf={**CONF, "last_call_timeout": 60})
        job.wait("hosts are measured", lambda: job.events(Preflight), MEASURED)
        job.wait_round("abc")
        assert [event.hosts for event in job.events(Preflight)] == [3]
        job.nodes["c"].kill()
        job.wait("hosts are measured again", lambda: len(job.events(Preflight)) == 2, MEASURED)
        job.wait_round("ab", 1)
        assert [event.hosts for event in job.events(Preflight)] == [3, 2]
        job.tell("finish")
        assert [job.wait_end(name) for name in "ab"] == [0, 0]


@pytest.mark.long
def test_an_excluded_host_waits_until_it_is_readmitted_and_joins_unmeasured(
    server: RedisServer, tmp_path: Path
) -> None:
    with AgentJob(server, tmp_path, "1:2") as job:
        job.control.exclude("b")
        job.begin("b", options=PREFLIGHT, conf=CONF)
        barred = job.wait_event(Barred)
        assert barred.failures == 1_000_000
        job.begin("a", options=PREFLIGHT, conf=CONF)
        epoch = job.wait_round("a")
        status = run_command("status", job.run_id, "--endpoint", server.url)
        assert "host b is excluded: a preflight has found it to be an outlier" in status.out
        assert run_command("readmit", job.run_id, "b", "--endpoint", server.url).code == 0
        job.wait_round("ab", epoch)
        assert [event.hosts for event in job.events(Preflight)] == [1]
        assert [event.size for event in job.events(Completed)] == [1, 2]
        job.tell("finish")
        assert [job.wait_end(name) for name in "ab"] == [0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--exclude",), "--exclude and --preflight-path need --preflight"),
        (("--preflight", "--standalone"), "--preflight does not work with --standalone"),
        (("--preflight", "--survive"), "--preflight does not work with --survive"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: tuple[str, ...], message: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = run_command("run", "--rdzv-id=j", *options, str(script))
    assert done.code == 2
    assert message in done.err
