"""What does one Redis carry? Many jobs at once, many waiting nodes, a store of many keys, and one of large values.

Each node needs a connection: 10,000 nodes need ``maxclients`` above Redis' default of 10,000, and as many open files
(``ulimit -n``) for the server. ``RedisServer`` and this program take what the hard limit allows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import redis
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from benchmarks.harness import (
    Figures,
    TimeLimitError,
    Watch,
    peak_memory,
    raise_limit_of_files,
    run_alone,
    run_nodes,
)
from benchmarks.report import Table, document, markdown, shown
from benchmarks.simulated import connected, simulate, while_alive
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.settings import Settings
from redelastic.store import RedisStore

TTL = 5.0  # of stores, in seconds


# -- many jobs at once


def prepare(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make a node of one of the jobs."""
    config = {"join_timeout": 300, "keep_alive_interval": options["interval"], "ttl": 6 * options["interval"]}
    run_id = f"{options['run_id']}-{number // 2}"
    handler = get_rendezvous_handler(RendezvousParameters("redis", options["url"], run_id, 2, 2, **config))
    return handler.next_rendezvous, handler.shutdown


def measure_jobs(server: RedisServer, options: argparse.Namespace) -> Figures:
    """Form many jobs at once, hold them for longer than a lease, and end them."""
    interval, nodes = options.interval or 2.0, 2 * options.jobs
    run_id = f"load-{uuid.uuid4().hex[:12]}"
    found: Figures = {}
    with server.get_client() as client:
        watch = Watch(client)

        def hold_them() -> None:
            found["memory per node"] = (watch.grown() / nodes, "B")
            found["connections per node"] = ((client.info("clients")["connected_clients"] - 1) / nodes, "")
            found["longest command"] = (watch.longest(), "s")
            began, computed = time.monotonic(), watch.cpu()
            time.sleep(4 * interval)
            found["Redis busy meanwhile"] = (100 * (watch.cpu() - computed) / (time.monotonic() - began), "%")
            standing = 0
            for job in range(options.jobs):
                keys = RunKeys(f"{run_id}-{job}")
                epoch, broken = client.hmget(keys.run, "epoch", "broken")
                standing += epoch == b"1" and broken is None and client.scard(keys.members) == 2
            found["jobs that stand after a lease"] = (standing, "")

        shared = {"url": server.url, "run_id": run_id, "interval": interval}
        [timings] = run_nodes(prepare, [shared], nodes, options.limit, hold_them)
        formed = max(t.ended for t in timings) - min(t.began for t in timings)
        return (
            {"jobs": (options.jobs, ""), "all jobs formed": (formed, "s")}
            | found
            | watch.until_empty(6 * interval + 30)
        )


# -- many waiting nodes


async def waiting_nodes(url: str, n: int, interval: float) -> Figures:
    """All nodes but one wait; the last one comes; then all but one die."""
    run = RunKeys(f"load-{uuid.uuid4().hex[:12]}")
    common: dict[str, Any] = {"run_id": run.run_id, "min_nodes": n, "max_nodes": n, "keep_alive_interval": interval}
    found: Figures = {}
    with redis.Redis.from_url(url) as client:
        watch = Watch(client)
        nodes = await connected(
            n,
            client.get_connection_kwargs(),
            run,
            lambda number: Settings(**common, node_name=f"node-{number}", ttl=5 * interval),
        )
        *early, last = nodes
        found["nodes"] = (n, "")

        began = time.monotonic()
        waiting = [asyncio.create_task(node.join()) for node in early]
        await while_alive(waiting, lambda: not all(node.parked for node in early))
        found["joins at once: all wait after"] = (time.monotonic() - began, "s")
        found["longest join"] = (watch.longest(), "s")

        client.config_resetstat()
        began, computed, blocked = time.monotonic(), watch.cpu(), 0
        while time.monotonic() < began + interval:
            await asyncio.sleep(0.05)
            blocked = max(blocked, client.info("clients")["blocked_clients"])
        busy = (watch.cpu() - computed) / (time.monotonic() - began)
        usec = client.info("commandstats")["cmdstat_evalsha"]["usec_per_call"]
        found["blocked at once"] = (blocked, "")
        found["memory per waiting node"] = (watch.grown() / n, "B")
        found["its connection"] = (client.memory_stats()["clients.normal"] / n, "B")
        found[f"Redis busy with heartbeats every {interval:g} s"] = (100 * busy, "%")
        found["one heartbeat"], found["longest heartbeat"] = (usec / 1e6, "s"), (watch.longest(), "s")

        began, computed = time.monotonic(), watch.cpu()
        rounds = await asyncio.gather(last.join(), *waiting)
        found["the last node comes: all are told after"] = (time.monotonic() - began, "s")
        found["Redis busy with that for"] = (watch.cpu() - computed, "s")
        found["longest script: completion"] = (watch.longest(), "s")
        found["different ranks"] = (len({entered.rank for entered in rounds}), "")

        await asyncio.sleep(3.2 * interval)  # all silent for longer than a lease: that counts as an outage
        await last.beat()
        found["longest script: all leases anew after an outage"] = (watch.longest(), "s")
        found["members after it"] = (client.scard(run.members), "")
        while client.zcard(run.leases) > 1:  # now they run out in the same millisecond
            await asyncio.sleep(interval)
            await last.beat()
        found["longest script: all leases but one run out at once"] = (watch.longest(), "s")
        for node in nodes:
            node.close()
    return found


def run_waiting_nodes(url: str, n: int, interval: float) -> Figures:
    """As :func:`waiting_nodes`, in its own process."""
    return simulate(waiting_nodes, url, n, interval)


def measure_waiting(server: RedisServer, options: argparse.Namespace) -> Figures:
    """A large group waits, forms, and dies."""
    interval = options.interval or 5.0
    with server.get_client() as client:
        watch = Watch(client)
        found = run_alone(run_waiting_nodes, (server.url, options.nodes, interval), options.limit)
        return found | watch.until_empty(6 * interval + 30)


# -- a large store


def fill_store(url: str, n: int, batch: int = 1000) -> Figures:
    """Write many small values in batches, and read them."""
    store = RedisStore(url, f"load-{uuid.uuid4().hex[:12]}", ttl=TTL)
    with redis.Redis.from_url(url) as client:
        watch = Watch(client)
        before, began = peak_memory(reset=True), time.monotonic()
        for first in range(0, n, batch):
            chunk = range(first, min(n, first + batch))
            store.multi_set([f"key/{i}" for i in chunk], [f"value {i}" for i in chunk])
        found: Figures = {"keys": (store.num_keys(), ""), "written in": (time.monotonic() - began, "s")}
        found["memory per key"] = (watch.grown() / n, "B")
        found["client's peak"] = (peak_memory() - before, "B")
        found["longest write of 1,000 keys"] = (watch.longest(), "s")
        before = peak_memory(reset=True)
        found["keys listed"] = (len(store.list_keys()), "")
        found["list_keys: Redis blocked"] = (watch.longest(), "s")
        found["list_keys: client's peak"] = (peak_memory() - before, "B")
    store.close()
    return found


def measure_keys(server: RedisServer, options: argparse.Namespace) -> Figures:
    """A store of many small values, and its removal."""
    with server.get_client() as client:
        watch = Watch(client)
        return run_alone(fill_store, (server.url, options.keys), options.limit) | watch.until_empty(TTL + 30)


# -- large values


def move_value(url: str, size: int) -> Figures:
    """Write and read a large value in every way that a store offers."""
    value, run_id = b"x" * size, f"load-{uuid.uuid4().hex[:12]}"
    store, kept = RedisStore(url, run_id, ttl=TTL), RunKeys(run_id).store("default")
    calls: dict[str, Callable[[], object]] = {
        "set": lambda: store.set("a", value),
        "get": lambda: store.get("a"),
        "compare_set": lambda: store.compare_set("b", b"", value),
        "add after it": lambda: store.add("n", 1),
        "queue_push": lambda: store.queue_push("q", value),
        "queue_pop": lambda: store.queue_pop("q"),
    }
    found: Figures = {"size": (size, "B")}
    with redis.Redis.from_url(url) as client:
        watch = Watch(client)
        for name, call in calls.items():
            before, began, computed = peak_memory(reset=True), time.monotonic(), watch.cpu()
            call()
            once = [*client.keys(kept.dedup(b"*")), *client.keys(kept.reply(b"*"))]
            remembered = sum(client.memory_usage(key, samples=0) or 0 for key in once)
            found[name] = (time.monotonic() - began, "s")
            found[f"{name}: Redis computes"] = (watch.cpu() - computed, "s")
            found[f"{name}: Redis remembers the reply"] = (remembered, "B")
            found[f"{name}: client's peak"] = (peak_memory() - before, "B")
        found["Redis' peak"] = (client.info("memory")["used_memory_peak"] - watch.base, "B")
    store.close()
    return found


def measure_value(server: RedisServer, options: argparse.Namespace) -> Figures:
    """One large value, and its removal."""
    with server.get_client() as client:
        watch = Watch(client)
        found = run_alone(move_value, (server.url, options.megabytes << 20), options.limit)
        return found | watch.until_empty(TTL + 30)


# -- the command


QUESTIONS: Final[dict[str, tuple[str, Callable[[RedisServer, argparse.Namespace], Figures]]]] = {
    "jobs": ("Many jobs", measure_jobs),
    "waiting": ("One job of many nodes", measure_waiting),
    "keys": ("A store of many keys", measure_keys),
    "value": ("Large values", measure_value),
}
QUICK: Final = {"jobs": 1, "nodes": 64, "interval": 0.3, "keys": 10_000, "megabytes": 1}


def main() -> int:
    """Answer some of the questions, or all; fails if one has no answer."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__)
    parser.add_argument("questions", nargs="*", metavar="|".join(QUESTIONS), help="what to measure (default: all)")
    parser.add_argument("--quick", action="store_true", help="few and small cases: whether it works, not how fast")
    parser.add_argument("--jobs", type=int, default=500, help="jobs of 2 nodes at once (default: 500)")
    parser.add_argument("--nodes", type=int, default=10_000, help="nodes that wait (default: 10000)")
    parser.add_argument("--interval", type=float, help="seconds between heartbeats (default: 2; of nodes that wait, 5)")
    parser.add_argument("--keys", type=int, default=1_000_000, help="keys of one store (default: 1000000)")
    parser.add_argument("--megabytes", type=int, default=64, help="size of one value (default: 64)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one question (default: 300)")
    parser.add_argument("--json", type=Path, help="write the tables, and the figures, to this file")
    options = parser.parse_args()
    if unknown := set(options.questions) - QUESTIONS.keys():
        parser.error(f"no such question: {', '.join(sorted(unknown))}")
    vars(options).update(QUICK if options.quick else {})
    raise_limit_of_files()
    answers: dict[str, Figures] = {}
    tables = []
    for question in options.questions or QUESTIONS:
        title, measure = QUESTIONS[question]
        table = Table(f"load-{question}", title, "what")
        try:
            with RedisServer() as server:
                answers[question] = measure(server, options)
            for what, figure in answers[question].items():
                table.put(what, "found", shown(*figure))
        except (TimeLimitError, RuntimeError) as e:
            table.put("failed", "found", str(e))
        tables.append(table)
        sys.stdout.write("\n".join(markdown(table)) + "\n\n")
    if options.json:
        options.json.write_text(json.dumps(document("load", tables) | {"load": answers}, indent=1) + "\n")
    return int(len(answers) < len(tables))


if __name__ == "__main__":
    sys.exit(main())
