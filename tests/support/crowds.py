"""Made-up runs of any number of nodes in a real Redis: the keys that the Lua scripts would have written."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from typing import Any

import redis

from redelastic.monitoring.events import Completed, Event, Failed, Hung
from redelastic.redis.keys import RunKeys
from tests.proofs.oracle_state import PROTOCOL
from tests.support.scenes import Story

LEASE = 6.0  # of each node, in seconds


def fields_of(event: Event) -> dict[Any, Any]:
    """The fields of an event's entry in the stream of events."""
    fields: dict[Any, Any] = {"event": event.event, "epoch": event.epoch, "size": event.size, "node": event.node}
    fields |= {"nodes": " ".join(event.nodes)} if event.nodes else {}
    fields |= {"breaks": 1} if event.breaks else {}
    pairs = event.pairs()
    return fields | dict(zip(pairs[::2], pairs[1::2], strict=True))


class Crowd:
    """A run with past rounds, whose nodes are all alive; :meth:`beat` renews their leases and statuses.

    Args:
        client: a client of the server.
        run_id: the run's id.
        nodes: number of nodes.
        gpus: GPUs per node.
        age: how long ago the run began, in seconds.
        lease: how long the nodes live after each :meth:`beat`, in seconds.
    """

    def __init__(
        self,
        client: redis.Redis,
        run_id: str,
        nodes: int,
        *,
        gpus: int = 8,
        age: float = 3600.0,
        lease: float = LEASE,
    ) -> None:
        self._client = client
        self.keys = RunKeys(run_id)
        self._gpus, self._lease = gpus, lease
        self._random = random.Random(nodes)
        self.step = 41_000
        self._began = time.time() - age
        story = Story(nodes)
        self.members = [story.node(f"node-{i:04d}") for i in range(nodes)]
        story.join(0, self.members, within=20)
        story.complete(21, self.members, "max_nodes", start=25)
        rounds = 1
        for at, kind in ((0.35, "lost"), (0.6, "hung"), (0.8, "failed")) if nodes > 1 else ((0.5, "failed"),):
            victim = self.members[len(self.members) // 3]
            if kind == "lost":
                story.lose(at * age, victim, 6100)
            elif kind == "hung":
                hung: dict[str, Any] = {"local_rank": 3, "rank": 11, "pid": 4003, "idle_ms": 120_000, "step": 30_412}
                story.add(at * age, Hung(node=victim, **hung, stacks="Thread 0x1\n  File train.py, line 3"))
            else:
                story.add(at * age, Failed(node=victim, local_rank=5, rank=85, pid=4005, exit_code=1))
            stay = [node for node in self.members if kind != "lost" or node != victim]
            story.regroup(at * age + 0.2, stay, within=2)
            if kind == "lost":
                again = story.node(victim.rsplit("-", 2)[0])
                self.members[self.members.index(victim)] = again
                story.join(at * age + 4, [again])
            story.complete(at * age + 5, self.members, "max_nodes", start=25)
            rounds += 1
        self._write(story, rounds)

    def _write(self, story: Story, rounds: int) -> None:
        client, keys = self._client, self.keys
        events = story.events()
        shift = self._began - (events[0].time - 0.01)
        with client.pipeline(transaction=False) as pipe:
            for event in events:
                at = round(1000 * (event.time + shift))
                pipe.xadd(keys.events, fields_of(event), id=f"{at}-{event.id.partition('-')[2]}")
            completed = max(event.time for event in events if isinstance(event, Completed)) + shift
            n = len(self.members)
            run: dict[Any, Any] = {
                "epoch": rounds,
                "size": n,
                "min": max(1, n // 2),
                "max": n,
                "lease": round(1000 * self._lease),
            }
            run |= {"ttl": 7_200_000, "protocol": PROTOCOL, "completed_at": round(1000 * completed), "restarts": 2}
            pipe.hset(keys.run, mapping=run)
            pipe.zadd(keys.ranks, {node: rank for rank, node in enumerate(self.members)})
            pipe.sadd(keys.members, *self.members)
            pipe.execute()
        self.beat()

    def add(self, event: Event) -> None:
        """Add an event that happens now."""
        self._client.xadd(self.keys.events, fields_of(event), id=f"{round(1000 * time.time())}-*")

    def beat(self, steps: int = 1, silent: Sequence[str] = ()) -> None:
        """Have each node but the ``silent`` ones renew its lease and report ``steps`` more steps."""
        self.step += steps
        until = round(1000 * (time.time() + self._lease))
        with self._client.pipeline(transaction=False) as pipe:
            for i, node in enumerate(self.members):
                if node not in silent:
                    pipe.set(self.keys.status(node), json.dumps(self._status(node, i)))
                    pipe.zadd(self.keys.leases, {node: until - self._random.randrange(1500)})
            pipe.execute()

    def _status(self, node: str, rank: int) -> dict[str, object]:
        pick = self._random
        each = max(1, self._gpus)
        workers = [
            {"local_rank": i, "rank": rank * each + i, "pid": 4000 + i, "state": "running", "step": self.step}
            | {"idle": pick.uniform(0, 0.6), "cpu": pick.uniform(90, 120), "memory": 9_000_000_000}
            for i in range(each)
        ]
        gpus = [
            {"index": i, "uuid": f"GPU-{rank:04d}-{i}", "name": "NVIDIA H100 80GB HBM3"}
            | {"memory_used": 76_000_000_000 + pick.randrange(10**9), "memory_total": 85_899_345_920}
            | {"utilization": pick.randrange(90, 100), "temperature": pick.randrange(58, 66), "ecc": 0, "xid": 0}
            for i in range(self._gpus)
        ]
        return {
            "name": node.rsplit("-", 2)[0],
            "host": f"10.0.{rank // 250}.{rank % 250}",
            "pid": 3000 + rank,
            "state": "running",
            "agent": "redelastic",
            "restarts": 2,
            "cpu": pick.uniform(700, 900),
            "memory": 72_000_000_000,
            "memory_available": 10**12,
            "memory_total": 2 * 10**12,
            "workers": workers,
            "gpus": gpus,
        }


def main(nodes: int) -> None:
    """Print the cost of one update of the dashboard's page after a heartbeat of each node of 8 GPUs."""
    with RedisServer() as server, server.get_client() as client:
        crowd = Crowd(client, "crowd", nodes)
        watch = Watch(Connection.open(server.url), crowd.keys)
        watch.read(has_page=True)
        page_size, costs = len(json.dumps(watch.page)), []
        for _ in range(9):
            before = watch.page
            crowd.beat()
            began = time.process_time()
            watch.read(has_page=True)
            done = time.process_time()
            patch = json.dumps(merge_patch(before, watch.page), separators=(",", ":"))
            costs.append((1000 * (done - began), 1000 * (time.process_time() - done), len(patch)))
    read, diff, size = (statistics.median(column) for column in zip(*costs, strict=True))
    sys.stdout.write(
        f"{nodes} nodes: the page {page_size:,} bytes; an update {size:,.0f} bytes, {read:.0f} ms of CPU to read and "
        f"{diff:.0f} ms to tell what changed\n"
    )


if __name__ == "__main__":  # python -m tests.support.crowds 1000
    import statistics
    import sys

    from redelastic.dashboard.feed import merge_patch
    from redelastic.dashboard.reader import Watch
    from redelastic.redis.connection import Connection
    from redelastic.redis.server import RedisServer

    main(int(sys.argv[1]))
