"""The native handler: real nodes (handlers, mostly in threads of this process) on a real server."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in one from Python 3.11 on

import pytest
import redis
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from redelastic import plugin
from redelastic.monitoring.events import Left, Lost
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import EPOCH_VARIABLE
from redelastic.rendezvous.view import Break, View
from redelastic.store import RoundBrokenError
from tests.support.faulty_proxy import Fault
from tests.support.nodes import NodeFactory
from tests.support.peers import lossy_proxy
from tests.support.rounds import join_all, ranks, until

LONG = 60.0  # for a last call that no group needs, and for what a busy machine does late, in seconds


def until_joined(client: redis.Redis, keys: RunKeys, n: int) -> None:
    until(lambda: client.zcard(keys.candidates) == n, f"{n} candidates")


class TestForming:
    def test_all_members_agree(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        infos = join_all(pool, *(new_node(5, 5) for _ in range(5)))
        assert sorted(ranks(infos)) == [0, 1, 2, 3, 4]  # I2
        assert {info.world_size for info in infos} == {5}
        assert len({(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}) == 1  # type: ignore[union-attr]

    def test_max_nodes_complete_at_once(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        started = time.monotonic()
        join_all(pool, *(new_node(1, 3, last_call_timeout=60) for _ in range(3)))
        assert time.monotonic() - started < 30  # I6: the last call is for those who are missing

    def test_last_call_completes_with_fewer(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        infos = join_all(pool, *(new_node(3, 4, last_call_timeout=0.3) for _ in range(3)))
        assert sorted(ranks(infos)) == [0, 1, 2]  # I3, I6

    def test_a_long_wait_says_what_for(
        self,
        new_node: NodeFactory,
        pool: ThreadPoolExecutor,
        run_id: str,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr("redelastic.rendezvous.candidate.LONG_WAIT", 0.1)
        first = new_node(2, 3, last_call_timeout=0, keep_alive_interval=0.1)
        joining = pool.submit(first.next_rendezvous)
        until(lambda: caplog.messages, "it says so")
        assert (
            f"waits for a round of run '{run_id}', of 2 to 3 nodes; `redelastic status {run_id}`" in caplog.messages[0]
        )
        new_node(2, 3, last_call_timeout=0, keep_alive_interval=0.1).next_rendezvous()
        assert joining.result(LONG).world_size == 2
        assert sum("waits for a round" in text for text in caplog.messages) == 1, "once"

    def test_topology_orders_new_nodes(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        labels = ["rack2", "rack1", "rack2", "rack1"]
        nodes = [new_node(4, 4, topology=label) for label in labels]
        infos = join_all(pool, *nodes)
        assert [labels[i] for i in sorted(range(4), key=lambda i: infos[i].rank)] == [
            "rack1",
            "rack1",
            "rack2",
            "rack2",
        ]

    def test_the_environment_carries_the_epoch(self, new_node: NodeFactory) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()
        assert os.environ[EPOCH_VARIABLE] == "1"
        node.next_rendezvous()
        assert os.environ[EPOCH_VARIABLE] == "2"  # I4

    def test_torchrun_without_an_id_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"--rdzv-id is missing: .* set PET_RDZV_ID\."):
            plugin.create(RendezvousParameters("redis", "127.0.0.1:1", "none", 1, 1))  # as torchrun has it then

    def test_two_runs_do_not_meet(self, new_node: NodeFactory, pool: ThreadPoolExecutor, run_id: str) -> None:
        a = [new_node(2, 2) for _ in range(2)]
        b = [new_node(2, 2, run_id=run_id + "-b") for _ in range(2)]
        infos = join_all(pool, *a, *b)
        assert sorted(ranks(infos[:2])) == sorted(ranks(infos[2:])) == [0, 1]
        infos[0].store.set("key", "of a")
        assert not infos[2].store.check(["key"])


class TestRegrouping:
    def test_a_late_node_is_taken_in_and_ranks_stick(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(2, 3) for _ in range(2)]
        before = join_all(pool, *nodes)
        assert [n.num_nodes_waiting() for n in nodes] == [0, 0]
        late = new_node(2, 3)
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

    def test_a_lost_node_is_told_from_one_that_regroups(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
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

    def test_a_loss_is_told_though_the_round_was_broken_before(
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
        told = [text for text in caplog.messages if "is broken" in text]
        assert [lost for text in told for lost in re.findall(r"(\S+) lost its lease", text)] == [nodes[1].node.id]
        assert told[0].endswith(f"{nodes[0].node.id} regroups.")

    def test_a_loss_is_told_once(self, new_node: NodeFactory, caplog: pytest.LogCaptureFixture) -> None:
        """A heartbeat's reply may say that the round is broken before the wake-up says that a member is lost."""
        node = new_node(1, 1)
        node.next_rendezvous()
        for member_lost in (False, True, True):
            news = Break(1, Lost(node="n1", cause="lease", silent_ms=6000), 0, member_lost)
            node.node.watch.update(View.regroup, news)
        assert sum("n1 lost its lease" in text for text in caplog.messages) == 1

    def test_a_late_node_does_not_end_the_waits(self, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
        nodes = [new_node(2, 3) for _ in range(2)]
        infos = join_all(pool, *nodes)
        blocked: Future[bytes] = pool.submit(infos[0].store.get, "key")
        late = pool.submit(new_node(2, 3).next_rendezvous)
        until(nodes[0].num_nodes_waiting, "the members know")
        infos[1].store.set("key", "value")
        assert blocked.result(LONG) == b"value"
        join_all(pool, *nodes)
        late.result(LONG)


class TestClosing:
    def test_it_reaches_members_and_waiting_nodes(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        nodes = [new_node(2, 2) for _ in range(2)]
        join_all(pool, *nodes)
        spare = pool.submit(new_node(2, 2).next_rendezvous)
        until_joined(client, keys, 1)
        nodes[0].set_closed()
        nodes[0].set_closed()  # I8
        with pytest.raises(RendezvousGracefulExitError, match="is closed"):
            spare.result(LONG)
        until(nodes[1].is_closed, "the other member knows")
        assert new_node(2, 2).is_closed()
        with pytest.raises(RendezvousClosedError, match="use a new run id"):
            nodes[1].next_rendezvous()  # I5

    def test_a_spare_of_a_run_that_failed_has_not_succeeded(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        member = new_node(1, 1)
        join_all(pool, member)
        spare = pool.submit(new_node(1, 1).next_rendezvous)
        until_joined(client, keys, 1)
        member.end(Left(cause="failed"), "closes")
        with pytest.raises(RendezvousClosedError, match="failed"):
            spare.result(LONG)

    def test_it_ends_a_forming_group(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        joining = pool.submit(new_node(2, 2).next_rendezvous)
        until_joined(client, keys, 1)
        new_node(2, 2).set_closed()
        with pytest.raises(RendezvousClosedError):
            joining.result(LONG)

    def test_a_finished_member_closes_and_the_others_finish_in_peace(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor
    ) -> None:
        nodes = [new_node(1, 2, last_call_timeout=LONG) for _ in range(2)]
        infos = join_all(pool, *nodes)
        assert [nodes[0].shutdown(), nodes[0].shutdown()] == [True, True]
        until(nodes[1].is_closed, "the other knows")
        assert nodes[1].num_nodes_waiting() == 0
        infos[1].store.set("last", "words")
        with pytest.raises(RendezvousClosedError, match="was shut down"):
            nodes[0].next_rendezvous()

    @pytest.mark.parametrize("interval", [0.3, 30])
    def test_shutdown_ends_a_join_of_another_thread(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys, interval: float
    ) -> None:
        node = new_node(2, 2, keep_alive_interval=interval)
        joining = pool.submit(node.next_rendezvous)
        until_joined(client, keys, 1)
        assert node.shutdown()
        with pytest.raises(RendezvousClosedError, match="was shut down"):
            joining.result(LONG)
        assert client.zcard(keys.candidates) == 0  # and nothing of it comes back

    def test_shutdown_without_redis_ends_a_join_of_another_thread(
        self, own_server: RedisServer, new_node: NodeFactory, pool: ThreadPoolExecutor
    ) -> None:
        node = new_node(2, 2, url=own_server.url, close_timeout=0.2, read_timeout=4, keep_alive_interval=0.3)
        joining = pool.submit(node.next_rendezvous)
        with own_server.get_client() as its_client:
            until_joined(its_client, node.backend.keys, 1)
        own_server.kill()
        assert not node.shutdown()
        with pytest.raises((RendezvousClosedError, RendezvousConnectionError)):
            joining.result(LONG)

    def test_shutdown_without_redis_says_false(self, own_server: RedisServer, new_node: NodeFactory) -> None:
        node = new_node(1, 1, url=own_server.url, close_timeout=0.2, read_timeout=4)
        node.next_rendezvous()
        own_server.kill()
        assert node.num_nodes_waiting() == 0  # from memory
        with pytest.raises(RendezvousTimeoutError, match="could not be closed in time"):
            node.set_closed()
        with pytest.raises(RendezvousConnectionError):
            node.is_closed()
        assert not node.shutdown()


def refuse_threads(patch: pytest.MonkeyPatch, name: str = "") -> None:
    """This process has no room for another thread of such a name."""
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if name in thread.name:
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refuse)


class TestWhatMayComeBetween:
    def test_a_keeper_that_could_not_be_started_is_started_by_the_next_attempt(
        self, new_node: NodeFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else the node would lose its lease, and hear of nothing."""
        node = new_node(1, 1)
        with monkeypatch.context() as patched:
            refuse_threads(patched, "keepalive")
            with pytest.raises(RuntimeError, match="can't start"):
                node.next_rendezvous()
        node.next_rendezvous()
        keeper = node.keeper._thread
        assert keeper is not None
        assert keeper.is_alive()

    def test_a_diagnosis_for_which_there_is_no_thread_is_no_error(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nodes = [new_node(2, 2) for _ in range(2)]
        [other] = [node for node, info in zip(nodes, join_all(pool, *nodes), strict=True) if info.rank == 1]
        refuse_threads(monkeypatch)
        assert other.num_nodes_waiting() == 0

    def test_exceptions_of_signal_handlers_leave_the_view_unlocked(self, new_node: NodeFactory) -> None:
        node = new_node(1, 1)
        node.next_rendezvous()

        def interrupt(*_: object) -> None:
            raise KeyError("an alarm's")

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            for _ in range(300):
                with contextlib.suppress(KeyError):
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-4, 3e-4))
                    while True:
                        node.num_nodes_waiting()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        with ThreadPoolExecutor(1) as other:
            assert other.submit(node.num_nodes_waiting).result(LONG) == 0

    def test_a_node_that_was_shut_down_while_it_joined_is_in_no_round(
        self, server: RedisServer, new_node: NodeFactory, client: redis.Redis, keys: RunKeys
    ) -> None:
        """By a signal handler, just when the reply comes."""
        with lossy_proxy(server) as (url, through):
            node = new_node(1, 1, url=url)
            shut_down = Fault(keys.candidates.encode(), keep=None, meanwhile=node.shutdown)
            through.proxy.add(shut_down)
            with pytest.raises(RendezvousClosedError, match="was shut down"):
                node.next_rendezvous()
            assert shut_down.fired.is_set()
        assert client.zcard(keys.leases) == 0

    @pytest.mark.parametrize(("before", "now"), [(1.2, 1.5), (1.5, 1.2)])
    def test_a_dead_job_makes_room_for_one_of_another_size_and_heartbeat(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, before: float, now: float
    ) -> None:
        dead = [new_node(2, 2, keep_alive_interval=before) for _ in range(2)]
        join_all(pool, *dead)
        for node in dead:
            node.node.stop()
        assert new_node(1, 1, keep_alive_interval=now).next_rendezvous().world_size == 1

    def test_a_fenced_node_closes_nothing_though_redis_has_lost_its_data(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        fenced, live = nodes = [new_node(1, 2, keep_alive_interval=2, last_call_timeout=LONG) for _ in range(2)]
        join_all(pool, *nodes)
        client.zadd(keys.leases, {fenced.node.id: 1})  # as if it had been frozen for a lease
        until(live.num_nodes_waiting, "the other knows")
        live.next_rendezvous()
        until(lambda: fenced.node.view.fenced, "it knows itself")
        client.delete(*keys.types)
        fenced.shutdown()
        assert not live.is_closed()

    def test_a_node_of_a_broken_round_closes_nothing_though_redis_has_lost_its_data(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis, keys: RunKeys
    ) -> None:
        first, second, newcomer = (new_node(2, 3, keep_alive_interval=1) for _ in range(3))
        join_all(pool, first, second)
        waiting = pool.submit(newcomer.next_rendezvous)
        until(first.num_nodes_waiting, "somebody waits")
        client.delete(*keys.types)
        first.shutdown()
        assert not second.is_closed()
        assert second.next_rendezvous().world_size == waiting.result(LONG).world_size == 2

    def test_a_shutdown_that_redis_did_not_hear_may_be_tried_again(
        self, own_server: RedisServer, new_node: NodeFactory
    ) -> None:
        node = new_node(1, 1, url=own_server.url, close_timeout=0.3, heartbeat_timeout=1)
        node.next_rendezvous()
        assert own_server.pid
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            assert not node.shutdown()
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        until(node.shutdown, "it is heard")
        assert new_node(1, 1, url=own_server.url).is_closed()
        assert node.shutdown()
