"""How long it takes from a set until a wait for it in another process returns, and where that time goes."""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, Final

import redis

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
from benchmarks.store_script import TTL
from redelastic.redis.keys import RunKeys
from redelastic.redis.scripts import STORE_SET, STORE_WAIT

CALLS: Final = ("wait", "get")
SCRIPTED: Final = "Redis, bare, with a script"  # the least that our wake-ups have to do there
OUR_SCRIPT: Final = "Redis, bare, with our scripts"
SCRIPT: Final = "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) redis.call('XADD', KEYS[2], '*', 'value', ARGV[2])"
TARGET: Final = 1.5  # multiple of TCPStore's time
TAKE_PART: Final = (*ACROSS_PROCESSES, SCRIPTED, OUR_SCRIPT)
WAKE_UPS: Final = 25  # per turn
ASLEEP: Final = 0.008  # seconds until the waiting side is surely blocked


def note_times(method: str, times: Any, *, before: bool) -> Callable[[int], None]:
    """Record when this process calls a method of a socket or returns from it; the last time counts.

    Returns:
        A function that chooses the place in ``times``.
    """
    place, plain = 0, getattr(socket.socket, method)

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

    setattr(socket.socket, method, noted)
    return choose


def calls_of(store: Any, contender: str, call: str, name: str) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """The calls that set a key and wait for it."""
    if contender == BARE:  # the closest that Redis has to a wait
        return lambda key: store.queue_push(key, "v"), store.queue_pop
    if contender == SCRIPTED:
        digest = store.ask("SCRIPT", "LOAD", SCRIPT)
        return (
            lambda key: store.ask("EVALSHA", digest, 2, name, f"{name}-{key}", key, "v"),
            lambda key: store.ask("XREAD", "BLOCK", 1000 * LIMIT, "STREAMS", f"{name}-{key}", "0"),
        )
    if contender == OUR_SCRIPT:
        return _by_our_scripts(store, name)
    return lambda key: store.set(key, "v"), (lambda key: store.wait([key])) if call == "wait" else store.get


def _by_our_scripts(store: Any, name: str) -> tuple[Callable[[str], Any], Callable[[str], Any]]:
    """What RedisStore sends."""
    run, numbers = RunKeys("bench"), count(1)
    keys = run.store(f"{name}-bare")  # RedisStore's own has that name
    fixed = run.of_store(keys)
    write, look = (store.ask("SCRIPT", "LOAD", script.text) for script in (STORE_SET, STORE_WAIT))

    def stream(key: str) -> bytes:
        return keys.stream(key.encode())

    def wait(key: str) -> Any:
        looked = (
            "EVALSHA",
            look,
            8,
            *fixed,
            run.wake,
            stream(key),
            keys.queue(key.encode()),
            "",
            TTL,
            "wait",
            key,
            "1",
        )
        return store.ask_both(looked, ("XREAD", "BLOCK", 1000 * LIMIT, "STREAMS", stream(key), "0-0"))

    return (
        lambda key: store.tell("EVALSHA", write, 6, *fixed, stream(key), "", TTL, "s", next(numbers), key, "v"),
        wait,
    )


def prepare_wake_up(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Node 1 waits, and node 0, in another process, sets what it waits for."""
    stack = ExitStack()
    contender = options["contender"]
    contender_of_store = BARE if contender in (SCRIPTED, OUR_SCRIPT) else contender
    store: Any = stack.enter_context(opened(contender_of_store, options["servers"], options["name"], acknowledge=False))
    do_set, do_wait = calls_of(store, contender, options["call"], options["name"])
    began, ended, turn = options["began"], options["ended"], options["both"]
    method = "sendall" if number == 0 else "recv"
    choose = note_times(method, options["sent" if number == 0 else "received"], before=number == 0)

    def set_keys() -> None:
        for i in range(WAKE_UPS):
            turn.wait(30)
            choose(i)
            time.sleep(ASLEEP)
            began[i] = time.monotonic()
            do_set(f"k{i}")

    def wait_for_keys() -> None:
        for i in range(WAKE_UPS):
            turn.wait(30)
            choose(i)
            do_wait(f"k{i}")
            ended[i] = time.monotonic()

    def guarded() -> None:
        try:
            (set_keys if number == 0 else wait_for_keys)()
        except Exception as e:  # noqa: BLE001  # the cell reports it; the other node must not wait
            turn.abort()
            refusal(contender, e)

    return guarded, stack.close


def wake_up_tables(servers: Servers, repeat: int) -> Iterator[Table]:
    """From before a set to the return of the wait in another process; and the parts of ours."""
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
        for turn in range(repeat + 1)
        for call in CALLS
        for contender in TAKE_PART
        if not servers.missing(contender)
    ]
    computed: list[float] = []  # seconds that Redis needs for a set with a wake-up, by round
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
    table.yardstick = SCRIPTED
    for call in CALLS:
        for contender in TAKE_PART:
            times = found.get((call, contender), [])
            failed = servers.missing(contender) or ("" if max(times) < math.inf else f"not within {LIMIT} s")
            table.put(call, contender, failed or times)
        table.put(call, HASH, ONE_PROCESS)
        if isinstance(theirs := table.cells[call][TCP], Spread):
            table.targets[call] = TARGET * theirs.median
    yield table
    for (part, call), times in measured.items():
        parts.put(part, call, times)
    yield parts
