"""The store where a round's workers meet: a fresh TCPStore per round, served by the node of rank 0."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from redelastic.monitoring.events import Left
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all, ranks

LOOK_UP = timedelta(seconds=30)  # torch's TCPStore looks names up, which takes 5 s where a name server loses a query


class TestBootstrapStore:
    def test_each_round_has_a_fresh_one(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(2, 2) for _ in range(2)]
        for round_number in range(3):
            infos = join_all(pool, *nodes)
            where = infos[0].bootstrap_store_info
            assert where is not None
            store = dist.TCPStore("localhost", where.master_port, is_master=False, timeout=LOOK_UP)
            assert store.num_keys() == 0, f"round {round_number} sees older keys"
            store.set("key", "value")

    def test_a_new_rank_0_serves_it(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(1, 2) for _ in range(2)]
        infos = join_all(pool, *nodes)
        leader = nodes[ranks(infos).index(0)]
        leader.end(Left(cause="drained"), run_then="goes on", timeout=5)
        survivor = nodes[1 - nodes.index(leader)]
        where = pool.submit(survivor.next_rendezvous).result(10).bootstrap_store_info
        assert where is not None
        dist.TCPStore("localhost", where.master_port, is_master=False, timeout=LOOK_UP).set("a", "b")

    def test_torchs_switch_leaves_the_port_to_the_workers(
        self, new_node: NodeFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        node = new_node(1, 1)
        where = node.next_rendezvous().bootstrap_store_info
        assert where is not None
        assert not node.use_agent_store
        dist.TCPStore("localhost", where.master_port, is_master=True, wait_for_workers=False)
