"""What a set and a check cost on a bare socket, one duty after the other, beside RedisStore and TCPStore."""

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
from redelastic.redis.keys import RunKeys, StoreKeys
from redelastic.redis.scripts import STORE_SET, STORE_WAIT

# What lua/store_set.lua has to do for one key, each as short as possible: the duty, the keys and arguments it takes
# beyond those of earlier duties, and its text.
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
WHOLE: Final = "whole"
COMMAND: Final = "Redis: command"


@dataclass(frozen=True)
class Timed:
    """A call, and the Redis command for it, if any."""

    name: str
    call: Callable[[], object]
    command: str = "evalsha"


@dataclass(frozen=True)
class Clients:
    """Clients that each have a store of this name, with one key in it."""

    bare: Any
    ours: Any
    sending: Any  # ours, without waiting for its writes
    theirs: Any
    run: RunKeys
    store: StoreKeys

    @classmethod
    def opened(cls, stack: ExitStack, servers: Servers, name: str) -> Clients:
        """Open them, in a state in which every write does the same work."""
        bare, ours, theirs = (stack.enter_context(opened(kind, servers, name)) for kind in (BARE, OURS, TCP))
        sending = stack.enter_context(opened(OURS, servers, name, acknowledge=False))
        run = RunKeys("bench")
        for store in (ours, theirs):
            store.set("k", VALUE)
        return cls(bare, ours, sending, theirs, run, run.store(name))

    @property
    def fixed_keys(self) -> list[str]:
        """The keys that every script of a store takes."""
        return self.run.of_store(self.store)

    def script(
        self, text: str, keys: list[Any], args: list[Any], send: Callable[..., object] | None = None
    ) -> Callable[[], object]:
        """A call of a script; iterators among its arguments yield a new value for each call."""
        send = send or self.bare.ask
        sent = ["EVALSHA", self.bare.ask("SCRIPT", "LOAD", text), len(keys), *keys, *args]
        i = next((i for i, word in enumerate(sent) if isinstance(word, count)), None)
        if i is None:
            return lambda: send(*sent)
        before, numbers, after = sent[:i], sent[i], sent[i + 1 :]
        return lambda: send(*before, next(numbers), *after)


def set_calls(clients: Clients) -> Iterator[Timed]:
    """From the least that Redis can do up to our store, and last the one to compare with."""
    bare, store = clients.bare, clients.store
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

    yield Timed("HSET, no script", lambda: bare.ask("HSET", store.data, "k", VALUE), "hset")
    keys: list[str] = []
    args: list[str] = []
    texts: list[str] = []
    for duty, more_keys, more_args, text in DUTIES:
        keys, args, texts = keys + more_keys, args + more_args, [*texts, text]
        head = f"local {', '.join(keys)} = unpack(KEYS) local {', '.join(args)} = unpack(ARGV)"
        yield Timed(duty, clients.script("\n".join([head, *texts]), [words[k] for k in keys], [words[a] for a in args]))
    our_args = ["", TTL, "sender", words["request"], "k", VALUE]
    yield Timed("our script", clients.script(STORE_SET.text, [*clients.fixed_keys, words["stream"]], our_args))
    yield Timed("our set", lambda: clients.ours.set("k", VALUE))
    yield Timed(f"{TCP}: add", lambda: clients.theirs.add("n", 1), "")


def sent_calls(clients: Clients) -> Iterator[Timed]:
    """Nobody waits for the answer of any; up to 64 are under way, then the first half is read."""
    bare, store = clients.bare, clients.store
    yield Timed("HSET, no script", lambda: bare.tell("HSET", store.data, "k", VALUE), "hset")
    keys, args = [*clients.fixed_keys, store.stream(b"k")], ["", TTL, "told", count(1), "k", VALUE]
    yield Timed("our script", clients.script(STORE_SET.text, keys, args, bare.tell))
    yield Timed("our set", lambda: clients.sending.set("k", VALUE))
    yield Timed(f"{TCP}: set", lambda: clients.theirs.set("k", VALUE), "")


def check_calls(clients: Clients) -> Iterator[Timed]:
    """In the same order; a key exists if it has a value or a queue."""
    bare, store = clients.bare, clients.store
    queue = store.queue(b"k")
    value, items = ("HEXISTS", store.data, "k"), ("EXISTS", queue)
    yield Timed("HEXISTS", lambda: bare.ask(*value), "hexists")
    yield Timed("HEXISTS, and EXISTS of the queue, sent together", lambda: bare.ask_both(value, items), "hexists")
    yield Timed("a script that does nothing", clients.script("", [store.data, queue], ["k"]))
    text = "return redis.call('HEXISTS', KEYS[1], ARGV[1]) + redis.call('EXISTS', KEYS[2])"
    yield Timed("a script that looks for both", clients.script(text, [store.data, queue], ["k"]))
    our_keys = [*clients.fixed_keys, clients.run.wake, store.stream(b"k"), queue]
    yield Timed("our script for several keys", clients.script(STORE_WAIT.text, our_keys, ["", TTL, "check", "k", ""]))
    yield Timed("our check", lambda: clients.ours.check(["k"]), "hexists")
    yield Timed("our get, for comparison", lambda: clients.ours.get("k"), "hget")
    yield Timed(f"{TCP}: check", lambda: clients.theirs.check(["k"]), "")


TABLES: Final = {
    "store-script": ("A set as a script, on a bare socket: what each of its duties adds", set_calls, 1.7),
    "store-sent": ("A set that is not waited for, on a bare socket", sent_calls, 3.0),
    "store-check": ("A check, on a bare socket", check_calls, 1.4),
}


def take_turns(servers: Servers, repeat: int, calls: int) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Seconds per call, and Redis' share for its command, by table and call, several times over; the first warms up."""
    os.sched_setaffinity(0, {servers.clients_core})
    found: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in TABLES}
    with ExitStack() as stack, redis.Redis.from_url(servers.redis) as client:
        all_timed = [
            (found[name], timed)
            for name, (_, calls_of, _) in TABLES.items()
            for timed in calls_of(Clients.opened(stack, servers, name))
        ]
        for _ in range(repeat + 1):
            for rows, timed in all_timed:
                client.config_resetstat()
                began = time.perf_counter()
                for _ in range(calls):
                    timed.call()
                times = {WHOLE: (time.perf_counter() - began) / calls}
                if timed.command:
                    stats: Any = client.info("commandstats")
                    times[COMMAND] = stats[f"cmdstat_{timed.command}"]["usec"] / 1e6 / calls
                rows.setdefault(timed.name, []).append(times)
    return {name: {call: turns[1:] for call, turns in rows.items()} for name, rows in found.items()}


def script_tables(servers: Servers, repeat: int, calls: int) -> Iterator[Table]:
    """Means over many calls, per turn."""
    with apart(servers):
        found = run_alone(take_turns, (servers, repeat, calls), 120)
    for name, rows in found.items():
        title, _, target = TABLES[name]
        table = Table(name, title, "call")
        rows[f"the target: {target} x that"] = [{WHOLE: target * turn[WHOLE]} for turn in [*rows.values()][-1]]
        for call, turns in rows.items():
            for part in turns[0]:
                table.put(call, part, [turn[part] for turn in turns])
        yield table
