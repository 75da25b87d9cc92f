"""How long it takes from a set until a wait for it in another process returns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from benchmarks.harness import CONTEXT, run_nodes
from benchmarks.report import Spread, Table
from benchmarks.store_contenders import (
    CONTENDERS,
    LIMIT,
    REDIS_PY,
    TCP,
    Servers,
    opened,
    refusal,
)

CALLS: Final = ("wait", "get")
TARGET: Final = 1.5  # multiple of TCPStore's time
WAKE_UPS: Final = 25  # per turn
ASLEEP: Final = 0.008  # seconds until the waiting side is surely blocked


def calls_of(store: Any, contender: str, call: str) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """The calls that set a key and wait for it."""
    if contender == REDIS_PY:  # the closest that Redis has to a wait
        return lambda key: store.queue_push(key, "v"), store.queue_pop
    return lambda key: store.set(key, "v"), (lambda key: store.wait([key])) if call == "wait" else store.get


def prepare_wake_up(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Node 1 waits, and node 0, in another process, sets what it waits for."""
    stack = ExitStack()
    store: Any = stack.enter_context(opened(options["contender"], options["servers"], options["name"]))
    do_set, do_wait = calls_of(store, options["contender"], options["call"])
    began, ended, turn = options["began"], options["ended"], options["both"]

    def set_or_wait(i: int) -> None:
        turn.wait(30)
        if number == 0:
            time.sleep(ASLEEP)
            began[i] = time.monotonic()
            do_set(f"k{i}")
        else:
            do_wait(f"k{i}")
            ended[i] = time.monotonic()

    def work() -> None:
        try:
            for i in range(WAKE_UPS):
                set_or_wait(i)
        except Exception as e:  # noqa: BLE001  # the cell reports it; the other node must not wait
            turn.abort()
            refusal(options["contender"], e)

    return work, stack.close


def wake_up_table(servers: Servers, repeat: int) -> Iterator[Table]:
    """From before a set to the return of the wait in another process."""
    rounds = [
        {
            "call": call,
            "contender": contender,
            "servers": servers,
            "name": f"{call}-{turn}",
            "both": CONTEXT.Barrier(2),
            "turn": turn,
            "began": CONTEXT.Array("d", WAKE_UPS, lock=False),
            "ended": CONTEXT.Array("d", WAKE_UPS, lock=False),
        }
        for turn in range(repeat + 1)
        for call in CALLS
        for contender in CONTENDERS
        if not servers.missing(contender)
    ]
    run_nodes(prepare_wake_up, rounds, 2, 60 + 3 * len(rounds))
    found: dict[tuple[str, str], list[float]] = {}
    for options in rounds:
        if options["turn"]:
            times = zip(list(options["began"]), list(options["ended"]), strict=True)
            median = statistics.median(ended - began if ended else math.inf for began, ended in times)
            found.setdefault((str(options["call"]), str(options["contender"])), []).append(median)
    title = "From before a set to the return of what waits for it in another process"
    table = Table("store-wake", title, "call", yardstick=REDIS_PY)
    for call in CALLS:
        for contender in CONTENDERS:
            times_of = found.get((call, contender), [])
            failed = servers.missing(contender) or ("" if max(times_of) < math.inf else f"not within {LIMIT} s")
            table.put(call, contender, failed or times_of)
        if isinstance(theirs := table.cells[call][TCP], Spread):
            table.targets[call] = TARGET * theirs.median
    yield table
