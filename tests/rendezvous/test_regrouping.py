"""How nodes regroup: who comes, who goes, who is fenced; real handlers on a real server."""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one from Python 3.11 on

import pytest
import redis
import torch.distributed as dist

from redelastic.monitoring.events import Left, Lost
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.view import Break, View
from redelastic.store import RoundBrokenError
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all, ranks, until

LONG = 60.0  # for a last call that no group needs, and for what a busy machine does late, in seconds


def until_joined(client: redis.Redis, keys: RunKeys, n: int) -> None:
    until(lambda: client.zcard(keys.candidates) == n, f"{n} candidates")


class TestRegrouping:
    def test_a_late_node_is_taken_in_and_ranks_stick(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(2, 3, last_call_timeout=0) for _ in range(2)]
        before = join_all(pool, *nodes)
        assert [n.num_nodes_waiting() for n in nodes] == [0, 0]
        late = new_node(2, 3, last_call_timeout=0)
        joining = pool.submit(late.next_rendezvous)
        until(lambda: all(n.num_nodes_waiting() for n in nodes), "the members know of the late node")
        assert not joining.done()  # I1: it waits for the members
        after = join_all(pool, *nodes)
        assert ranks(after) == ranks(before)
        assert joining.result(LONG).rank == 2
        assert [n.num_nodes_waiting() for n in (*nodes, late)] == [0, 0, 0]

    def test_exclusivity_waits_for_every_member(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        nodes = [new_node(1, 3, last_call_timeout=LONG) for _ in range(3)]
        join_all(pool, *nodes)
        first = pool.submit(nodes[0].next_rendezvous)
        until(nodes[2].num_nodes_waiting, "the others know")
        second = pool.submit(nodes[1].next_rendezvous)
        until_joined(client, keys, 2)
        assert [first.done(), second.done()] == [False, False]  # I1, though two are enough
        assert sorted(ranks([nodes[2].next_rendezvous(), first.result(LONG), second.result(LONG)])) == [0, 1, 2]

    def test_a_spare_is_promoted_when_a_member_leaves(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        nodes = [new_node(2, 2) for _ in range(2)]
        before = join_all(pool, *nodes)
        spare = new_node(2, 2, join_timeout=4)
        joining = pool.submit(spare.next_rendezvous)
        until_joined(client, keys, 1)
        assert [n.num_nodes_waiting() for n in nodes] == [0, 0]  # nobody restarts for a spare
        with pytest.raises(FutureTimeoutError):
            joining.result(4.5)  # a spare has no join timeout
        nodes[0].end(Left(cause="drained"), run_then="goes on", timeout=5)
        until(nodes[1].num_nodes_waiting, "the survivor knows")
        assert nodes[1].next_rendezvous().rank == before[1].rank
        assert joining.result(LONG).rank == before[0].rank  # it takes the place that is free

    def test_a_spare_that_is_needed_has_its_whole_join_timeout(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        nodes = [new_node(2, 2) for _ in range(2)]
        join_all(pool, *nodes)
        spare = new_node(2, 2, join_timeout=5)
        joining = pool.submit(spare.next_rendezvous)
        until_joined(client, keys, 1)
        with pytest.raises(FutureTimeoutError):
            joining.result(4.8)  # most of the time that passes between two of its requests
        nodes[0].end(Left(cause="drained"), run_then="goes on", timeout=5)
        with pytest.raises(FutureTimeoutError):
            joining.result(1)  # the survivor takes its time to stop its workers
        assert nodes[1].next_rendezvous().world_size == 2
        assert joining.result(LONG).world_size == 2

    def test_a_silent_member_is_out_within_its_lease(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
    ) -> None:
        nodes = [new_node(1, 3, keep_alive_interval=0.5, last_call_timeout=LONG) for _ in range(3)]
        before = join_all(pool, *nodes)
        nodes[0].node.stop()  # no heartbeat any more: it died
        died = time.monotonic()
        until(lambda: nodes[1].num_nodes_waiting() and nodes[2].num_nodes_waiting(), "both survivors know")  # I7
        assert time.monotonic() - died < 20
        said = re.compile(f"is broken: {nodes[0].node.id} lost its lease after ([0-9.]+) s")
        until(lambda: len(said.findall(caplog.text)) == 2, "their logs say so")  # a moment later
        assert min(map(float, said.findall(caplog.text))) >= 1.5
        after = join_all(pool, *nodes[1:])
        assert {info.world_size for info in after} == {2}
        assert all(a.rank == b.rank for a, b in zip(after, before[1:], strict=True) if b.rank < 2)

    @pytest.mark.parametrize("field", ["completed_at", "master", "rank"])
    def test_a_member_of_another_round_with_the_same_epoch_is_fenced(
        self, field: str, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        """As after a failover that lost a round, when others have completed one in its place."""
        nodes = [new_node(1, 2, keep_alive_interval=0.5, last_call_timeout=LONG) for _ in range(2)]
        before = join_all(pool, *nodes)
        names = [node.node.id for node in nodes]
        if field == "rank":
            client.zadd(keys.ranks, {name: 1 - info.rank for name, info in zip(names, before, strict=True)})
        else:
            client.hset(keys.run, field, "1" if field == "completed_at" else "elsewhere 1")
        until(lambda: nodes[0].num_nodes_waiting() and nodes[1].num_nodes_waiting(), "both know")
        assert {info.world_size for info in join_all(pool, *nodes)} == {2}
        assert not {node.node.id for node in nodes} & set(names), "they come back as new nodes"
        assert client.hget(keys.run, "epoch") == b"2"

    def test_a_fenced_node_knows_and_comes_back_as_another(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        nodes = [new_node(1, 2, keep_alive_interval=1.5, last_call_timeout=LONG) for _ in range(2)]
        infos = join_all(pool, *nodes)
        name = nodes[0].node.id
        client.zadd(keys.leases, {name: 1})  # as if it had been frozen for longer than its lease
        until(lambda: nodes[0].num_nodes_waiting() and nodes[1].num_nodes_waiting(), "both know")
        alone = pool.submit(nodes[1].next_rendezvous).result(LONG)
        assert alone.world_size == 1
        with pytest.raises(dist.DistStoreError):
            infos[0].store.set("late", "write")  # I4
        back = pool.submit(nodes[0].next_rendezvous)
        until(nodes[1].num_nodes_waiting, "it waits to join")
        nodes[1].next_rendezvous()
        assert back.result(LONG).world_size == 2
        assert nodes[0].node.id != name

    def test_replacement_timeout_waits_for_a_new_node(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        nodes = [new_node(1, 2, replacement_timeout=LONG, last_call_timeout=LONG) for _ in range(2)]
        join_all(pool, *nodes)
        nodes[1].end(Left(cause="drained"), run_then="goes on", timeout=5)
        survivor = pool.submit(nodes[0].next_rendezvous)
        until_joined(client, keys, 1)
        with pytest.raises(FutureTimeoutError):
            survivor.result(0.5)
        join_all(pool, new_node(1, 2, replacement_timeout=LONG))
        assert survivor.result(LONG).world_size == 2

    def test_replacement_timeout_ends(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(1, 2, replacement_timeout=0.3, last_call_timeout=LONG) for _ in range(2)]
        join_all(pool, *nodes)
        nodes[1].end(Left(cause="drained"), run_then="goes on", timeout=5)
        assert pool.submit(nodes[0].next_rendezvous).result(LONG).world_size == 1

    def test_a_broken_round_ends_the_waits_on_its_store(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(1, 2, keep_alive_interval=0.5, last_call_timeout=LONG) for _ in range(2)]
        infos = join_all(pool, *nodes)
        infos[0].store.set("there", "yes")
        blocked: Future[bytes] = pool.submit(infos[0].store.get, "never set")
        nodes[1].node.stop()
        with pytest.raises(RoundBrokenError, match="lost its lease"):
            blocked.result(LONG)
        assert infos[0].store.get("there") == b"yes"

    def test_a_lost_node_is_no_regrouping_node(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(1, 3, keep_alive_interval=0.5, last_call_timeout=LONG) for _ in range(3)]
        join_all(pool, *nodes)
        regrouping = pool.submit(nodes[0].next_rendezvous)
        until(nodes[1].num_nodes_waiting, "the others know")
        assert not nodes[1].wait_for_loss()
        nodes[2].node.stop()
        assert nodes[1].wait_for_loss()
        assert nodes[1].next_rendezvous().world_size == 2
        assert regrouping.result(LONG).world_size == 2
        assert [node.node.view.nodes_lost for node in nodes[:2]] == [1, 1]

    def test_a_late_wish_to_regroup_breaks_no_later_round(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor
    ) -> None:
        """A new node is let in, and the next round may be complete before the agent that let it in goes on."""
        nodes = [new_node(2, 2) for _ in range(2)]
        for _ in range(2):
            join_all(pool, *nodes)
        nodes[0].node.regroup(1)
        assert nodes[0].num_nodes_waiting() == 0
        nodes[0].node.regroup(2)
        assert nodes[0].num_nodes_waiting() == 1

    def test_a_loss_is_reported_though_the_round_was_broken_before(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Its survivors' workers fail first, on the broken connection."""
        nodes = [new_node(1, 2, keep_alive_interval=0.5, last_call_timeout=LONG) for _ in range(2)]
        join_all(pool, *nodes)
        regrouping = pool.submit(nodes[0].next_rendezvous)
        until(lambda: f"{nodes[0].node.id} regroups." in caplog.text, "that it regroups is told")
        nodes[1].node.stop()
        assert regrouping.result(LONG).world_size == 1
        until(lambda: "lost its lease" in caplog.text, "that a member is lost is told, before the round or after it")
        broken = [text for text in caplog.messages if "is broken" in text]
        assert [lost for text in broken for lost in re.findall(r"(\S+) lost its lease", text)] == [nodes[1].node.id]
        assert broken[0].endswith(f"{nodes[0].node.id} regroups.")

    def test_a_loss_is_reported_once(self, new_node: NodeFactory, caplog: pytest.LogCaptureFixture) -> None:
        """A heartbeat's reply may say that the round is broken before the wake-up says that a member is lost."""
        node = new_node(1, 1)
        node.next_rendezvous()
        for member_lost in (False, True, True):
            news = Break(1, Lost(node="n1", cause="lease", silent_ms=6000), 0, member_lost)
            node.node.watch.update(View.regroup, news)
        assert sum("n1 lost its lease" in text for text in caplog.messages) == 1

    def test_a_late_node_does_not_end_the_waits(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(2, 3, last_call_timeout=0) for _ in range(2)]
        infos = join_all(pool, *nodes)
        blocked: Future[bytes] = pool.submit(infos[0].store.get, "key")
        late = pool.submit(new_node(2, 3, last_call_timeout=0).next_rendezvous)
        until(nodes[0].num_nodes_waiting, "the members know")
        infos[1].store.set("key", "value")
        assert blocked.result(LONG) == b"value"
        join_all(pool, *nodes)
        late.result(LONG)
