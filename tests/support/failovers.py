"""Failovers: a master that is killed, writes that are lost, and groups of nodes and jobs that go through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from redelastic.monitoring.control import RunControl, UnknownRunError
from redelastic.monitoring.events import Lost
from redelastic.monitoring.records import Run
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.agent_job import AgentJob
from tests.support.nodes import NodeFactory
from tests.support.rounds import state
from tests.support.servers import Shard, wait_until
from tests.support.torchrun_job import LONG_LEASES

T = TypeVar("T")
INTERVAL: Final = 0.4
LIMIT: Final = 60.0
# What tests of failovers declare: beginnings of faults, and promises.
TAKES_OVER: Final = "the master is killed, a replica takes over"
LOST: Final = "the master is killed, its replica has not seen "
CONFIRMED: Final = "min_replicas=1: "
GOES_ON: Final = "I9: nobody is evicted, no worker restarts, a rendezvous completes once, epochs go up"
NO_LOSS: Final = "I1, I2, I4: no round that a node has entered is lost"


class FailOver:
    """Kills a master, and measures the time since."""

    def __init__(self, shard: Shard, run_id: str) -> None:
        self._shard, self._run = shard, RunKeys(run_id).run
        shard.kill_master()
        self._at, self._wall = time.monotonic(), time.time()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._at

    def wait_for_heartbeat(self) -> float:
        """Wait until the new master has processed a node's request; returns the seconds since the kill."""

        def beaten() -> bool:
            master = self._shard.master()
            if master is None:
                return False
            with master.get_client() as client:
                return int(client.hget(self._run, "beat_at") or 0) > 1000 * self._wall

        wait_until(beaten, "the new master has heard a node", LIMIT)
        return self.seconds


def wait_until_all_beat(*nodes: RedisRendezvousHandler) -> None:
    """Wait until Redis has heard each of these members within two heartbeat intervals."""
    control = RunControl(nodes[0].backend.connection, nodes[0].backend.keys)
    ids = {node.node.id for node in nodes}

    def fresh() -> bool:
        here = {node.id: node.silence for node in control.state().members}
        return set(here) >= ids and max(here[node] for node in ids) < 2 * INTERVAL

    wait_until(fresh, "all beat again", LIMIT)


def wait_for_candidates(node: RedisRendezvousHandler, count: int) -> None:
    """Wait until so many nodes wait for a round of this node's run."""
    wait_until(lambda: (run := state(node)) is not None and len(run.candidates) == count, f"{count} wait", LIMIT)


Group = list[RedisRendezvousHandler]


def new_group(new_node: NodeFactory, shard: Shard, low: int, high: int, count: int = 3, **config: Any) -> Group:
    """So many nodes of the test's run, which has ``low`` to ``high``, on a shard."""
    config = {"keep_alive_interval": INTERVAL, "join_timeout": LIMIT} | config
    return [new_node(low, high, url=shard.url, **config) for _ in range(count)]


@contextmanager
def lost_writes(shard: Shard, run_id: str) -> Iterator[None]:
    """Lose what the master acknowledges in this block: no replica gets it, and at the end the master is killed."""
    shard.replicate(run_id)
    with shard.cut():
        yield
        shard.kill_master()
    wait_until(shard.master, "a replica is master", LIMIT)


def resolved(*futures: Future[T]) -> list[T]:
    return [future.result(LIMIT) for future in futures]


def settle(nodes: Group) -> None:
    """Have each node join whenever nodes wait, as agents do, until all are in one round that is not broken."""
    settled = threading.Event()

    def agent(node: RedisRendezvousHandler) -> None:
        while not settled.wait(0.02):
            if node.num_nodes_waiting():
                node.next_rendezvous()

    def agreed() -> bool:
        run = state(nodes[0])
        rounds = [node.node.view.round for node in nodes]
        return (
            run is not None
            and not run.broken
            and {(r.epoch, r.size) for r in rounds if r} == {(run.epoch, len(nodes))}
            and sorted(r.rank for r in rounds if r) == list(range(len(nodes)))
            and {node.id for node in run.members} == {node.node.id for node in nodes}
        )

    with ThreadPoolExecutor(len(nodes)) as pool:
        agents = [pool.submit(agent, node) for node in nodes]
        try:
            wait_until(agreed, "all are in one round", LIMIT)
        finally:
            settled.set()
        for future in agents:
            future.result(LIMIT)


class ReplicatedJob(AgentJob):
    """A job on a shard, whose master may be killed."""

    def __init__(self, shard: Shard, run_id: str, directory: Path, nnodes: str, **more: Any) -> None:
        more["conf"] = {**LONG_LEASES, **more.get("conf", {})}
        super().__init__(cast("RedisServer", shard), directory, nnodes, **more)
        self.shard, self.run_id = shard, run_id
        self.control = RunControl(Connection.open(shard.url), RunKeys(run_id))

    def redis(self, name: str) -> Any:
        with self.shard.get_client(decode_responses=True) as self._client:
            return super().redis(name)

    def state(self) -> Run | None:
        """The run; None if Redis has none."""
        try:
            return self.control.state()
        except UnknownRunError:
            return None

    def wait_epoch(self, epoch: int) -> None:
        """Wait until the round is complete in Redis; its nodes may not know yet."""
        self.wait(f"round {epoch} is complete", lambda: (run := self.state()) is not None and run.epoch == epoch)

    def wait_joined(self, count: int) -> None:
        """Wait until so many nodes wait for a round."""
        self.wait(f"{count} wait", lambda: (run := self.state()) is not None and len(run.candidates) == count)

    def train_on(self, epoch: int, nodes: str) -> None:
        """Check that these nodes train on in that round, and that no worker was restarted."""
        steps = len(self.lines("step"))
        self.wait("they train on", lambda: len(self.lines("step")) > steps + 30)
        assert self.wait_round(nodes, epoch - 1) == epoch
        started = [line.node for line in self.lines("start") if line.epoch == epoch]
        assert sorted(started) == sorted(nodes), "no worker was restarted"
        run = self.control.state()
        assert (run.epoch, len(run.members), run.broken) == (epoch, len(nodes), None)
        assert not self.events(Lost)
