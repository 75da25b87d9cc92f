"""What a set costs as a script, on a bare socket: one duty after the other, beside RedisStore and TCPStore."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Any, Final

import redis

from benchmarks.harness import run_alone
from benchmarks.report import Table
from benchmarks.store_contenders import BARE, OURS, TCP, Servers, apart, opened
from redelastic.keys import RunKeys
from redelastic.scripts import STORE_SET

# What lua/store_set.lua has to do for one key, each as short as can be: the duty, the keys and arguments that it takes
# beyond those of the duties before it, and its text.
DUTIES: Final[tuple[tuple[str, list[str], list[str], str], ...]] = (
    ("a script that does nothing", ["data"], ["key", "value"], ""),
    ("and writes", [], [], "redis.call('HSET', data, key, value)"),
    (
        "and wakes who waits",
        ["waits", "stream"],
        [],
        "if redis.call('HDEL', waits, key) == 1 then redis.call('XADD', stream, 'MAXLEN', 1, '*', 'value', value) end",
    ),
    (
        "and is done once",
        ["once"],
        ["sender", "request"],
        "if redis.call('HGET', once, sender) ~= request then redis.call('HSET', once, sender, request) end",
    ),
    (
        "and keeps the store",
        [],
        ["ttl"],
        "if redis.call('PTTL', data) < 0.99 * ttl then redis.call('PEXPIRE', data, ttl) end",
    ),
)
VALUE: Final = "0123456789"
TTL: Final = 86_400_000  # milliseconds
THEIRS: Final = f"{TCP}: add"
TARGET: Final = 1.4  # times what TCPStore takes for an add
WHOLE: Final = "whole"
COMMAND: Final = "Redis: command"


@dataclass(frozen=True)
class Timed:
    """A call, and Redis' command for it, if it has one."""

    name: str
    call: Callable[[], object]
    command: str = "evalsha"


def timed_calls(stack: ExitStack, servers: Servers) -> Iterator[Timed]:
    """From the least that Redis can do to what our store does, and the one to be compared with."""
    bare: Any = stack.enter_context(opened(BARE, servers, "script"))
    ours: Any = stack.enter_context(opened(OURS, servers, "script"))
    theirs: Any = stack.enter_context(opened(TCP, servers, "script"))
    run = RunKeys("bench")
    store = run.store("script")
    words: dict[str, Any] = {
        "data": store.data,
        "waits": store.waits,
        "stream": store.stream(b"k"),
        "once": store.once,
        "key": "k",
        "value": VALUE,
        "sender": "sender",
        "request": count(1),
        "ttl": TTL,
    }

    def script(text: str, keys: list[Any], args: list[Any]) -> Callable[[], object]:
        sent = ["EVALSHA", bare.ask("SCRIPT", "LOAD", text), len(keys), *keys, *args]
        if words["request"] not in sent:
            return lambda: bare.ask(*sent)
        i = sent.index(words["request"])
        before, after = sent[:i], sent[i + 1 :]
        return lambda: bare.ask(*before, next(words["request"]), *after)

    yield Timed("HSET, no script", lambda: bare.ask("HSET", store.data, "k", VALUE), "hset")
    keys: list[str] = []
    args: list[str] = []
    texts: list[str] = []
    for duty, more_keys, more_args, text in DUTIES:
        keys, args, texts = keys + more_keys, args + more_args, [*texts, text]
        head = f"local {', '.join(keys)} = unpack(KEYS) local {', '.join(args)} = unpack(ARGV)"
        yield Timed(duty, script("\n".join([head, *texts]), [words[k] for k in keys], [words[a] for a in args]))
    our_keys = [store.data, store.waits, store.once, run.run, run.members, words["stream"]]
    our_args = ["", TTL, "sender", words["request"], "k", VALUE]
    yield Timed("our script", script(STORE_SET.text, our_keys, our_args))
    yield Timed("our set", lambda: ours.set("k", VALUE))
    yield Timed(THEIRS, lambda: theirs.add("n", 1), "")


def take_turns(servers: Servers, repeat: int, calls: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of a call, and of those Redis' for its command, by name, several times over; the first time warms up."""
    os.sched_setaffinity(0, {servers.clients_core})
    found: dict[str, list[dict[str, float]]] = {}
    with ExitStack() as stack, redis.Redis.from_url(servers.redis) as client:
        all_timed = list(timed_calls(stack, servers))
        for _ in range(repeat + 1):
            for timed in all_timed:
                client.config_resetstat()
                began = time.perf_counter()
                for _ in range(calls):
                    timed.call()
                times = {WHOLE: (time.perf_counter() - began) / calls}
                if timed.command:
                    stats: Any = client.info("commandstats")
                    times[COMMAND] = stats[f"cmdstat_{timed.command}"]["usec"] / 1e6 / calls
                found.setdefault(timed.name, []).append(times)
    return {name: turns[1:] for name, turns in found.items()}


def script_table(servers: Servers, repeat: int, calls: int) -> Iterator[Table]:
    """Means of many calls, each turn's."""
    with apart(servers):
        found = run_alone(take_turns, (servers, repeat, calls), 120)
    found[f"the target: {TARGET} x that"] = [{WHOLE: TARGET * turn[WHOLE]} for turn in found[THEIRS]]
    table = Table("store-script", "A set as a script, on a bare socket: what each of its duties adds", "call")
    for name, turns in found.items():
        for part in turns[0]:
            table.put(name, part, [turn[part] for turn in turns])
    yield table
