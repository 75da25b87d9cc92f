"""The master dies while agents exchange their roles, and its replica lacks what they wrote (I9)."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed.elastic.agent.server.api import _RoleInstanceInfo

from tests.support.failovers import LOST, ReplicatedJob, lost_writes
from tests.support.nodes import NodeFactory
from tests.support.servers import Shard

pytest_plugins = ["tests.support.failover_servers"]
pytestmark = pytest.mark.timeout(300)

INFO, RANKS = "torchelastic/role_info/", "torchelastic/assigned_ranks/"


@pytest.mark.fault(LOST + "the agents' role info", "I9: the agents write it again, and all workers start")
def test_role_info_is_lost(in_cluster: Shard, run_id: str, new_node: NodeFactory, tmp_path: Path) -> None:
    with ReplicatedJob(in_cluster, run_id, tmp_path, "3:3") as job, ThreadPoolExecutor() as pool:
        first = new_node(3, 3, url=in_cluster.url, **job.conf)
        joined = pool.submit(first.next_rendezvous)
        job.wait_joined(1)
        with lost_writes(in_cluster, run_id):
            job.start("a", "b")
            info = joined.result(60)
            assert info.rank == 0
            job.wait(
                "both have written their role info",
                lambda: {INFO + "1", INFO + "2"} <= set(job.redis("store:round:1") or ()),
            )
        assert len(info.store.multi_get([INFO + "1", INFO + "2"])) == 2


@pytest.mark.fault(LOST + "the agents' role info", "I9: the agents write it again, and all workers start")
def test_assigned_ranks_are_lost(in_cluster: Shard, run_id: str, new_node: NodeFactory, tmp_path: Path) -> None:
    with ReplicatedJob(in_cluster, run_id, tmp_path, "2:2") as job, ThreadPoolExecutor() as pool:
        job.start("a")  # rank 0
        job.wait_joined(1)
        other = new_node(2, 2, url=in_cluster.url, **job.conf)
        with lost_writes(in_cluster, run_id):
            info = pool.submit(other.next_rendezvous).result(60)
            assert info.rank == 1
            info.store.set(INFO + "1", _RoleInstanceInfo("default", 1, 1).serialize().decode())
            job.wait("rank 0 has written the ranks", lambda: RANKS + "1" in set(job.redis("store:round:1") or ()))
        assert json.loads(info.store.get(RANKS + "1"))
