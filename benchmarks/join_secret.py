"""What does a join secret cost the nodes of a round, before their workers start?

Two nodes run their own code: rank 0, which verifies all proofs, and the last rank. One thread writes the proofs of the
others to a real Redis, one after the other in the order of their ranks.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Final

import redis

from benchmarks import report
from benchmarks.harness import Watch, run_alone
from benchmarks.report import Progress, Table
from redelastic.monitoring.control import RunControl
from redelastic.redis.connection import Connection
from redelastic.redis.keys import PROVED, RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.admittance import Admittance
from redelastic.rendezvous.join_secret import Facts, prove
from redelastic.rendezvous.node import Node
from redelastic.rendezvous.settings import Settings
from redelastic.rendezvous.view import Round
from redelastic.store import RedisStore

SIZES: Final = (100, 1000, 10_000)
SECRET: Final = b"0123456789abcdef0123456789abcdef"
HOST, PORT, NOW, INCARNATION = "10.0.0.1", 29500, 1_800_000_000_000, "node-1-0123456789ab"
LIMIT: Final = 60.0

Measured = dict[str, list[float]]


def measure(url: str, nodes: int, repeat: int) -> Measured:
    """Seconds of CPU time of both nodes and of Redis, and from the last proof until the last rank may start workers."""
    found: Measured = defaultdict(list)
    for _ in range(repeat + 1):
        for what, seconds in measure_round(url, RunKeys(f"secret-{uuid.uuid4().hex[:12]}"), nodes).items():
            found[what].append(seconds)
    return {what: seconds[1:] for what, seconds in found.items()}


def measure_round(url: str, keys: RunKeys, nodes: int) -> dict[str, float]:
    """One round of a new run."""
    facts = Facts(keys.prefix, keys.run_id, INCARNATION, 1, nodes, NOW, HOST, PORT)
    others = range(1, nodes - 1)
    proofs = [(PROVED.format(NOW, rank), prove(SECRET, facts, rank, f"node-{rank}-0123456789ab")) for rank in others]
    settings = Settings(run_id=keys.run_id, min_nodes=nodes, max_nodes=nodes)
    with (
        redis.Redis.from_url(url) as client,
        closing(RedisStore(url, keys.run_id, epoch=1)) as store,
        ThreadPoolExecutor(2) as pool,
    ):
        watch = Watch(client)
        began = watch.cpu()

        def admit(rank: int) -> tuple[float, float]:
            """CPU time that it took, and when it ended."""
            connection = Connection.open(url)
            node = Admittance(Node(connection, keys, settings, HOST), RunControl(connection, keys), SECRET)
            entered = Round(1, rank, nodes, HOST, PORT, NOW, 0, again=False, incarnation=INCARNATION)
            with closing(connection), closing(node), closing(RedisStore(connection, keys.run_id, epoch=1)) as own:
                before = time.thread_time()
                if not node.admit(entered, own):
                    raise RuntimeError(f"rank {rank} was not admitted")
                return time.thread_time() - before, time.monotonic()

        running = [pool.submit(admit, rank) for rank in (0, nodes - 1)]
        for key, proof in proofs:
            store.set(key, proof)
        written = time.monotonic()
        (first, _), (last, admitted) = [one.result() for one in running]
        return {"rank 0": first, "another node": last, "Redis": watch.cpu() - began, "wait": admitted - written}


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    cpu = Table("join-secret-cpu", "CPU time for the join secret, in each round", "nodes", base="rank 0")
    wait = Table("join-secret-wait", "From the last node's proof until the last rank may start its workers", "nodes")
    for nodes in SIZES[:2] if quick else SIZES:
        progress(f"{nodes:,} nodes")
        with RedisServer() as server:
            found = run_alone(measure, (server.url, nodes, 1 if quick else 5), LIMIT)
        wait.put(f"{nodes:,}", wait.base, found.pop("wait"))
        for what, seconds in found.items():
            cpu.put(f"{nodes:,}", what, seconds)
    yield from (cpu, wait)


if __name__ == "__main__":
    sys.exit(report.main(run, "join_secret", __doc__ or ""))
