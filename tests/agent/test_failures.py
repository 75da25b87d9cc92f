"""Workers that fail while they live: the node has failed for whoever started it, and its report tells the truth."""

from __future__ import annotations

import inspect
import re
import signal
import sys
from pathlib import Path
from typing import Final

import pytest
from agent_job import AgentJob
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torchrun_job import Job

from redelastic.redis.server import RedisServer

pytestmark = pytest.mark.timeout(180)

UNRULY: Final = Path(__file__).parents[1] / "support" / "workers" / "unruly.py"
WATCHES_KERNEL: Final = "uninterruptible_state_timeout" in inspect.signature(LocalElasticAgent).parameters


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.skipif(not WATCHES_KERNEL, reason="this torch does not look for workers that hang in the kernel")
@pytest.mark.fault("a worker hangs in the kernel (state D)", "the node fails and says so; the run is not finished")
@pytest.mark.parametrize("agent", [True, False], ids=["redelastic run", "torchrun"])
def test_a_worker_that_hangs_in_the_kernel_is_a_failure(server: RedisServer, tmp_path: Path, agent: bool) -> None:
    """torch calls its group unhealthy, which its own launcher takes for success."""
    with Job(server, tmp_path, "1:1", agent=agent) as job:
        env = {"UNRULY": "hang_in_kernel", "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "0.5"}
        job.start("a", script=UNRULY, env=env, may_end=True, max_restarts=0)
        hangs = tmp_path / "hangs"
        pid = int(job.wait("the worker hangs", lambda: hangs.exists() and hangs.read_text()))
        assert job.wait_end("a") == 1, job.report()
        report = job.nodes["a"].stderr
        assert "hangs in the kernel (state D)" in report
        assert re.search(rf"exitcode  : -\d+ \(pid: {pid}\)", report), "how the agent ended it"
        if agent:
            assert "finished" not in job.redis("run")["closed"]
            assert f"pid {pid}) hangs in the kernel" in job.redis("run")["closed"]


def test_the_report_of_a_hang_has_the_exit_code_of_its_end(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=("--hang-timeout=1", "--hang-start-timeout=50"), max_restarts=0, may_end=True)
        job.wait_round("a")
        job.tell("hang-a")
        assert job.wait_end("a") == 1
        report = job.nodes["a"].stderr
        assert re.search(r"made no progress for \S+ s, since step", report)
        assert f"exitcode  : {-signal.SIGTERM} (pid: " in report, "not by SIGKILL"
