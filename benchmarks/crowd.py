"""What does it cost Redis when all nodes of a large job do the same at once: join, start, hang, drain?

Each node is what Redis sees of an agent, without threads and workers: its own Membership and Drains, on one connection.
The contender reports each event separately, even per hung worker, and has each node answer each drain: as redelastic
did before 2026-11-24. Its calls are sent in pipelines, so that they take no longer than Redis needs.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeVar

import redis

from benchmarks import report
from benchmarks.harness import run_alone
from benchmarks.report import Progress, Table
from redelastic.agent.workers.drains import Drains
from redelastic.redis import scripts
from redelastic.redis.connection import Connection, Timeout, text
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.membership import DrainedError, Membership
from redelastic.rendezvous.settings import Settings
from redelastic.run.control import RunControl
from redelastic.run.records import MAX_DETAIL
from redelastic.store import RedisStore

T = TypeVar("T")
BEFORE: Final = "one by one"
WORKERS: Final = 8  # of each node
TIMEOUT: Final = 600.0  # of drains, in seconds: no node gives up
PIPELINE: Final = 10_000  # calls per pipeline
LIMIT: Final = 600.0  # seconds for one contender
ADD_EVENT: Final = """
redis.call('XADD', KEYS[1], 'MAXLEN', '~', 10000, '*', 'event', ARGV[1], 'epoch', 1, 'size', ARGV[2], 'node', ARGV[3],
  'reason', ARGV[4], unpack(ARGV, 5))
"""
WHAT: Final = ("all join", "all start", "all hang", "all drain")

Costs = dict[str, dict[str, float]]  # by action and figure


class Counted(Connection):
    """A connection that counts its calls."""

    calls = 0

    def call(self, operation: Callable[[Any], T], timeout: Timeout = None) -> T:
        """See Connection."""
        self.calls += 1
        return super().call(operation, timeout)


class Saved:
    """Workers that have saved as soon as they are asked."""

    def ask_to_save(self) -> None:
        """Do nothing."""

    def have_saved(self) -> bool:
        """They always have."""
        return True


class Meter:
    """Measures what a server was asked and what it keeps as a result."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self._client, self._keys = client, keys
        self._cpu = self.cpu()

    def cpu(self) -> float:
        """Seconds of CPU that the server has used."""
        info = self._client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    def figures(self, calls: int) -> dict[str, float]:
        """The figures, for this number of calls."""
        length: Any = self._client.xlen(self._keys.events)
        return {
            "calls": calls,
            "computing": self.cpu() - self._cpu,
            "events": length,
            "bytes": self._client.memory_usage(self._keys.events, samples=0) or 0,
        }


def stack_of(node: int, worker: int) -> str:
    """Stacks of a hung worker, of the maximum length."""
    return f"Thread of worker {worker} of node {node}\n".ljust(MAX_DETAIL, "s")


# -- redelastic


def with_redelastic(url: str, n: int) -> Costs:
    """What redelastic sends."""
    logging.disable(logging.WARNING)  # each node would report that others drain
    found: Costs = {}
    with redis.Redis.from_url(url) as client:
        for what in WHAT:
            connection = Counted(client)
            keys = RunKeys(f"crowd-{uuid.uuid4().hex[:12]}")
            control = RunControl(connection, keys)
            meter = Meter(client, keys)
            nodes = [node_of(connection, keys, n, i) for i in range(n)]
            enter(nodes)
            if what != "all join":
                client.delete(keys.events)
                connection.calls, meter = 0, Meter(client, keys)
            match what:
                case "all start":
                    for rank, node in enumerate(nodes):
                        control.note("started", node.node, f"rank {rank} of {n}")
                case "all hang":
                    for i, node in enumerate(nodes):
                        control.note(
                            "hung", node.node, f"worker 0 (rank {WORKERS * i}) made no progress", stack_of(i, 0)
                        )
                case "all drain":
                    drain(nodes, connection, control, keys)
            told(nodes, connection)
            found[what] = meter.figures(connection.calls)
    return found


def node_of(connection: Connection, keys: RunKeys, n: int, number: int) -> Membership:
    """A node without a thread."""
    settings = Settings(run_id=keys.run_id, min_nodes=n, max_nodes=n, node_name=f"gpu-{number:04d}", ttl=120)
    node = Membership(connection, keys, settings, "127.0.0.1")
    node.heartbeat._keeper = threading.current_thread()  # noqa: SLF001  # it needs none
    return node


def enter(nodes: list[Membership]) -> None:
    """All join; those not answered at once ask again, as if woken."""
    waiting = list(nodes)
    while waiting:
        still = []
        for node in waiting:
            outcome, *told = node._ask_to_join(29500, 0.0)  # noqa: SLF001
            if text(outcome) == "complete":
                node._enter(node._round_from(*told))  # noqa: SLF001
            else:
                still.append(node)
        waiting = still


def told(nodes: list[Membership], connection: Counted) -> None:
    """Wait until the next heartbeat has reported what was collected; it comes anyway, and is not counted."""
    calls = connection.calls
    time.sleep(1.1)
    nodes[0].heartbeat.beat()
    connection.calls = calls


def drain(nodes: list[Membership], connection: Counted, control: RunControl, keys: RunKeys) -> None:
    """All get SIGTERM, have their workers save, and leave."""
    agents: list[tuple[Membership, Drains]] = []
    for rank, node in enumerate(nodes):
        store = RedisStore(connection, keys.run_id, epoch=1, timeout=60)
        note = lambda event, reason, node=node.node: control.note(event, node, reason)  # noqa: E731
        at_once: Any = Errands()
        workers: Any = Saved()
        of_round: dict[str, Any] = {"store": store, "rank": rank, "size": len(nodes)}
        agents.append((node, Drains(node, workers, **of_round, courier=at_once, note=note)))
    for node in nodes:
        node.drain("SIGTERM", TIMEOUT)
    while agents:
        still = []
        for node, drains in agents:
            entries = connection.read({keys.wake.encode(): "0"}, 0.001)[keys.wake.encode()]
            node.view.take_in_wake_ups([entry for entry in entries if entry[1]["event"] in ("drain", "broken")])
            try:
                drains.advance()
                still.append((node, drains))
            except DrainedError as e:
                node.leave(f"drained: {e.reason}")
        agents = still


class Errands:
    """A courier that runs its errands at once."""

    def send(self, errand: Callable[[], object]) -> None:
        """Run it."""
        errand()


# -- one by one


def one_by_one(url: str, n: int) -> Costs:
    """What separate events, and an answer to each drain, would send."""
    found: Costs = {}
    with redis.Redis.from_url(url) as client:
        for what in WHAT:
            keys = RunKeys(f"crowd-{uuid.uuid4().hex[:12]}")
            meter = Meter(client, keys)
            calls = send(
                client, {"all join": joins, "all start": starts, "all hang": hangs, "all drain": drains}[what](keys, n)
            )
            found[what] = meter.figures(calls)
            if what == "all join":
                del found[what]["computing"]  # mostly the join itself
            client.delete(keys.events)
    return found


Call = tuple[str, list[str], list[Any]]  # a script, its keys and arguments


def send(client: redis.Redis, calls: Iterable[Call]) -> int:
    """Send scripts in pipelines; returns how many there were."""
    digests: dict[str, str] = {}
    count, pipeline = 0, client.pipeline(transaction=False)
    for script, names, args in calls:
        if script not in digests:
            digests[script] = str(client.script_load(script))
        pipeline.evalsha(digests[script], len(names), *names, *args)
        count += 1
        if len(pipeline) >= PIPELINE:
            pipeline.execute()
    pipeline.execute()
    return count


def event(keys: RunKeys, n: int, kind: str, node: int, reason: str, *more: str) -> Call:
    """One event."""
    name = f"gpu-{node:04d}-{10_000 + node}-{node:012x}"
    return ADD_EVENT, [keys.events], [kind, n, name, reason, *more]


def joins(keys: RunKeys, n: int) -> Iterator[Call]:
    """Each join is asked twice; the round is an event too."""
    for node in range(n):
        yield event(keys, n, "joined", node, "is new")
    yield from (("return", [], []) for _ in range(n - 1))
    yield event(keys, n, "completed", 0, "max_nodes joined")


def starts(keys: RunKeys, n: int) -> Iterator[Call]:
    """One event per node."""
    return (event(keys, n, "started", node, f"rank {node} of {n}") for node in range(n))


def hangs(keys: RunKeys, n: int) -> Iterator[Call]:
    """One event per worker, with its stacks."""
    for node in range(n):
        for worker in range(WORKERS):
            reason = f"worker {worker} (rank {WORKERS * node + worker}) made no progress"
            yield event(keys, n, "hung", node, reason, "detail", stack_of(node, worker))


def drains(keys: RunKeys, n: int) -> Iterator[Call]:
    """Each node asks to leave, hears of all, counts and reports itself for each, asks how many did, and leaves."""
    store = keys.store(1)
    fixed = keys.of_store(store)
    add = scripts.STORE_ADD.text
    for node in range(n):
        yield event(keys, n, "drain", node, "SIGTERM")
    request = 0
    for node in range(n):
        yield "return", [], []  # it reads its wake-ups
        for other in range(n):
            request += 1
            yield event(keys, n, "saved", node, f"for gpu-{other:04d}, which drains")
            key = f"redelastic/saved/{other}"
            yield add, [*fixed, f"{store.base}:wake:{key}"], ["", 120_000, "a sender", request, key, 1]
    for node in range(n):
        request += 1
        key = f"redelastic/saved/{node}"
        yield add, [*fixed, f"{store.base}:wake:{key}"], ["", 120_000, "a sender", request, key, 0]
        yield event(keys, n, "left", node, "drained: SIGTERM")


# -- the question

FIGURES: Final = {
    "calls": ("Calls to Redis", ""),
    "computing": ("What Redis computes", "s"),
    "events": ("Entries in the stream of events", ""),
    "bytes": ("Memory of the stream of events", "B"),
}


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    n = 50 if quick else 1000
    tables = {
        name: Table(f"crowd-{name}", f"{title}, {n:,} nodes", "what", unit) for name, (title, unit) in FIGURES.items()
    }
    for column, side in (("redelastic", with_redelastic), (BEFORE, one_by_one)):
        progress(column)
        with RedisServer() as server:
            costs: Costs = run_alone(side, (server.url, n), LIMIT)
        for what, figures in costs.items():
            for name, figure in figures.items():
                tables[name].put(what, column, figure)
    yield from tables.values()


if __name__ == "__main__":
    sys.exit(report.main(run, "crowd", __doc__ or ""))
