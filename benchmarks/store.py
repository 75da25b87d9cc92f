"""How long do a store's operations take, and a process group on it? RedisStore beside torch's own stores.

TCPStore sends `set`, `multi_set`, `append` and `queue_push` without waiting for a reply, so each of them is followed by
a `check` there: its reply shows that the value has been written.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import product
from typing import Any, Final

from benchmarks import report
from benchmarks.harness import CONTEXT, TimeLimitError, run_alone, run_nodes
from benchmarks.report import Progress, Spread, Table
from benchmarks.store_contenders import (
    CONTENDERS,
    ETCD,
    REDIS_PY,
    TCP,
    Servers,
    apart,
    opened,
    refusal,
    serving,
)
from benchmarks.store_groups import group_tables
from benchmarks.store_wake import wake_up_table

OPERATIONS: Final = (
    "set",
    "get",
    "add",
    "check",
    "wait",
    "compare_set",
    "append",
    "delete_key",
    "multi_set(100)",
    "multi_get(100)",
    "queue_push",
    "queue_pop",
    "num_keys",
)
# Maximum multiples of TCPStore's time. All must also take at most a third of EtcdStore's time.
TARGETS: Final = {
    "set": 1.7,
    "append": 1.7,
    "multi_set(100)": 1.7,
    "add": 1.7,
    "compare_set": 1.7,
    "check": 1.4,
    "wait": 1.4,
    "multi_get(100)": 0.9,
    "get": 0.7,
}
GET_TARGET: Final = 0.7  # maximum multiple of redis-py's time, where both run as the kernel places them
SMALL: Final = b"0123456789"
SIZES: Final = (10, 1_000, 10_000, 100_000, 1_000_000)
CLIENTS: Final = (1, 8, 64)
TURN: Final = 0.04  # seconds after which a contender's turn ends, even after few operations
LARGE_TURN: Final = 64_000_000  # bytes that a turn may write

Operation = Callable[[int], object]


def prepared(name: str, store: Any, value: bytes, n: int) -> Operation:
    """Prepare a store for ``n`` runs of an operation; returns the operation."""
    hundred = [f"many-{i}" for i in range(100)]
    fresh = uuid.uuid4().hex
    operations: dict[str, Operation] = {
        "set": lambda _: store.set("k", value),
        "get": lambda _: store.get("k"),
        "add": lambda _: store.add("n", 1),
        "check": lambda _: store.check(["k"]),
        "wait": lambda _: store.wait(["k"]),
        "compare_set": lambda i: store.compare_set("swapped", "ab"[i % 2], "ba"[i % 2]),
        "append": lambda _: store.append(fresh, value),
        "delete_key": lambda i: store.delete_key(f"{fresh}-{i}"),
        "multi_set(100)": lambda _: store.multi_set(hundred, [value] * 100),
        "multi_get(100)": lambda _: store.multi_get(hundred),
        "queue_push": lambda _: store.queue_push(fresh, value),
        "queue_pop": lambda _: store.queue_pop(fresh),
        "num_keys": lambda _: store.num_keys(),
    }
    store.set("k", value)
    if name == "compare_set":
        store.set("swapped", "a")
    elif name == "multi_get(100)":
        store.multi_set(hundred, [value] * 100)
    elif name == "delete_key":
        store.delete_key(fresh)  # fails at once if there is none
        for i in range(n):
            store.set(f"{fresh}-{i}", "v")
    elif name == "queue_pop":
        for _ in range(n):
            store.queue_push(fresh, value)
    return operations[name]


def take_turns(
    servers: Servers, cases: list[tuple[str, int]], repeat: int, seconds: float, *, pinned: bool
) -> dict[str, dict[str, str | list[float]]]:
    """Time operations on values of several sizes in this process, contenders in turn, several times over.

    Args:
        servers: the contenders' servers.
        cases: operations and sizes.
        repeat: how often.
        seconds: after which a turn ends.
        pinned: whether this process stays on the clients' core or runs where the kernel places it.

    Returns:
        For each "operation size" and contender the median of each turn, in seconds, or why there is none. The first
        turn is not counted.
    """
    if pinned:
        os.sched_setaffinity(0, {servers.clients_core})
    found: dict[str, dict[str, str | list[float]]] = {
        f"{name} {size}": {c: servers.missing(c) or [] for c in CONTENDERS} for name, size in cases
    }
    for turn in range(repeat + 1):  # spread out, so that a slow moment of the machine affects one turn, not a whole row
        for (name, size), contender in product(cases, CONTENDERS):
            row = found[f"{name} {size}"]
            turns = row[contender]
            if isinstance(turns, str):
                continue
            try:
                with opened(contender, servers, f"{name}-{size}") as store:
                    times = one_turn(name, store, size, seconds)
            except Exception as e:  # noqa: BLE001  # each has its own errors
                row[contender] = refusal(contender, e)
                continue
            if turn:
                turns.append(statistics.median(times))
    return found


def one_turn(name: str, store: Any, size: int, seconds: float) -> list[float]:
    """How long each operation took, in seconds."""
    n = max(3, min(500, LARGE_TURN // size))
    warm_up = n // 10
    operation = prepared(name, store, SMALL * (size // len(SMALL)), n + warm_up)
    times: list[float] = []
    ends = time.perf_counter() + seconds
    for i in range(n + warm_up):
        began = time.perf_counter()
        if i >= 3 and began > ends:
            break
        operation(i)
        times.append(time.perf_counter() - began)
    return times[min(warm_up, len(times) // 10) :]


def latencies(servers: Servers, repeat: int, sizes: tuple[int, ...], seconds: float) -> Iterator[Table]:
    """One client: each operation, and set and get by value size."""
    cases = [(name, 10) for name in OPERATIONS]
    cases += [(name, size) for name in ("set", "get") for size in sizes if size != 10]
    with apart(servers):
        found = run_alone(partial(take_turns, pinned=True), (servers, cases, repeat, seconds), 300)
    as_placed = run_alone(partial(take_turns, pinned=False), (servers, cases[: len(OPERATIONS)], repeat, seconds), 300)

    def enter(table: Table, row: str, figures: dict[str, float | str]) -> None:
        for contender, turns in figures.items():
            table.put(row, contender, turns)

    typical = Table("store-latency", "One client's operations, values of 10 B: median", "operation")
    placed = Table("store-latency-placed", "The same as the kernel places client and servers: median", "operation")
    typical.yardstick = placed.yardstick = REDIS_PY
    for name in OPERATIONS:
        enter(typical, name, found[f"{name} 10"])
        enter(placed, name, as_placed[f"{name} 10"])
        row = typical.cells[name]
        factors = {ETCD: 1 / 3} | ({TCP: TARGETS[name]} if name in TARGETS else {})
        if known := [most * cell.median for other, most in factors.items() if isinstance(cell := row[other], Spread)]:
            typical.targets[name] = min(known)
    if isinstance(theirs := placed.cells["get"][REDIS_PY], Spread):
        placed.targets["get"] = GET_TARGET * theirs.median
    yield from (typical, placed)
    for name in ("set", "get"):
        table = Table(
            f"store-{name}-sizes", f"One client's {name} by the size of the value", "bytes", yardstick=REDIS_PY
        )
        for size in sizes:
            enter(table, f"{size:,}", found[f"{name} {size}"])
        yield table


def prepare_client(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """One of several clients: repeats the named operation until its time is up, and records how often it did."""
    stack = ExitStack()
    if options["alone"]:
        os.sched_setaffinity(0, {options["servers"].clients_core})
    store: Any = stack.enter_context(opened(options["contender"], options["servers"], options["name"]))
    name, done = options["operation"], options["done"]
    key = f"own-{number}" if name == "set" else "shared"
    if name == "get" and number == 0:
        store.set(key, SMALL)
    act: dict[str, Callable[[], object]] = {
        "set": lambda: store.set(key, SMALL),
        "get": lambda: store.get(key),
        "add": lambda: store.add(key, 1),
    }

    def work() -> None:
        ends = time.monotonic() + options["seconds"]
        try:
            while time.monotonic() < ends:
                act[name]()
                done[number] += 1
        except Exception as e:  # noqa: BLE001
            done[number] = -1
            refusal(options["contender"], e)

    return work, stack.close


def throughput(
    servers: Servers, sizes: tuple[int, ...], repeat: int, seconds: float, progress: Progress
) -> Iterator[Table]:
    """Operations per second of all clients, a process each; a single one is kept on a core apart from the servers."""
    operations = {"set": "each of a key of its own", "get": "of one key", "add": "to one key"}
    tables = {
        name: Table(
            f"store-throughput-{name}", f"{name} a second, {which}, by clients", "clients", "/s", yardstick=REDIS_PY
        )
        for name, which in operations.items()
    }
    for clients in sizes:
        progress(f"throughput of {clients} clients")
        rounds = [
            {
                "operation": name,
                "contender": contender,
                "servers": servers,
                "name": f"{name}-{clients}-{turn}",
                "seconds": seconds,
                "done": CONTEXT.Array("q", clients, lock=False),
                "turn": turn,
                "alone": clients == 1,
            }
            for turn in range(repeat + 1)
            for name in operations
            for contender in CONTENDERS
            if not servers.missing(contender)
        ]
        try:
            with apart(servers) if clients == 1 else nullcontext():
                timings = run_nodes(prepare_client, rounds, clients, 90 + 5 * len(rounds) * seconds, processes=clients)
        except TimeLimitError as e:
            for table in tables.values():
                for contender in CONTENDERS:
                    table.put(clients, contender, str(e))
            continue
        rates: dict[tuple[str, str], list[float]] = {}
        for options, timing in zip(rounds, timings, strict=True):
            done: Any = options["done"]
            took = max(t.ended for t in timing) - min(t.began for t in timing)
            if options["turn"]:
                rates.setdefault((str(options["operation"]), str(options["contender"])), []).append(
                    -1.0 if min(done) < 0 else sum(done) / took
                )
        for name, table in tables.items():
            for contender in CONTENDERS:
                rate = rates.get((name, contender), [])
                failed = servers.missing(contender) or ("fails" if min(rate) < 0 else "")
                table.put(clients, contender, failed or rate)
    yield from tables.values()


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    with serving() as servers:
        progress("latency of each operation")
        yield from latencies(servers, 1 if quick else 4, (10, 1_000) if quick else SIZES, 0.01 if quick else TURN)
        yield from throughput(servers, (2,) if quick else CLIENTS, 1 if quick else 4, 0.05 if quick else 0.1, progress)
        progress("wake-ups")
        yield from wake_up_table(servers, 1 if quick else 5)  # waking times vary a lot
        yield from group_tables(servers, (2,) if quick else (2, 8, 32, 64), 1 if quick else 2, progress)


if __name__ == "__main__":
    sys.exit(report.main(run, "store", __doc__ or ""))
