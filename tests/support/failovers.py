"""What the tests of failovers share: a killed master, lost writes, and groups of nodes."""

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
TAKES_OVER: Final = "the master is killed, a replica takes over"
LOST: Final = "the master is killed, its replica has not seen "
CONFIRMED: Final = "min_replicas=1: "
GOES_ON: Final = "I9: nobody is evicted, no worker restarts, a rendezvous completes once, epochs go up"
NO_LOSS: Final = "I1, I2, I4: no round that a node has entered is lost"


class FailOver:
    """The SIGKILL of a master, and what is measured from then on."""

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
    told = RunControl(nodes[0].backend.connection, nodes[0].backend.keys)
    ids = {node.node.id for node in nodes}

    def fresh() -> bool:
        here = {node.id: node.silence for node in told.state().members}
        return set(here) >= ids and max(here[node] for node in ids) < 2 * INTERVAL

    wait_until(fresh, "all beat again", LIMIT)


def wait_for_candidates(node: RedisRendezvousHandler, count: int) -> None:
    wait_until(lambda: (run := state(node)) is not None and len(run.candidates) == count, f"{count} wait", LIMIT)


Group = list[RedisRendezvousHandler]


def new_group(new_node: NodeFactory, shard: Shard, low: int, high: int, count: int = 3, **config: Any) -> Group:
    config = {"keep_alive_interval": INTERVAL, "join_timeout": LIMIT} | config
    return [new_node(low, high, url=shard.url, **config) for _ in range(count)]


@contextmanager
def lost_writes(shard: Shard, run_id: str) -> Iterator[None]:
    """Lose what the master acknowledges within this block: no replica sees it, and then the master is killed."""
    shard.replicate(run_id)
    with shard.cut():
        yield
        shard.kill_master()
    wait_until(shard.master, "a replica is master", LIMIT)


def resolved(*futures: Future[T]) -> list[T]:
    return [future.result(LIMIT) for future in futures]


def settle(nodes: Group) -> None:
    """Do as agents do: join the next round whenever nodes wait, until all are in one round that stands."""
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
    """A job on servers whose master may be killed."""

    def __init__(self, shard: Shard, run_id: str, directory: Path, nnodes: str, **more: Any) -> None:
        more["conf"] = {**LONG_LEASES, **more.get("conf", {})}
        super().__init__(cast("RedisServer", shard), directory, nnodes, **more)
        self.shard, self.run_id = shard, run_id
        self.control = RunControl(Connection.open(shard.url), RunKeys(run_id))

    def redis(self, name: str) -> Any:
        with self.shard.get_client(decode_responses=True) as self._client:
            return super().redis(name)

    def state(self) -> Run | None:
        try:
            return self.control.state()
        except UnknownRunError:
            return None

    def wait_epoch(self, epoch: int) -> None:
        """Wait until Redis has completed that round, whether or not its nodes know yet."""
        self.wait(f"round {epoch} is complete", lambda: (run := self.state()) is not None and run.epoch == epoch)

    def wait_joined(self, count: int) -> None:
        self.wait(f"{count} wait", lambda: (run := self.state()) is not None and len(run.candidates) == count)

    def train_on(self, epoch: int, nodes: str) -> None:
        """Check that these nodes train in that round, and entered it once."""
        steps = len(self.lines("step"))
        self.wait("they train on", lambda: len(self.lines("step")) > steps + 30)
        assert self.wait_round(nodes, epoch - 1) == epoch
        started = [line.node for line in self.lines("start") if line.epoch == epoch]
        assert sorted(started) == sorted(nodes), "no worker was restarted"
        run = self.control.state()
        assert (run.epoch, len(run.members), run.broken) == (epoch, len(nodes), None)
        assert not self.events(Lost)
