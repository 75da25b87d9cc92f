"""Real agents and workers while the master of their run is replaced (I1, I2, I4, I9)."""

from __future__ import annotations

from pathlib import Path

import pytest

from redelastic.monitoring.events import Restored
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.failovers import (
    CONFIRMED,
    GOES_ON,
    LIMIT,
    LOST,
    NO_LOSS,
    TAKES_OVER,
    FailOver,
    ReplicatedJob,
    lost_writes,
)
from tests.support.fault_matrix import Measured
from tests.support.servers import Shard, wait_until

pytest_plugins = ["tests.support.failover_servers"]
pytestmark = pytest.mark.timeout(300)


@pytest.mark.fault(TAKES_OVER, GOES_ON)
def test_a_rendezvous_and_a_training(shard: Shard, run_id: str, tmp_path: Path, measured: Measured) -> None:
    with ReplicatedJob(shard, run_id, tmp_path, "1:2") as job:
        job.start("a")
        job.wait_joined(1)
        shard.replicate(run_id)
        FailOver(shard, run_id)
        job.start("b")
        assert job.wait_round("ab") == 1
        shard.heal()
        shard.replicate(run_id)
        fail_over = FailOver(shard, run_id)
        measured("first heartbeat answered", fail_over.wait_for_heartbeat())
        job.train_on(1, "ab")
        job.nodes["b"].kill()
        assert job.wait_round("a", 1) > 1
        job.finish("a")


@pytest.mark.fault(
    LOST + "a completed round", "I4, I9: it is put back, nobody is evicted, the next one has a higher epoch"
)
def test_a_lost_round(in_cluster: Shard, run_id: str, tmp_path: Path) -> None:
    """Its workers are about to start, or have just started."""
    with ReplicatedJob(in_cluster, run_id, tmp_path, "1:2") as job:
        job.start("a")
        job.wait_joined(1)
        with lost_writes(in_cluster, run_id):
            job.start("b")
            job.wait("both have workers", lambda: len(job.lines("start")) == 2)
        job.train_on(1, "ab")
        assert len(job.events(Restored)) == 1
        job.finish("a", "b")


@pytest.mark.fault(CONFIRMED + TAKES_OVER, NO_LOSS)
def test_a_confirmed_round_is_not_lost(with_sentinel: Shard, run_id: str, tmp_path: Path) -> None:
    """The master dies as soon as it has completed the round, which its nodes may not have entered yet."""
    with ReplicatedJob(with_sentinel, run_id, tmp_path, "1:2", conf={"min_replicas": 1}) as job:
        job.start("a", "b")
        job.wait_epoch(1)
        FailOver(with_sentinel, run_id)
        job.train_on(1, "ab")
        assert not job.events(Restored), "a replica had it"
        job.finish("a", "b")


@pytest.mark.fault(
    CONFIRMED + "there is no replica", "no worker starts before there is one; at the join_timeout an error says why"
)
def test_no_replica(own_server: RedisServer, run_id: str, tmp_path: Path) -> None:
    shard = Shard(own_server.url, [own_server])
    with (
        ReplicatedJob(shard, run_id, tmp_path / "job", "1:2", conf={"min_replicas": 1}) as job,
        ReplicatedJob(shard, "hasty", tmp_path / "hasty", "1:1", conf={"min_replicas": 1, "join_timeout": 1}) as hasty,
    ):
        hasty.start("h", may_end=True)
        job.start("a", "b")
        assert hasty.wait_end("h") == 1
        assert "but only 0 of min_replicas=1 replicas of Redis" in hasty.nodes["h"].stderr
        job.wait_epoch(1)
        wait_until(lambda: (run := job.state()) is not None and (run.age or 0) > 3, "time passes", LIMIT)
        assert not job.lines() + hasty.lines()
        with servers.replica_of(own_server):
            job.wait_round("ab", after=0)
        job.train_on(1, "ab")  # nodes that are in a round need no replica
        job.finish("a", "b")
