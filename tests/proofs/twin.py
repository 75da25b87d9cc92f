"""The Lua on a real server whose clock the tests inject, and the oracle's state in the same terms."""

from __future__ import annotations

import itertools
import os
from functools import cache
from typing import Any, Final

import redis

from redelastic.redis import scripts
from redelastic.redis.keys import RunKeys
from tests.proofs.oracle_state import (
    Admit,
    Beat,
    Charge,
    Close,
    Drain,
    DrainWake,
    Event,
    Join,
    Leave,
    Readmit,
    Reply,
    Request,
    RollCall,
    RollCallWake,
    Save,
    SaveWake,
    State,
    Wake,
)

NODES: Final = "abcdefgh"


HOSTS: Final = dict(zip(NODES, "xxxyyyzz", strict=True))  # a node that comes back is another one on the same host


START: Final = 1_000_000_000  # of the clock that the test injects, in milliseconds


STATUS: Final = '{"state": "test"}'


FIELDS: Final = (  # of the run's hash, and of the oracle's state alike
    *(
        "protocol",
        "incarnation",
        "created_at",
        "epoch",
        "size",
        "master",
        "lost",
        "completed_at",
        "closed",
        "stop",
        "broken",
        "member_lost",
        "deadline",
        "admit_from",
        "admit_by",
        "save",
        "beat_at",
        "restoring",
    ),
    *("drain_woke", "charged", "restarts", "idle", "judged", "stepped", "progress", "failed_at", "blamed", "limit"),
    *(
        "roll_called_at",
        "roll_called_by",
        "roll_timeout",
        "roll_until",
        "roll_last_chance",
        "roll_again",
        "roll_answered",
        "outage_at",
    ),
)


MERGING: Final = (
    "many ",
    "mark",
    "flush_at",
    "written",
    "blamed_node",
)  # fields that only the merging of events uses


class Server:
    """The verbs on a real server, whose clock the test sets.

    The scripts' text is the real one except for the call of TIME. Only status keys expire by the server's own clock; of
    them only the `left` of nodes that have gone is compared, which lives for a day.
    """

    _numbers = itertools.count()

    def __init__(self, client: redis.Redis) -> None:
        self.keys = RunKeys(f"oracle-{os.getpid()}-{next(self._numbers)}")
        self._client = client
        self._read: dict[str, list[tuple[str, dict[str, str]]]] = {}  # of each stream, so far: ids and fields
        self._clock = f"{self.keys.run}:clock"
        self._verbs = {
            request: client.register_script(on_injected_clock(script.text))
            for request, script in (
                (Join, scripts.JOIN),
                (Beat, scripts.BEAT),
                (Leave, scripts.LEAVE),
                (Close, scripts.CLOSE),
                (Drain, scripts.DRAIN),
                (Save, scripts.SAVE),
                (Admit, scripts.ADMIT),
                (Charge, scripts.CHARGE),
                (Readmit, scripts.READMIT),
                (RollCall, scripts.ROLL_CALL),
            )
        }

    def apply(self, now: int, request: Request) -> Reply:
        keys = [*self.keys.types, self.keys.status(request[0])]
        args: list[Any] = [*request]
        if isinstance(request, Join | Beat):
            keys.append(self.keys.store(request.after if isinstance(request, Join) else 0).data)
            args = [request.node, STATUS, *request.settings, *request.known]
        if isinstance(request, Leave):
            args = [request.node, STATUS, *request.settings, *request.known, request.run_then, *request.fields]
        if isinstance(request, Close):
            args = [request.ttl, request.stop, "", "reason", request.why]
        if isinstance(request, Charge):
            args = [*request[:6], *request[7:], "message", request.reason]
        if isinstance(request, Join):
            args += [request.after, request.endpoint, request.label, *request[6:]]
        if isinstance(request, Admit):
            args = [request.epoch, self._id_at(request.save)]
        with self._client.pipeline(transaction=False) as pipeline:
            pipeline.delete(self._clock)
            pipeline.rpush(self._clock, now // 1000, now % 1000 * 1000 + 999)  # no script may round up
            self._verbs[type(request)](keys, args, client=pipeline)
            raw = pipeline.execute()[-1]
        reply = tuple(
            part.decode() if isinstance(part, bytes) else part
            for part in (raw if isinstance(raw, list) else [raw])
            if part is not None
        )
        if reply[:1] == ("waiting",):
            last: Any = self._client.xrevrange(self.keys.wake, count=1)
            assert reply[2] == (last[0][0].decode() if last else "0-0")
            reply = (*reply[:2], int(self._client.xlen(self.keys.wake)), *reply[3:])
        if isinstance(request, Save) and reply:
            reply = (*reply[:2], int(self._client.xlen(self.keys.wake)))
        return reply

    def _id_at(self, place: int) -> str:
        """The id of the wake stream's entry at a place; an unknown id if there is none."""
        entries = self._read.get(self.keys.wake, [])
        return entries[place - 1][0] if 0 < place <= len(entries) else "0-1"

    def stored(self) -> dict[str, Any]:
        """Everything, in the form of :func:`stored`."""
        run, ranks, members, candidates, leases, endpoints, node_labels, wake, events, failures = self.keys.types
        statuses = [self.keys.status(node) for node in NODES]
        with self._client.pipeline(transaction=False) as pipeline:
            for key in (run, endpoints, node_labels, failures):
                pipeline.hgetall(key)
            pipeline.smembers(members)
            for key in (ranks, candidates, leases):
                pipeline.zrange(key, 0, -1, withscores=True)
            for key in (wake, events):
                pipeline.xrange(key, min=f"({self._read[key][-1][0]}" if self._read.get(key) else "-")
            pipeline.mget(statuses)
            for key in (*self.keys.types, *statuses):
                pipeline.pttl(key)
            replies = pipeline.execute()
        hashes = [{k.decode(): v.decode() for k, v in reply.items()} for reply in replies[:4]]
        hashes[0] = {name: value for name, value in hashes[0].items() if not name.startswith(MERGING)}
        zsets = [{k.decode(): int(v) for k, v in reply} for reply in replies[5:8]]
        for key, entries in zip(
            (wake, events), replies[8:10], strict=True
        ):  # nothing is ever removed: read what is new
            self._read.setdefault(key, []).extend(
                (entry_id.decode(), {k.decode(): v.decode() for k, v in fields.items()}) for entry_id, fields in entries
            )
        if "save" in hashes[0]:
            ids = [entry_id for entry_id, _ in self._read[wake]]
            hashes[0]["save"] = str(ids.index(hashes[0]["save"]) + 1)
        streams = [[fields for _, fields in self._read[key]] for key in (wake, events)]
        assert all(ttl != -1 for ttl in replies[11:]), "every key has a time to live"
        return {
            **dict(zip(("run", "endpoints", "labels", "failures"), hashes, strict=True)),
            "members": {node.decode() for node in replies[4]},
            **dict(zip(("ranks", "candidates", "leases"), zsets, strict=True)),
            **dict(zip(("wake", "events"), streams, strict=True)),
            "left": {node for node, status in zip(NODES, replies[10], strict=True) if status == b"left"},
        }

    def save(self) -> dict[str, tuple[bytes, int]]:
        """A copy of all that is stored, for :meth:`load`."""
        keys = [*self.keys.types, *(self.keys.status(node) for node in NODES)]
        copies = {key: (self._client.dump(key), self._client.pttl(key)) for key in keys}
        return {key: (copy, int(ttl)) for key, (copy, ttl) in copies.items() if copy is not None}

    def load(self, saved: dict[str, tuple[bytes, int]]) -> None:
        self.wipe()
        for key, (copy, ttl) in saved.items():
            self._client.restore(key, ttl, copy)

    def wipe(self) -> None:
        self._read.clear()
        self._client.delete(*self.keys.types, *(self.keys.status(node) for node in NODES))


def on_injected_clock(text: str) -> str:
    """The script with its clock read from a key that the test sets: seconds and microseconds, as TIME gives them."""
    assert text.count("redis.call('TIME')") == 1
    return text.replace("redis.call('TIME')", "redis.call('LRANGE', KEYS[1] .. ':clock', 0, -1)")


def stored(state: State) -> dict[str, Any]:
    """How the oracle's state has to look in Redis."""
    run: dict[str, Any] = {name: getattr(state, name) for name in FIELDS} | {"arrivals": state.arrivals or None}
    run |= state.settings._asdict() if state.settings else {}
    run["ttl"] = state.ttl
    for what in ("draining", "failed"):
        run |= {f"{what} {node}": value for node, value in getattr(state, what).items()}
    parts = ("endpoints", "labels", "members", "ranks", "candidates", "leases", "left")
    return {
        "run": {name: str(value) for name, value in run.items() if value is not None},
        **{part: getattr(state, part) for part in parts},
        "failures": {host: str(n) for host, n in state.failures.items()},
        **{
            stream: [as_text(entry) for entry in entries]
            for stream, entries in (("wake", state.wake), ("events", state.events))
        },
    }


@cache
def as_text(entry: Wake | SaveWake | DrainWake | RollCallWake | Event) -> dict[str, str]:
    values: dict[str, Any] = entry._asdict()
    if isinstance(entry, Event):
        fields = values.pop("fields")
        values |= zip(fields[::2], fields[1::2], strict=True)
    if isinstance(entry, Wake) and not entry.cause:
        del values["cause"]
    return {name: str(value) for name, value in values.items()}
