"""The native handler: real nodes (handlers, mostly in threads of this process) form rounds, and close their run."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
)

from redelastic import plugin
from redelastic.monitoring.events import Left
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import EPOCH_VARIABLE
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
        first, second, newcomer = (new_node(2, 3, keep_alive_interval=1, last_call_timeout=0) for _ in range(3))
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
