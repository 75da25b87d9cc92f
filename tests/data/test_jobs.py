"""Jobs of real nodes that come and go: every sample once, and the loss curve of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED
from tests.support.surviving_job import SurvivingJob
from tests.support.torchrun_job import LONG_LEASES


@pytest.mark.timeout(400)  # longer than all waits, so that the wait that failed is reported
@pytest.mark.long  # the jobs of tests/survival check their samples and losses, too
@pytest.mark.parametrize("survive", [True, False], ids=["survive", "restart"])
def test_a_kill_a_join_and_a_drain_change_neither_samples_nor_losses(
    server: RedisServer, tmp_path: Path, survive: bool
) -> None:
    with SurvivingJob(server, tmp_path, "2:3", conf=LONG_LEASES) as job:
        job.begin("a", "b", "c", survive=survive)
        epoch = job.wait_round("abc")
        killed, *others = job.by_rank(epoch)
        killed.kill()
        names = {node.name for node in others}
        epoch = job.wait_round(names, epoch)
        job.begin("d", survive=survive)
        epoch = job.wait_round({*names, "d"}, epoch)
        *_, drained = job.by_rank(epoch)
        drained.terminate()
        assert job.wait_end(drained.name) == DRAINED
        names = {*names, "d"} - {drained.name}
        job.wait_round(names, epoch)
        job.end(*names)
