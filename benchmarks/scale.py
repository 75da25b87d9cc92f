"""How many nodes does one Redis carry? Simulated ones, up to 10,000 in a group.

A group forms, forms again without a node that has left, stands for a while, and loses 1 % of its nodes at once: their
connections stay open, but they fall silent. Before that, nodes call the roll.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from statistics import median
from typing import Any, Final

import redis

from benchmarks import report
from benchmarks.harness import TimeLimitError, Watch, raise_limit_of_files, run_alone
from benchmarks.report import WITHIN_NOISE, Progress, Table
from benchmarks.simulated import SimulatedNode, connected, simulate, while_alive
from redelastic.redis.connection import ATTEMPT_TIMEOUT
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.settings import Settings

INTERVAL: Final = 2.0  # between heartbeats, in seconds: the default
LEASE: Final = 3  # heartbeats: the default
STANDS_FOR: Final = 3  # heartbeats
ROLL_CALLS: Final = 5
BEFORE: Final = 0.5  # seconds: counting begins so long before a lease runs out, since thousands of nodes may be late
# Of groups whose nodes cannot be sure to answer within the default 0.5 s (and 0.2 ms for each), since one process
# answers for all.
MANY: Final = 4096
ROLL_CALL_TIMEOUT: Final = 5.0
# Nodes -> how many groups, and the interval. 10,000 nodes that beat every 2 s are too many for the single process that
# simulates them: it computes more than Redis does.
SIZES: Final = {64: (5, INTERVAL), 256: (5, INTERVAL), 1024: (4, INTERVAL), 4096: (3, INTERVAL), 10_000: (2, 5.0)}
QUICK: Final = {16: (2, INTERVAL), 64: (2, INTERVAL)}
LIMIT: Final = 100  # seconds for one size

Found = dict[str, list[float]]  # what each group of one size took


# -- what is measured


class Group:
    """The nodes of one run, and what Redis does for them."""

    def __init__(self, client: redis.Redis, nodes: list[SimulatedNode], interval: float) -> None:
        self.client, self.interval = client, interval
        self.watch = Watch(client)
        self.tasks = {node: asyncio.create_task(node.live()) for node in nodes}

    def stop(self, node: SimulatedNode) -> SimulatedNode:
        """Silence a node for good."""
        self.tasks.pop(node).cancel()
        return node

    async def formed(self, epoch: int) -> float:
        """Wait until all live nodes are in a round; returns when the last one entered it."""
        await while_alive(self.tasks.values(), lambda: any(node.epoch < epoch for node in self.tasks))
        return max(node.entered_at for node in self.tasks)

    @contextlib.contextmanager
    def counted(self) -> Iterator[dict[str, float]]:
        """Count what is done per node that is alive at the end."""
        spent: dict[str, float] = {}
        self.watch.longest()
        self.client.config_resetstat()
        began, computed = time.monotonic(), self.watch.cpu()
        yield spent
        spent["cpu"], spent["seconds"] = self.watch.cpu() - computed, time.monotonic() - began
        said = self.client.info("commandstats")
        scripts, reads = (said.get(f"cmdstat_{name}", {"calls": 0, "usec": 0}) for name in ("evalsha", "xread"))
        spent["called"], spent["commands"] = scripts["calls"], scripts["calls"] + reads["calls"]
        spent["scripts"], spent["per script"] = scripts["usec"] / 1e6, scripts["usec"] / 1e6 / max(1, scripts["calls"])
        spent["telling"] = reads["usec"] / 1e6
        spent["longest"] = self.watch.longest()


@contextlib.asynccontextmanager
async def group_of(client: redis.Redis, n: int, interval: float) -> AsyncIterator[Group]:
    """A group that starts to form, and ends with the block."""
    keys = RunKeys(f"scale-{uuid.uuid4().hex[:12]}")
    common: dict[str, Any] = {"run_id": keys.run_id, "min_nodes": 1, "max_nodes": n, "keep_alive_interval": interval}
    if n >= MANY:
        common["roll_call_timeout"] = ROLL_CALL_TIMEOUT
    nodes = await connected(
        n, client.get_connection_kwargs(), keys, lambda number: Settings(**common, node_name=f"node-{number}")
    )
    group = Group(client, nodes, interval)
    try:
        yield group
    finally:
        tasks = list(group.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for node in nodes:
            node.close()
        client.flushall()
        await while_alive([], lambda: client.info("clients")["connected_clients"] > 1)


async def follow(url: str, n: int, repeat: int, interval: float) -> dict[str, Any]:
    """One group after the other; the last one stands for a while, and loses some of its nodes."""
    found: Found = defaultdict(list)
    with redis.Redis.from_url(url) as client:
        async with group_of(client, min(n, 64), interval) as group:
            await group.formed(1)  # warms up
        for left in reversed(range(repeat)):
            began = time.monotonic()
            async with group_of(client, n, interval) as group:
                await form(group, found)
                await lose_one(group, found)
                if not left:
                    await stand(group, found)
                    await call_roll(group, found)
                    await lose_some(group, found)
            found["seconds"].append(time.monotonic() - began)
    return dict(found)


async def form(group: Group, found: Found) -> None:
    """All join at once."""
    began, n = time.monotonic(), len(group.tasks)
    with group.counted() as spent:
        found["form"].append(await group.formed(1) - began)
    found["form: scripts"].append(spent["scripts"] / n)
    found["form: cpu"].append(spent["cpu"] / n)
    found["form: telling"].append(spent["telling"] / n)
    found["form: longest"].append(spent["longest"] / n)


async def lose_one(group: Group, found: Found) -> None:
    """One leaves; the others hear of it, and join again."""
    leaver = group.stop(next(iter(group.tasks)))
    with group.counted() as spent:
        began = time.monotonic()
        leaver.leave(group.client)
        found["one left"].append(await group.formed(2) - began)
    found["one left: scripts"].append(spent["scripts"] / len(group.tasks))


async def stand(group: Group, found: Found) -> None:
    """The group works, and Redis hears its heartbeats; how much these vary is the noise of what happens beside them."""
    n = len(group.tasks)
    for _ in range(STANDS_FOR):
        computed, until = time.process_time(), time.monotonic() + group.interval
        with group.counted() as spent:
            await while_alive(group.tasks.values(), lambda until=until: time.monotonic() < until)  # type: ignore[misc]
        calls = max(1, spent["called"])
        found["beat: nodes"].append((time.process_time() - computed) / calls)
        found["beat: Redis"].append(spent["cpu"] / calls)
        found["beat: scripts"].append(spent["per script"])
        found["beat: cpu"].append(spent["cpu"] * group.interval / spent["seconds"] / n)
        found["busy"].append(100 * spent["cpu"] / spent["seconds"])
        found["commands"].append(spent["commands"] / spent["seconds"] / n)
    assert all(node.epoch == 2 for node in group.tasks)
    with group.client.pipeline(transaction=False) as asked:
        for key in group.client.scan_iter(count=1000):
            asked.memory_usage(key, samples=0)
        found["keys"].append(sum(asked.execute()) / n)
    found["connection"].append(group.client.memory_stats()["clients.normal"] / n)


def beyond_heartbeats(used: float, heartbeats: float, each: list[float]) -> list[float]:
    """What a loss has cost: nothing is known of it if that is less than heartbeats vary by.

    Args:
        used: seconds for everything.
        heartbeats: how many there were meanwhile.
        each: seconds for one heartbeat, measured several times.
    """
    cost = used - heartbeats * median(each)
    return [cost] if cost > heartbeats * (max(each) - min(each)) else []


async def call_roll(group: Group, found: Found) -> None:
    """A node calls the roll, and all are there: the time until it knows, and who computes for it."""
    for caller in list(group.tasks)[:ROLL_CALLS]:
        with group.counted() as spent:
            began, computed = time.monotonic(), time.process_time()
            caller.call_roll(group.client)
            await while_alive(group.tasks.values(), lambda node=caller: not node.has_verdict, 0.001)  # type: ignore[misc]
            found["roll call"].append(time.monotonic() - began)
            found["roll call: nodes"].append(time.process_time() - computed)
        found["roll call: Redis"].append(spent["cpu"])
        found["roll call: scripts"].append(spent["scripts"])
        found["roll call: telling"].append(spent["telling"])


async def lose_some(group: Group, found: Found) -> None:
    """1 % of the nodes die at once; when their leases have run out, the others hear of it, and then join again."""
    dead = [group.stop(node) for node in list(group.tasks)[: math.ceil(len(group.tasks) / 100)]]
    lease = LEASE * group.interval
    first, last = (choose(node.renewed_at for node in dead) + lease for choose in (min, max))
    for node in group.tasks:  # this process' work for nodes that join would delay the others
        node.may_join.clear()
    await while_alive(group.tasks.values(), lambda: time.monotonic() < first - BEFORE)
    n, computed = len(group.tasks), time.process_time()
    with group.counted() as spent:
        await while_alive(group.tasks.values(), lambda: any(node.broken_at < first for node in group.tasks))
    computed = time.process_time() - computed
    found["1 % died: known"].append(max(node.broken_at for node in group.tasks) - first)
    delays = sorted(node.heard_at - first for node in group.tasks)
    for share in (50, 90, 99):
        found[f"1 % died: {share} % told"].append(delays[math.ceil(n * share / 100) - 1])
    cost = beyond_heartbeats(spent["cpu"], spent["called"], found["beat: Redis"])
    found["1 % died: Redis"] += cost
    found["1 % died: cpu"] += [seconds / n for seconds in cost]
    found["1 % died: nodes"] += beyond_heartbeats(computed, spent["called"], found["beat: nodes"])
    for node in group.tasks:
        node.may_join.set()
    with group.counted() as more:
        found["1 % died: formed"].append(await group.formed(3) - last)
    found["1 % died: scripts"].append((spent["scripts"] + more["scripts"]) / n)


def simulated(url: str, n: int, repeat: int, interval: float) -> dict[str, Any]:
    """As :func:`follow`, in its own process."""
    return simulate(follow, url, n, repeat, interval)


# -- what follows for a job


# What one node costs one Redis: seconds of its single thread, or bytes.
COSTS: Final = {
    "form": "form: cpu",  # to get into a round: two requests, and the wake-up between them
    "beat": "beat: cpu",  # a heartbeat, and the wait for the next one
    "complete": "form: longest",  # the script that completes a round, which nothing interrupts
    "tell": "form: telling",  # to wake it
    "lose": "1 % died: cpu",  # to tell it that another is lost, including the checks for that
    "keys": "keys",
    "connection": "connection",
}
CONNECTIONS: Final = 2  # of each node: one for the keeper's blocking read, everything else shares


def limits(costs: Mapping[str, float]) -> Table:
    """How large one job on one Redis can be before something breaks; the first to break comes first.

    Args:
        costs: by the names of :data:`COSTS`; what is within noise is 0 or left out.
    """
    form, beat, complete, tell, lose, keys, connection = (costs.get(name, 0.0) for name in COSTS)
    bounds = {  # what there is, and what one node takes of it
        "Redis' default `maxclients` of 10,000 (raise it, and `ulimit -n`)": (10_000, CONNECTIONS),
        "a dead node is known everywhere within 100 ms of its lease (I7)": (0.1, lose),
        "completing a round keeps other jobs on this Redis waiting for 100 ms": (0.1, complete + tell),
        f"half a core for heartbeats every {INTERVAL:g} s": (0.5 * INTERVAL, beat),
        f"a whole core for heartbeats every {INTERVAL:g} s": (INTERVAL, beat),
        f"all ask at once, and the last is answered within one attempt ({ATTEMPT_TIMEOUT:g} s)": (
            2 * ATTEMPT_TIMEOUT,
            form,
        ),
        "8 GB of memory": (8e9, keys + CONNECTIONS * connection),
    }
    table = Table("scale-limits", "Where it breaks: nodes of one job on one Redis, computed", "what", unit="")
    nodes = {what: there / cost for what, (there, cost) in bounds.items() if cost}
    for what, number in sorted(nodes.items(), key=lambda bound: bound[1]):
        table.put(what, "nodes", float(f"{number:.2g}"))
    for what in bounds.keys() - nodes.keys():
        table.put(what, "nodes", WITHIN_NOISE)
    return table


# -- the tables

TABLES: Final[dict[str, tuple[str, str, dict[str, str]]]] = {  # title, unit, and columns by what is measured
    "form": ("Time to form a group of simulated nodes", "s", {"form": "all join at once"}),
    "change": (
        "Time to form again: a node has left; the leases of 1 % have run out",
        "s",
        {"one left": "one left: all joined", "1 % died: formed": "1 % died: all joined"},
    ),
    "known": (
        "The leases of 1 % have run out: until all others know",
        "s",
        {
            "1 % died: known": "all have read it",
            "1 % died: 50 % told": "the kernel has it for 50 %",
            "1 % died: 90 % told": "for 90 %",
            "1 % died: 99 % told": "for 99 %",
        },
    ),
    "roll-call": (
        "A roll call that all answer: until the verdict",
        "s",
        {"roll call": "verdict", "roll call: nodes": "CPU time of the process that simulates all"},
    ),
    "roll-call-cost": (
        "A roll call that all answer: Redis' CPU time",
        "s",
        {"roll call: Redis": "all", "roll call: scripts": "of that, in scripts", "roll call: telling": "in XREAD"},
    ),
    "server": (
        "Redis' time for each node, in scripts, by its own statistics",
        "s",
        {
            "form: scripts": "to form",
            "one left: scripts": "one left",
            "1 % died: scripts": "1 % died",
            "beat: scripts": "one heartbeat",
        },
    ),
    "lost-cost": (
        "The leases of 1 % have run out: CPU time until all know, beyond that of heartbeats",
        "s",
        {"1 % died: Redis": "Redis", "1 % died: nodes": "the process that simulates all"},
    ),
    "busy": ("Redis busy with a group that works: of one core", "%", {"busy": "heartbeats every {} s"}),
    "commands": ("Commands that each node of it sends", "/s", {"commands": "heartbeats every {} s"}),
    "memory": ("Memory for each node of it", "B", {"keys": "its keys", "connection": "a connection"}),
}
TARGETS: Final[dict[str, dict[int, float]]] = {  # by the number of nodes
    "form": {10_000: 5.0},
    "known": {10_000: 0.4},
    "roll-call": {10_000: 1.0},
    "roll-call-cost": {1024: 0.06},
    "busy": {1024: 5.0},
    "commands": {1024: 2.0},
}


def measured(sizes: dict[int, tuple[int, float]], progress: Progress) -> Iterator[tuple[int, float, Found | str]]:
    """Each size on a server of its own: the results, or why there are none."""
    raise_limit_of_files()
    for n, (repeat, interval) in sizes.items():
        progress(f"{n:,} nodes")
        try:
            with RedisServer() as server:
                yield n, interval, run_alone(simulated, (server.url, n, repeat, interval), LIMIT)
        except (TimeLimitError, RuntimeError) as e:
            yield n, interval, str(e)


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    tables = {name: Table(f"scale-{name}", title, "nodes", unit) for name, (title, unit, _) in TABLES.items()}
    targets: dict[str, dict[int, float]] = {**TARGETS}
    largest: Found = {}
    for n, interval, found in measured(QUICK if quick else SIZES, progress):
        for name, (_, _, columns) in TABLES.items():
            for figure, column in columns.items():
                values = found if isinstance(found, str) else found[figure]
                tables[name].put(n, column.format(f"{interval:g}"), values or WITHIN_NOISE)
        if not isinstance(found, str):
            largest = found
            if n == 64:
                targets["server"] = {4096: 2 * median(found["form: scripts"])}
    for name, table in tables.items():
        table.targets = {str(n): most for n, most in targets.get(name, {}).items() if str(n) in table.cells}
    yield from tables.values()
    if largest:
        yield limits({name: median(largest[figure]) for name, figure in COSTS.items() if largest[figure]})


if __name__ == "__main__":
    sys.exit(report.main(run, "scale", __doc__ or ""))
