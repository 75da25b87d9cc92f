"""How many nodes does one Redis carry? Simulated ones, up to 10,000 in a group; and a model of what lies beyond.

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
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import redis

from benchmarks import report
from benchmarks.harness import TimeLimitError, Watch, raise_limit_of_files, run_alone
from benchmarks.report import Progress, Table, shown
from benchmarks.simulated import Node, Sent, connected, simulate, while_alive
from redelastic.redis.connection import ATTEMPT_TIMEOUT
from redelastic.redis.keys import RunKeys
from redelastic.redis.scripts import BEAT, Script
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.settings import Settings

INTERVAL: Final = 2.0  # between heartbeats, in seconds: the default
LEASE: Final = 3  # heartbeats: the default
STANDS_FOR: Final = 3  # heartbeats
ROLL_CALLS: Final = 5
REPEAT_PART, CALLS_OF_PART = 5, 200
BEFORE: Final = 0.5  # seconds: counting begins so long before a lease runs out, since thousands of nodes may be late
# Of groups whose nodes cannot be sure to answer within the default 0.5 s (and 0.2 ms for each), since one process
# answers for all.
MANY: Final = 4096
ROLL_CALL_TIMEOUT: Final = 5.0
# Nodes -> how many groups, and the interval. 10,000 nodes that beat every 2 s are too many for the single process that
# simulates them: it computes more than Redis does.
SIZES: Final = {64: (5, INTERVAL), 256: (5, INTERVAL), 1024: (4, INTERVAL), 4096: (3, INTERVAL), 10_000: (2, 5.0)}
QUICK: Final = {16: (2, 0.5), 64: (2, 0.5)}
LIMIT: Final = 100  # seconds for one size

Found = dict[str, list[float]]  # what each group of one size took


# -- what is measured


class Group:
    """The nodes of one run, and what Redis does for them."""

    def __init__(self, client: redis.Redis, nodes: list[Node], interval: float) -> None:
        self.client, self.interval = client, interval
        self.watch = Watch(client)
        self.tasks = {node: asyncio.create_task(node.live()) for node in nodes}

    def stop(self, node: Node) -> Node:
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
                    take_apart(group, found)
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
    """The group works, and Redis hears its heartbeats."""
    n, until = len(group.tasks), time.monotonic() + STANDS_FOR * group.interval
    computed = time.process_time()
    with group.counted() as spent:
        await while_alive(group.tasks.values(), lambda: time.monotonic() < until)
    found["beat: nodes"].append((time.process_time() - computed) / spent["called"])
    assert all(node.epoch == 2 for node in group.tasks)
    with group.client.pipeline(transaction=False) as asked:
        for key in group.client.scan_iter(count=1000):
            asked.memory_usage(key, samples=0)
        found["keys"].append(sum(asked.execute()) / n)
    found["connection"].append(group.client.memory_stats()["clients.normal"] / n)
    found["beat: scripts"].append(spent["per script"])
    found["beat: cpu"].append(spent["cpu"] * group.interval / spent["seconds"] / n)
    found["busy"].append(100 * spent["cpu"] / spent["seconds"])
    found["commands"].append(spent["commands"] / spent["seconds"] / n)


def take_apart(group: Group, found: Found) -> None:
    """What a heartbeat's script takes when it ends after one file or another."""
    try:
        next(iter(group.tasks)).membership.heartbeat.beat()
    except Sent as sent:
        _, _, *request = sent.args[0]
    texts = [Script(*BEAT.parts[:i]).text + "return 1" for i in range(1, len(BEAT.parts))]
    digests = [group.client.script_load(text) for text in ("return 1", *texts, BEAT.text)]
    for _ in range(REPEAT_PART):
        for i, digest in enumerate(digests):
            with group.counted() as spent:
                for _ in range(CALLS_OF_PART):
                    group.client.execute_command("EVALSHA", digest, *request)
            found[f"beat: {i}"].append(spent["per script"])


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
    told = sorted(node.told_at - first for node in group.tasks)
    for share in (50, 90, 99):
        found[f"1 % died: {share} % told"].append(told[math.ceil(n * share / 100) - 1])
    cpu, computed = (  # without heartbeats, which go on meanwhile
        max(0.0, used - spent["called"] * found[f"beat: {whose}"][-1])
        for used, whose in ((spent["cpu"], "cpu"), (computed, "nodes"))
    )
    found["1 % died: Redis"].append(cpu)
    found["1 % died: cpu"].append(cpu / n)
    found["1 % died: nodes"].append(computed)
    for node in group.tasks:
        node.may_join.set()
    with group.counted() as more:
        found["1 % died: formed"].append(await group.formed(3) - last)
    found["1 % died: scripts"].append((spent["scripts"] + more["scripts"]) / n)


def simulated(url: str, n: int, repeat: int, interval: float) -> dict[str, Any]:
    """As :func:`follow`, in its own process."""
    return simulate(follow, url, n, repeat, interval)


# -- a model of what is not measured


@dataclass(frozen=True)
class Costs:
    """What one node costs one Redis, as measured: seconds of its single thread, or bytes.

    Attributes:
        form: for a node to get into a round: two requests, and the wake-up between them.
        beat: for a heartbeat, and for waiting until the next one.
        complete: for the script that completes a round, which nothing interrupts.
        tell: to wake a node.
        lose: to tell a node that another is lost, including the checks for that.
        keys: memory of its keys.
        connection: memory of one connection.
        connections: how many: one for the keeper's blocking read, everything else shares.
    """

    form: float
    beat: float
    complete: float
    tell: float
    lose: float
    keys: float
    connection: float
    connections: int = 2

    @property
    def memory(self) -> float:
        """Memory per node, in bytes."""
        return self.keys + self.connections * self.connection

    @classmethod
    def of(cls, found: Found) -> Costs:
        """From the measurements of one size's groups."""
        names = ("form: cpu", "beat: cpu", "form: longest", "form: telling", "1 % died: cpu", "keys", "connection")
        form, beat, complete, tell, lose, keys, connection = (median(found[name]) for name in names)
        return cls(form, beat, complete, tell, lose, keys, connection)


def limits(costs: Costs) -> Table:
    """How large one job on one Redis can be before something breaks; the first to break comes first."""
    table = Table("scale-limits", "Where it breaks: nodes of one job on one Redis, computed", "what", unit="")
    bounds = {  # what there is, and what one node takes of it
        "Redis' default `maxclients` of 10,000 (raise it, and `ulimit -n`)": (10_000, costs.connections),
        "a dead node is known everywhere within 100 ms of its lease (I7)": (0.1, costs.lose),
        "completing a round keeps other jobs on this Redis waiting for 100 ms": (0.1, costs.complete + costs.tell),
        f"half a core for heartbeats every {INTERVAL:g} s": (0.5 * INTERVAL, costs.beat),
        f"a whole core for heartbeats every {INTERVAL:g} s": (INTERVAL, costs.beat),
        f"all ask at once, and the last is answered within one attempt ({ATTEMPT_TIMEOUT:g} s)": (
            2 * ATTEMPT_TIMEOUT,
            costs.form,
        ),
        "8 GB of memory": (8e9, costs.memory),
    }
    nodes = {what: there / cost for what, (there, cost) in bounds.items() if cost}
    for what, number in sorted(nodes.items(), key=lambda bound: bound[1]):
        table.put(what, "nodes", float(f"{number:.2g}"))
    for what in bounds.keys() - nodes.keys():  # in a short run, a loss may cost less than heartbeats vary by
        table.put(what, "nodes", "too cheap to measure")
    return table


def model(costs: Costs) -> Table:
    """What larger jobs, and many of them, would ask of one Redis and of a Cluster."""
    table = Table(
        "scale-model", "Beyond what was measured, computed: what the fullest master has to do", "jobs", unit=""
    )
    for jobs, nodes, masters in (
        *((1, nodes, 1) for nodes in (1_000, 10_000, 30_000, 100_000)),
        *((1_000, nodes, masters) for nodes, masters in ((8, 1), (100, 1), (100, 6), (100, 24))),
    ):
        mean = jobs / masters
        fullest = mean if masters == 1 else mean + 3 * math.sqrt(mean)  # jobs land where their ids hash
        here = fullest * nodes
        busy = here * costs.beat / INTERVAL
        where = "" if masters == 1 else f", {masters} masters"
        row = f"{jobs:,} of {nodes:,} nodes{where}"
        table.put(row, f"busy, heartbeats every {INTERVAL:g} s", _share(busy))
        table.put(row, "interval for half a core", shown(max(INTERVAL, 2 * here * costs.beat), "s"))
        table.put(row, "one forms", shown(nodes * costs.form, "s"))
        table.put(row, "all form at once", shown(here * costs.form, "s"))
        table.put(row, "completion blocks", shown(nodes * (costs.complete + costs.tell), "s"))
        table.put(row, "all know of the dead", shown(nodes * costs.lose, "s"))
        table.put(row, "memory", shown(here * costs.memory, "B"))
        table.put(row, "connections", f"{here * costs.connections:,.0f}")
    return table


def _share(busy: float) -> str:
    return f"{100 * busy:.3g} %" + (" (breaks)" if busy > 1 else "")


# -- the tables


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
    tables = [
        Table("scale-form", "Time to form a group of simulated nodes", "nodes", log=True),
        Table("scale-change", "Time to form again: a node has left; the leases of 1 % have run out", "nodes", log=True),
        Table("scale-known", "The leases of 1 % have run out: until all others know", "nodes", log=True),
        Table("scale-roll-call", "A roll call that all answer: until the verdict", "nodes", log=True),
        Table("scale-roll-call-cost", "A roll call that all answer: Redis' CPU time", "nodes", log=True),
        Table("scale-server", "Redis' time for each node, in scripts, by its own statistics", "nodes", log=True),
        Table("scale-beat", "A heartbeat's script, if it ended after one of its files: Redis' time", "nodes"),
        Table(
            "scale-lost-cost",
            "The leases of 1 % have run out: CPU time until all know, beyond that of heartbeats",
            "nodes",
            log=True,
        ),
        Table("scale-busy", "Redis busy with a group that works: of one core", "nodes", unit="%", log=True),
        Table("scale-commands", "Commands that each node of it sends", "nodes", unit="/s"),
        Table("scale-memory", "Memory for each node of it", "nodes", unit="B"),
    ]
    columns = {
        "scale-form": {"form": "all join at once"},
        "scale-change": {"one left": "one left: all joined", "1 % died: formed": "1 % died: all joined"},
        "scale-known": {
            "1 % died: known": "all have read it",
            "1 % died: 50 % told": "the kernel has it for 50 %",
            "1 % died: 90 % told": "for 90 %",
            "1 % died: 99 % told": "for 99 %",
        },
        "scale-roll-call": {"roll call": "verdict", "roll call: nodes": "CPU time of the process that simulates all"},
        "scale-roll-call-cost": {
            "roll call: Redis": "all",
            "roll call: scripts": "of that, in scripts",
            "roll call: telling": "in XREAD",
        },
        "scale-server": {
            "form: scripts": "to form",
            "one left: scripts": "one left",
            "1 % died: scripts": "1 % died",
            "beat: scripts": "one heartbeat",
        },
        "scale-beat": {
            "beat: 0": "an empty script",
            "beat: 1": "`run.lua`, which reads the run",
            "beat: 4": "`roll`, `complete`, `restore`",
            "beat: 5": "`beat.lua`: all of it",
        },
        "scale-lost-cost": {"1 % died: Redis": "Redis", "1 % died: nodes": "the process that simulates all"},
        "scale-busy": {"busy": "heartbeats every {} s"},
        "scale-commands": {"commands": "heartbeats every {} s"},
        "scale-memory": {"keys": "its keys", "connection": "a connection"},
    }
    form, _, known, verdict, cost, server, _, _, busy, commands, _ = tables
    largest: Found = {}
    for n, interval, found in measured(QUICK if quick else SIZES, progress):
        for table in tables:
            for name, column in columns[table.name].items():
                table.put(n, column.format(f"{interval:g}"), found if isinstance(found, str) else found[name])
        if not isinstance(found, str):
            largest = found
            if n == 64:
                server.targets["4096"] = 2 * median(found["form: scripts"])
    known.targets, verdict.targets, cost.targets = {"10000": 0.4}, {"10000": 1.0}, {"1024": 0.06}
    form.targets, busy.targets, commands.targets = {"10000": 5.0}, {"1024": 5.0}, {"1024": 2.0}
    for table in tables:
        table.targets = {row: target for row, target in table.targets.items() if row in table.cells}
    yield from tables
    if largest:
        yield from (limits(Costs.of(largest)), model(Costs.of(largest)))


if __name__ == "__main__":
    sys.exit(report.main(run, "scale", __doc__ or ""))
