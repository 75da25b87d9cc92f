"""Heartbeats: which nodes check the lease of a silent member, and when."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from redelastic.monitoring.events import Left
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.candidate import Candidate
from redelastic.rendezvous.keeper import COARSE, RETRY_PAUSE, SPREAD
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all, until


class TestRegrouping:
    def test_few_nodes_of_a_large_group_check_a_silent_members_lease(self, new_node: NodeFactory) -> None:
        member = new_node(keep_alive_interval=30).keeper

        def scheduled(size: int) -> tuple[float, float, bool]:
            """After how many seconds the member beats, at least and at most, and whether that is urgent."""
            before = time.monotonic()
            member._schedule_lease_check(0.0, size)
            after = time.monotonic()
            due, urgent = member.due()
            return due - after, due - before, urgent

        for size in (1, 2, 16, 1000):
            beats = [scheduled(size) for _ in range(1000)]
            checks = [least for least, _, urgent in beats if urgent]
            assert len(checks) == 1000 if size <= 16 else 2 <= len(checks) <= 50, size
            assert max(checks) <= SPREAD
            # before a beat that is not urgent the keeper blocks in a read, until COARSE before it
            others = [(least - COARSE, most - COARSE) for least, most, urgent in beats if not urgent]
            assert all(most > SPREAD and least <= 2 * SPREAD for least, most in others)

    def test_other_nodes_find_a_silent_member_if_no_node_checks_first(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("redelastic.rendezvous.keeper.MAX_LEASE_CHECKERS", 0)
        nodes = [new_node(1, 3, keep_alive_interval=1) for _ in range(3)]
        join_all(pool, *nodes)
        nodes[0].node.stop()
        until(lambda: nodes[1].num_nodes_waiting() and nodes[2].num_nodes_waiting(), "both survivors know")

    def test_a_join_does_not_delay_a_heartbeat_that_is_due_before(self, new_node: NodeFactory) -> None:
        """That heartbeat may be the one that checks the lease of a silent node (I7)."""
        node = new_node(1, 2, keep_alive_interval=30, last_call_timeout=0)
        node.next_rendezvous()
        node.keeper.schedule(20)
        due = node.keeper.due()
        Candidate(node.keeper, 1, time.monotonic() + 5).ask()
        assert node.keeper.due() == due

    def test_a_members_heartbeat_renews_the_rounds_store(self, new_node: NodeFactory, client: redis.Redis) -> None:
        """A spare's heartbeat or a join renews the run's own keys, but not the round's store."""
        node = new_node(1, 1, keep_alive_interval=0.3, ttl=1000)
        store = node.next_rendezvous().store
        store.set("k", "v")
        data = node.backend.keys.store(1).data
        assert client.pexpire(data, 60_000)
        until(lambda: client.pttl(data) > 900_000, "a heartbeat renews it")

    def test_the_store_of_a_round_that_is_over_is_not_renewed(
        self, new_node: NodeFactory, pool: ThreadPoolExecutor, client: redis.Redis
    ) -> None:
        """While the survivor waits for a replacement, it beats as a candidate."""
        gone, stays = new_node(2, 2, keep_alive_interval=0.3), new_node(2, 2, keep_alive_interval=0.3)
        _, info = join_all(pool, gone, stays)
        info.store.set("k", "v")
        data = stays.backend.keys.store(1).data
        gone.node.leave(Left(cause="exited"))
        joining = pool.submit(stays.next_rendezvous)
        until(lambda: 0 < client.pttl(data) <= 60_000, "the round is over")
        beat_at = client.hget(stays.backend.keys.run, "beat_at")
        until(lambda: client.hget(stays.backend.keys.run, "beat_at") != beat_at, "it beats")
        info.store.set("k", "w")
        assert client.pttl(data) <= 60_000
        join_all(pool, new_node(2, 2))
        joining.result(10)

    @pytest.mark.parametrize("is_forgotten", [False, True])
    @pytest.mark.parametrize("intervals", quick_first([(0.3, 0.9), (0.9, 0.3)]))
    def test_a_dead_node_is_found_though_intervals_differ(
        self,
        new_node: NodeFactory,
        pool: ThreadPoolExecutor,
        client: redis.Redis,
        intervals: tuple[float, float],
        is_forgotten: bool,
    ) -> None:
        """Otherwise each heartbeat of the slower one would look like the end of an outage, and restart every lease."""
        dead, slow = (new_node(1, 2, keep_alive_interval=interval, last_call_timeout=60) for interval in intervals)
        joining = pool.submit(dead.next_rendezvous)
        until(lambda: dead.node.view.standing == "candidate", "it is first")
        slow.next_rendezvous()
        joining.result(60)
        keys = dead.backend.keys
        if is_forgotten:
            client.delete(*keys.types)
            until(lambda: client.scard(keys.members) == 2, "both have put their round back")
        dead.node.stop()
        until(lambda: slow.num_nodes_waiting() > 0, "the death is known")

    def test_a_failed_read_is_repeated_soon_and_from_the_beginning(
        self, own_server: RedisServer, new_node: NodeFactory
    ) -> None:
        node = new_node(1, 1, url=own_server.url, keep_alive_interval=30, close_timeout=0.3)
        node.next_rendezvous()
        keeper = node.keeper
        own_server.kill()
        assert keeper.pump("5-0", 0.01) == "0-0"
        assert keeper.due()[0] - time.monotonic() <= 2 * RETRY_PAUSE
