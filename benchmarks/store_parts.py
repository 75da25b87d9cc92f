"""Where the time of one client's calls goes: Python, the kernel, Redis' scripts, and the way in between."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import redis

from benchmarks.harness import run_alone
from benchmarks.report import Table
from benchmarks.store_contenders import BARE, OURS, Servers, apart, opened

CALLS: Final[dict[str, tuple[str, Callable[[Any], object]]]] = {
    "set": (OURS, lambda store: store.set("k", "v")),
    "add": (OURS, lambda store: store.add("n", 1)),
    "compare_set": (OURS, lambda store: store.compare_set("k", "v", "v")),
    "check": (OURS, lambda store: store.check(["k"])),
    "get": (OURS, lambda store: store.get("k")),
    "Redis, bare: get": (BARE, lambda store: store.get("k")),
}
PARTS: Final = ("whole", "client: Python", "client: kernel", "Redis: script")


def time_parts(servers: Servers, repeat: int, calls: int) -> dict[str, list[dict[str, float]]]:
    """Seconds per call and per part, by call, several times over; the first round warms up."""
    os.sched_setaffinity(0, {servers.clients_core})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CALLS}
    with redis.Redis.from_url(servers.redis) as client:
        for _ in range(repeat + 1):
            for name, (contender, call) in CALLS.items():
                with opened(contender, servers, "parts") as store:
                    store.set("k", "v")
                    client.config_resetstat()
                    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
                    for _ in range(calls):
                        call(store)
                    whole, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
                    scripts: Any = client.info("commandstats").get("cmdstat_evalsha", {"usec": 0})
                user, kernel = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
                seconds = (whole, user, kernel, scripts["usec"] / 1e6)
                found[name].append({part: s / calls for part, s in zip(PARTS, seconds, strict=True)})
    return {name: turns[1:] for name, turns in found.items()}


def parts_table(servers: Servers, repeat: int, calls: int) -> Iterator[Table]:
    """Means over many calls, per turn; time in no part is the way in between, or Redis' own reading and writing."""
    with apart(servers):
        found = run_alone(time_parts, (servers, repeat, calls), 120)
    table = Table("store-parts", "Where the time of one client's call goes", "call")
    for name, turns in found.items():
        for part in PARTS:
            table.put(name, part, [turn[part] for turn in turns])
    yield table
