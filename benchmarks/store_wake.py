"""How long it takes from a set to the return of what waits for it in another process, and where that time goes."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

import redis
from redis.connection import AbstractConnection

from benchmarks.harness import CONTEXT, run_nodes
from benchmarks.report import Spread, Table
from benchmarks.store_contenders import (
    ACROSS_PROCESSES,
    BARE,
    HASH,
    LIMIT,
    ONE_PROCESS,
    OURS,
    TCP,
    Servers,
    opened,
    refusal,
)

CALLS: Final = ("wait", "get")
WAKE_UPS: Final = 25  # in each turn
ASLEEP: Final = 0.008  # seconds within which whoever waits is blocked


def note_times(method: str, times: Any, *, before: bool) -> Callable[[int], None]:
    """Enter when redis-py's connections in this process call a method, or return from it; the last time counts.

    Returns:
        Chooses the place in ``times``.
    """
    place, plain = 0, getattr(AbstractConnection, method)

    def noted(*args: Any, **options: Any) -> Any:
        if before:
            times[place] = time.monotonic()
        result = plain(*args, **options)
        if not before:
            times[place] = time.monotonic()
        return result

    def choose(chosen: int) -> None:
        nonlocal place
        place = chosen

    setattr(AbstractConnection, method, noted)
    return choose


def prepare_wake_up(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Node 1 waits, and node 0 sets what it waits for, in another process."""
    stack = ExitStack()
    store: Any = stack.enter_context(opened(options["contender"], options["servers"], options["name"]))
    began, ended, turn = options["began"], options["ended"], options["both"]
    method = "send_packed_command" if number == 0 else "read_response"
    choose = note_times(method, options["sent" if number == 0 else "received"], before=number == 0)

    def set_keys() -> None:
        for i in range(WAKE_UPS):
            turn.wait(30)
            choose(i)
            time.sleep(ASLEEP)
            began[i] = time.monotonic()
            (store.queue_push if options["contender"] == BARE else store.set)(f"k{i}", "v")

    def wait_for_keys() -> None:
        for i in range(WAKE_UPS):
            turn.wait(30)
            choose(i)
            if options["contender"] == BARE:  # the nearest thing to a wait that Redis has
                store.queue_pop(f"k{i}")
            elif options["call"] == "wait":
                store.wait([f"k{i}"])
            else:
                store.get(f"k{i}")
            ended[i] = time.monotonic()

    def guarded() -> None:
        try:
            (set_keys if number == 0 else wait_for_keys)()
        except Exception as e:  # noqa: BLE001  # the cell says it; the other node is not to wait
            turn.abort()
            refusal(options["contender"], e)

    return guarded, stack.close


def wake_up_tables(servers: Servers, repeat: int) -> Iterator[Table]:
    """From before a set to the return of what waits for it in another process; and the parts of ours."""
    moments = ("began", "sent", "received", "ended")
    rounds = [
        {
            "call": call,
            "contender": contender,
            "servers": servers,
            "name": f"{call}-{turn}",
            "both": CONTEXT.Barrier(2),
            "turn": turn,
            **{moment: CONTEXT.Array("d", WAKE_UPS, lock=False) for moment in moments},
        }
        for call in CALLS
        for turn in range(repeat + 1)
        for contender in ACROSS_PROCESSES
        if not servers.missing(contender)
    ]
    computed: list[float] = []  # seconds that Redis needs for a set with a wake-up, in each of the rounds
    with redis.Redis.from_url(servers.redis) as client:

        def look() -> None:
            stats: Any = client.info("commandstats")
            evalsha = stats.get("cmdstat_evalsha", {"usec": 0, "calls": 0})
            computed.append(1e-6 * evalsha["usec"] / max(1, evalsha["calls"]))
            client.config_resetstat()

        run_nodes(prepare_wake_up, rounds, 2, 60 + 3 * len(rounds), look)
    found: dict[tuple[str, str], list[float]] = {}
    parts = Table("store-wake-parts", "The parts of ours", "part")
    measured: dict[tuple[str, str], list[float]] = {}
    for options, script in zip(rounds, computed, strict=True):
        if not options["turn"]:
            continue
        began, sent, received, ended = (list(options[moment]) for moment in moments)
        call, contender = str(options["call"]), str(options["contender"])
        found.setdefault((call, contender), []).append(
            statistics.median(e - b if e else math.inf for b, e in zip(began, ended, strict=True))
        )
        if contender == OURS:
            for part, (first, last) in {
                "set, before it is sent: Python": (began, sent),
                "until the answer has come: Redis, kernel": (sent, received),
                "after that: Python": (received, ended),
            }.items():
                took = statistics.median(b - a for a, b in zip(first, last, strict=True))
                measured.setdefault((part, call), []).append(took)
            measured.setdefault(("a script, mean of set and the asking before the wait: Redis", call), []).append(
                script
            )
    table = Table("store-wake", "From before a set to the return of what waits for it in another process", "call")
    for call in CALLS:
        for contender in ACROSS_PROCESSES:
            times = found.get((call, contender), [])
            failed = servers.missing(contender) or ("" if max(times) < math.inf else f"not within {LIMIT} s")
            table.put(call, contender, failed or times)
        table.put(call, HASH, ONE_PROCESS)
        if isinstance(theirs := table.cells[call][TCP], Spread):
            table.targets[call] = theirs.median
    yield table
    for (part, call), times in measured.items():
        parts.put(part, call, times)
    yield parts
