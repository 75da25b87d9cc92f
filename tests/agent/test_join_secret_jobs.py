"""`redelastic run --join-secret-file`: a node without the secret ends, and the job goes on without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from redelastic.monitoring.events import Left
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, FAILED, AgentJob
from tests.support.long_tests import quick_rows
from tests.support.torchrun_job import LONG_LEASES

pytestmark = pytest.mark.timeout(300)


@pytest.mark.fault("a node with another join secret joins a job", "it has to leave; the others go on")
def test_a_node_with_another_secret_ends_and_the_others_train_on(server: RedisServer, tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    for file, secret in ((right, "the secret of the job"), (wrong, "a guess at the secret")):
        file.write_text(secret)
        file.chmod(0o600)
    with AgentJob(server, tmp_path, "2:3", conf={**LONG_LEASES, "last_call_timeout": 0}) as job:
        job.start("a", "b", options=(f"--join-secret-file={right}",))
        first = job.wait_round("ab")
        job.start("c", options=(f"--join-secret-file={wrong}",), may_end=True)
        assert job.wait_end("c") in {DRAINED, FAILED}
        job.wait_round("ab", first)
        assert {line.world for line in job.lines("start")} == {2}, "no worker has started in a round with c"
        assert [left.node[0] for left in job.events(Left) if left.cause == "secret"] == ["c"]
        job.finish("a", "b")


@pytest.mark.parametrize(
    ("content", "message"),
    quick_rows([(None, "cannot be read: No such file"), ("too short\n", "has 9 bytes; at least 16 are needed")]),
)
def test_a_bad_secret_file_is_a_one_line_error(tmp_path: Path, content: str | None, message: str) -> None:
    secret, script = tmp_path / "secret", tmp_path / "train.py"
    script.write_text("")
    if content is not None:
        secret.write_text(content)
    command = [sys.executable, "-m", "redelastic", "run", "--standalone", f"--join-secret-file={secret}", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
