"""Fuzzing: the number of inputs, and hostile replies of Redis, runs and histories, from the values of `hostile.py`."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import KINDS, Event, decode
from redelastic.monitoring.records import Run
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from tests.support.hostile import LARGE_IDS, NODES, RECORD, VALUES, Dice
from tests.support.long_tests import LONG

INPUTS: Final = int(os.environ.get("REDELASTIC_FUZZ", "30000" if LONG else "5000"))
SEED: Final = int(os.environ.get("REDELASTIC_FUZZ_SEED", "0"))


@contextlib.contextmanager
def no_logs() -> Iterator[None]:
    """Silence logging: nodes log what they read, and it would be a million lines."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def try_all(target: Callable[[Dice], None], count: int) -> None:
    """Call ``target`` with so many seeds; the error of a failing call names its seed."""
    with no_logs():
        for number in range(SEED * 1_000_003, SEED * 1_000_003 + count):
            try:
                target(Dice(number))
            except Exception as e:
                raise AssertionError(f"{target.__name__}(Dice({number})): {type(e).__name__}: {e!s:.300}") from e


class Replies:
    """A connection on which Redis gives these replies, one after the other; streams have no new entries."""

    name = "here"
    read_timeout = 1.0

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)

    def call(self, _operation: object, _timeout: float | None = None) -> Any:
        return self.replies.pop(0)

    attempt = call

    def read(self, *_: object) -> Any:
        return {}


def control_of(*replies: Any) -> RunControl:
    return RunControl(cast("Connection", Replies(*replies)), RunKeys("job"))


def pairs(dice: Dice, sound: dict[str, str], spoilt: float = 0.15) -> list[bytes]:
    """The reply to HGETALL of a hash, of which some fields are missing and some values spoilt."""
    flat: list[bytes] = []
    for name, value in sound.items():
        if dice.random() < 0.9:
            flat += [name.encode(), dice.raw() if dice.random() < spoilt else value.encode()]
    return flat


def score(dice: Dice) -> bytes:
    """A score of a sorted set as Redis prints it: any double but NaN."""
    return dice.choice((b"0", b"1", b"-2147483648", b"1700000006000", b"inf", b"-inf", b"1e+308", b"0.5"))


def scored(dice: Dice) -> list[bytes]:
    """The reply to ZRANGE WITHSCORES of a sorted set of all nodes."""
    return [part for node in NODES for part in (node.encode(), score(dice))]


def hostile_run(dice: Dice) -> Run:
    """A run as decoded from hostile replies."""
    members = [node.encode() for node in NODES if dice.random() < 0.5] + ([dice.raw()] if dice.random() < 0.1 else [])
    candidates = [part for node in (*NODES[2:], dice.text()) for part in (node.encode(), score(dice))]
    failures = pairs(dice, {"a": "1", "b": "2", dice.text(): "1"}, 0.5)
    reply = [1_700_000_001_000, pairs(dice, RECORD), scored(dice), members, candidates, scored(dice), failures]
    ranked = [node for node in NODES if node.encode() in members]
    statuses = [status_text(dice) for _ in range(len(ranked) + 2)]
    return control_of(reply, statuses[: len(ranked) + len(dict.fromkeys(candidates[::2]))]).state()


def status_text(dice: Dice) -> bytes | None:
    """A node's status as in Redis: missing, JSON, spoilt JSON or no JSON at all."""
    roll = dice.random()
    if roll < 0.1:
        return None
    text = json.dumps(dice.status())
    return dice.raw() if roll < 0.2 else (dice.spoil(text) if roll < 0.6 else text).encode("utf-8", "surrogatepass")


def hostile_entry(dice: Dice) -> tuple[str, dict[str, str]]:
    """The id and the fields of an entry in the stream of events."""
    kind = dice.choice((*KINDS, "x", "constructor", "__proto__"))
    fields = {"event": kind, "node": dice.choice(NODES), "epoch": str(dice.randrange(4)), "size": "2"}
    own = KINDS[kind].__dataclass_fields__ if kind in KINDS else {}
    fields |= {name: dice.choice(VALUES) for name in own if name not in {*fields, "id", "time", "nodes"}}
    if dice.random() < 0.1:
        fields["nodes"] = " ".join(dice.choice(NODES) for _ in range(3))
    for name in (*fields, "nodes"):
        if dice.random() < 0.12:
            fields[name] = dice.text()
    place = f"{dice.randrange(99_999)}-{dice.randrange(3)}"
    if dice.random() < 0.1:
        place = dice.choice((f"{1_700_000_000_000 + dice.randrange(100_000)}-0", "0-1", *LARGE_IDS))
    return place, fields


def hostile_event(dice: Dice) -> Event:
    return decode(*hostile_entry(dice))


def hostile_history(dice: Dice) -> list[Event]:
    return sorted((hostile_event(dice) for _ in range(1 + dice.randrange(12))), key=lambda event: event.time)


def spoil_keys(dice: Dice, client: redis.Redis, keys: RunKeys) -> None:
    """Replace some of the run's keys by keys of another type, and add hostile fields, members and entries."""
    pipe = client.pipeline(transaction=False)
    store = keys.store(2)
    for key in (*keys.types, keys.state, store.data, store.waits):
        if dice.random() < 0.06:
            pipe.delete(key)
            getattr(pipe, dice.choice(("set", "rpush", "sadd")))(key, dice.raw())
    for _ in range(1 + dice.randrange(3)):
        pipe.hset(keys.run, dice.choice((*RECORD, "draining " + NODES[0], dice.text())), dice.raw())
        zset = dice.choice((keys.ranks, keys.leases, keys.candidates))
        pipe.zadd(
            zset,
            {
                dice.choice((dice.raw(), *(node.encode() for node in NODES))): dice.choice(
                    (0, 5, math.inf, -math.inf, 1e300, 0.5)
                )
            },
        )
        pipe.hset(keys.state, mapping={"token": dice.raw(), "state": dice.raw()})
        pipe.hset(store.data, dice.choice((b"n", b"text", dice.raw())), dice.raw())
        pipe.hset(keys.failures, dice.choice((b"a", dice.raw())), dice.raw())
        pipe.xadd(
            keys.wake,
            {dice.choice((b"event", dice.raw())): dice.choice((b"drain", dice.raw())), b"timeout": dice.raw()},
        )
        pipe.xadd(keys.events, {dice.choice((b"event", dice.raw())): dice.raw()})
        if dice.random() < 0.2:
            entry: Any = {"event": dice.choice((*KINDS, dice.raw())), "node": dice.raw()}
            pipe.xadd(dice.choice((keys.wake, keys.events)), entry, id=dice.choice(LARGE_IDS))
        pipe.set(keys.status(NODES[0]), dice.raw())
    pipe.execute(raise_on_error=False)


def plant(client: redis.Redis, keys: RunKeys) -> None:
    """Write a run of three nodes, two of which are in round 2."""
    now = int(client.time()[0]) * 1000
    pipe = client.pipeline(transaction=False)
    store = keys.store(2)
    pipe.delete(*keys.types, keys.state, store.data, store.waits)
    sound = {k: v for k, v in RECORD.items() if k not in ("closed", "stop", "broken", "restoring", "deadline")}
    pipe.hset(keys.run, mapping=sound | {"beat_at": now, "completed_at": now})  # type: ignore[arg-type]
    pipe.zadd(keys.ranks, {NODES[0]: 0, NODES[1]: 1})
    pipe.sadd(keys.members, *NODES[:2])
    pipe.zadd(keys.candidates, {NODES[2]: 1})
    pipe.zadd(keys.leases, dict.fromkeys(NODES, now + 60_000))
    pipe.execute(raise_on_error=False)
