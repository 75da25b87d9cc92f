"""A run seen from outside: what people, tools and agents read of it and ask of it, without a place in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

from redis import RedisCluster
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from . import scripts
from .connection import Connection, Entries, require_keys_of_types, text
from .keys import MAX_KEY_PART, RunKeys, check_key_part

T = TypeVar("T")

MAX_REASON: Final = 1_000  # characters of an event's reason
MAX_DETAIL: Final = 16_384  # characters of an event's detail, and of any text of a run that is read
MAX_STATUS: Final = 65_536  # bytes of a node's status that are looked at; ours have 8,192 at most
LARGEST: Final = 10**15  # of scores: beyond any time in ms, and a double counts so far


class UnknownRunError(LookupError):
    """Redis holds no run of that id."""


class UnknownNodeError(LookupError):
    """The run has no such node, or several."""


@dataclass(frozen=True)
class Node:
    """A node of a run.

    Attributes:
        id: of this process on this host.
        standing: ``member`` of the last round, or ``candidate`` for the next one, or ``spare``: a candidate for whom
            the last round, which stands, has no room.
        rank: in the last round; None for who was not in it.
        lease: for how long it stays without another heartbeat, in seconds; below 0 if that is over.
        silence: time since its last heartbeat, in seconds.
        draining: why it was asked to drain; empty if it was not.
        status: what it last said of itself: ``name``, ``host``, ``pid``, ``state``, and with an agent of ours
            ``agent``, ``restarts``, ``cpu``, ``memory``, ``workers``, ``gpus``. ``name``, ``host`` and ``state`` are
            strings; whoever may write there can have put anything into the rest.
    """

    id: str
    standing: str
    rank: int | None
    lease: float
    silence: float
    draining: str
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What people call its host."""
        return str(self.status["name"])

    @property
    def workers(self) -> list[Mapping[str, Any]]:
        """Its workers, as far as it told."""
        told = self.status.get("workers")
        return [worker for worker in told if isinstance(worker, dict)] if isinstance(told, list) else []

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """Its GPUs, as far as it told."""
        told = self.status.get("gpus")
        return [gpu for gpu in told if isinstance(gpu, dict)] if isinstance(told, list) else []

    @property
    def step(self) -> int | None:
        """The lowest step that its workers last reported."""
        steps = [w["step"] for w in self.workers if isinstance(w.get("step"), int)]
        return min(steps, default=None)


@dataclass(frozen=True)
class Run:
    """A run at one moment; times in seconds.

    Attributes:
        run_id: its id.
        epoch: of its last completed round; 0 before the first.
        size: number of nodes of that round.
        min_nodes, max_nodes: how many nodes a round may have; None when nobody has joined yet.
        age: since that round was completed; None before the first.
        broken: why its members have to regroup; empty while the round stands.
        closed: why the run was closed; empty while it is open.
        stopped: whether workers were told to end too.
        deadline: until the rendezvous completes with whoever has joined; None if none is set.
        lease: how long a node that is not heard of stays.
        restarts: of the job, for failed workers.
        idle: how many of the last ones brought no progress.
        failures: in how many rounds in a row workers of a host failed first, by the host's name.
        barred: names of hosts that are kept out for it.
        nodes: members by rank, then candidates in their order.
    """

    run_id: str
    epoch: int
    size: int
    min_nodes: int | None
    max_nodes: int | None
    age: float | None
    broken: str
    closed: str
    stopped: bool
    deadline: float | None
    lease: float
    restarts: int
    idle: int
    failures: Mapping[str, int]
    barred: Sequence[str]
    nodes: Sequence[Node] = field(default=())

    @cached_property
    def members(self) -> list[Node]:
        """Nodes that hold the last round, by rank."""
        return [node for node in self.nodes if node.standing == "member"]

    @cached_property
    def candidates(self) -> list[Node]:
        """Nodes that wait for the next one and may be in it."""
        return [node for node in self.nodes if node.standing == "candidate"]

    @cached_property
    def spares(self) -> list[Node]:
        """Nodes that wait until one of the last round goes."""
        return [node for node in self.nodes if node.standing == "spare"]

    @property
    def phase(self) -> str:
        """``stopped``, ``closed``, ``running``, ``regrouping``, ``forming`` or ``empty``."""
        if self.closed:
            return "stopped" if self.stopped else "closed"
        if self.members:
            return "regrouping" if self.broken else "running"
        return "forming" if self.candidates else "empty"

    @property
    def waits_for(self) -> str:
        """Why the next round is not complete, in one sentence; empty when there is none to complete."""
        n = len(self.candidates)
        if self.closed or self.phase == "running" or self.min_nodes is None:
            return ""
        if self.phase == "empty":
            return f"Nobody is there: at least {self.min_nodes} nodes have to join."
        if self.members:
            late = min(self.members, key=lambda node: node.lease)
            held = ", ".join(node.id for node in self.members[:3]) + (", …" if len(self.members) > 3 else "")
            return (
                f"{len(self.members)} of {self.size} members still hold round {self.epoch}: {held}; the first lease "
                f"among them runs out in {max(0.0, late.lease):.1f} s."
            )
        if n < self.min_nodes:
            return f"{n} of at least {self.min_nodes} nodes have joined."
        if self.deadline is not None:
            return f"{n} of {self.max_nodes} nodes have joined; it goes on without more in {self.deadline:.1f} s."
        return f"{n} of {self.max_nodes} nodes have joined; the next one to ask completes the round."


@dataclass(frozen=True)
class Event:
    """What happened in a run.

    Attributes:
        id: its place in the stream.
        time: on the server's clock, in seconds since 1970.
        event: ``joined``, ``completed``, ``lost``, ``left``, ``drain``, ``failed``, ``closed``, ``stopped``, ``outage``
            by the scripts, exactly once; others by agents, at least once (:meth:`RunControl.note`).
        epoch, size: of the round that was the last one then.
        node: id of the node it happened to; for ``completed`` that of rank 0; empty if to none.
        reason: in words.
        detail: more of it, such as stacks; may have many lines.
    """

    id: str
    time: float
    event: str
    epoch: int
    size: int
    node: str
    reason: str
    detail: str = ""


class RunControl:
    """One run, for whoever has no place in it.

    Args:
        connection: to Redis.
        keys: of the run.
    """

    def __init__(self, connection: Connection, keys: RunKeys) -> None:
        self._connection = connection
        self._keys = keys

    def state(self) -> Run:
        """All that is known of the run now.

        Raises:
            UnknownRunError: Redis holds nothing of it.
            RendezvousConnectionError: Redis could not be reached, or it refuses us.
            RendezvousStateError: a key of the run holds something that is not ours.
        """
        reply = self._script(scripts.INSPECT, [])
        now = int(reply[0])
        run, ranks, candidates, leases, failures = (_pairs(reply[i]) for i in (1, 2, 4, 5, 6))
        members = {text(node) for node in reply[3]}
        if not run:
            raise UnknownRunError(
                f"Redis at {self._connection.name} holds no run {self._keys.run_id!r} with the key prefix "
                f"{self._keys.prefix!r}; `redelastic list` shows what is there. What a run has there goes when nobody "
                "has used it for its ttl."
            )
        ids = [node for node in ranks if node in members] + list(candidates)
        told = self._statuses(ids)

        def number(name: str, default: int = 0) -> int:
            value = run.get(name, str(default))
            if (found := _whole(value)) is None:
                raise RendezvousStateError(
                    f"The key {self._keys.run!r} in Redis at {self._connection.name} is corrupt: its field {name} is "
                    f"{value[:80]!r}, not a number. Remove that key once no node of the run is alive."
                )
            return found

        lease, size, limit = number("lease"), number("size"), number("limit", 0)
        full = size > 0 and size == number("max") == len(members)

        def node_of(node: str) -> Node:
            left = _score(leases.get(node, "0")) - now
            standing = "member" if node in members else "spare" if full else "candidate"
            return Node(
                id=node,
                standing=standing,
                rank=_score(ranks[node]) if node in ranks and node in members else None,
                lease=left / 1000,
                silence=(lease - left) / 1000,
                draining=run.get(f"draining {node}", "").partition(" ")[2][:MAX_DETAIL],
                status=told[node],
            )

        failed = {name: count for name, told in failures.items() if (count := _whole(told)) is not None}
        return Run(
            run_id=self._keys.run_id,
            epoch=number("epoch"),
            size=size,
            min_nodes=number("min") if "min" in run else None,
            max_nodes=number("max") if "max" in run else None,
            age=(now - number("completed_at")) / 1000 if "completed_at" in run else None,
            broken=run.get("broken", "")[:MAX_DETAIL],
            closed=run.get("closed", "")[:MAX_DETAIL],
            stopped="stop" in run,
            deadline=(number("deadline") - now) / 1000 if "deadline" in run else None,
            lease=lease / 1000,
            restarts=number("restarts"),
            idle=number("idle"),
            failures=failed,
            barred=sorted(name for name, count in failed.items() if limit and count >= limit),
            nodes=tuple(node_of(node) for node in ids),
        )

    def _statuses(self, ids: Sequence[str]) -> dict[str, dict[str, Any]]:
        """What each node says of itself."""
        names = [self._keys.status(node) for node in ids]
        replies = self._connection.call(lambda client: client.mget(names)) if names else []
        return {node: _status(node, reply) for node, reply in zip(ids, replies, strict=True)}

    def events(self, after: str = "-", count: int | None = None) -> list[Event]:
        """What happened, the oldest first.

        Args:
            after: id of the last event that the caller has seen; "-" for all.
            count: at most so many, the newest ones; None for all that Redis still has.

        Raises:
            RendezvousConnectionError, RendezvousStateError: as for :meth:`state`.
        """
        start = after if after == "-" else f"({after}"

        def read(client: Any) -> Any:
            return client.execute_command(
                "XREVRANGE", self._keys.events, "+", start, *(["COUNT", count] if count else [])
            )

        return [_event(text(i), fields) for i, fields in reversed(_entries(self._call(read)))]

    def follow(self, after: str, block: float = 1.0) -> Iterator[list[Event]]:
        """Yield what happens from now on, as it happens; an empty list when nothing did for ``block`` seconds.

        Args:
            after: id of the last event that the caller has seen; "0" for none.
            block: in seconds.
        """
        key = self._keys.events.encode()
        while True:
            entries: Entries = self._connection.read({key: after}, block).get(key, [])
            after = entries[-1][0] if entries else after
            yield [_event(i, fields) for i, fields in entries]

    def note(self, event: str, node: str, reason: str, detail: str = "") -> None:
        """Add an :class:`Event` to the stream, what is too long of it cut; twice, if the reply is lost."""
        fields = ["event", event, "node", node, "reason", reason[:MAX_REASON]]
        self._script(scripts.NOTE, [*fields, "detail", detail[:MAX_DETAIL]] if detail else fields)

    def find(self, named: str) -> Node:
        """The one node with this id (its last part may be left out), name or rank.

        Raises:
            UnknownNodeError: there is none, or several.
            UnknownRunError: there is no such run.
        """
        nodes = self.state().nodes
        found = [node for node in nodes if named in _called(node)]
        exact = [node for node in found if node.id == named]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            raise UnknownNodeError(
                f"{len(found)} nodes of run {self._keys.run_id!r} are called {named!r}: "
                f"{', '.join(node.id for node in found[:8])}; give an id."
            )
        known = ", ".join(node.id for node in nodes[:8]) or "none"
        raise UnknownNodeError(
            f"Run {self._keys.run_id!r} has no node {named!r}, by id, name or rank; it has {known}"
            + (", …." if len(nodes) > 8 else ".")
        )

    def drain(self, node: str, reason: str, timeout: float) -> bool:
        """Ask a node to let its workers save, and to leave.

        Args:
            node: its id.
            reason: by whom or what.
            timeout: how long the workers have to save, in seconds.

        Returns:
            Whether the node is there.
        """
        return bool(self._script(scripts.DRAIN, [node, reason[:MAX_REASON], round(1000 * timeout)]))

    def close(self, reason: str, *, stop: bool, ttl: float) -> str:
        """Close the run for ever (I5).

        Args:
            reason: by whom or what.
            stop: whether nodes have to end their workers; else those may finish.
            ttl: how long that is remembered if nobody has joined yet, in seconds.

        Returns:
            Why it was closed first.
        """
        return text(self._script(scripts.CLOSE, [reason[:MAX_REASON], round(1000 * ttl), int(stop)]))[:MAX_DETAIL]

    def failures(self, name: str) -> int:
        """In how many rounds in a row workers of a host failed first."""
        count = self._call(lambda client: client.hget(self._keys.failures, name))
        return _whole(text(count or b"")) or 0

    def forgive(self, name: str) -> bool:
        """Forget the failures of a host; returns whether there were any."""
        return bool(self._call(lambda client: client.hdel(self._keys.failures, name)))

    def readmit(self, name: str, by: str) -> bool:
        """Forget the failures of a host, say so in the events, and wake its nodes that are kept out for them.

        Args:
            name: of the host.
            by: by whom or what.

        Returns:
            Whether there were any.
        """
        return bool(self._script(scripts.READMIT, [name, by[:MAX_REASON]]))

    def _script(self, script: scripts.Script, args: Sequence[Any]) -> Any:
        return self._checked(lambda: script(self._connection, [*self._keys.types], args))

    def _call(self, operation: Callable[[Any], T]) -> T:
        return self._checked(lambda: self._connection.call(operation))

    def _checked(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except RendezvousStateError as e:
            require_keys_of_types(self._connection, self._keys.types, e)


def list_runs(connection: Connection, prefix: str) -> list[str]:
    """Ids of all runs under a key prefix.

    Raises:
        RendezvousConnectionError: Redis could not be reached, or this user may see one run's keys only.
    """
    pattern = f"{check_key_part('key prefix', prefix)}:{{*}}:run"

    def scan(client: Any) -> list[bytes]:
        options = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
        return list(client.scan_iter(match=pattern, count=1000, **options))

    found = connection.call(scan)
    return sorted({text(key)[len(prefix) + 2 : -len("}:run")] for key in found})


def _called(node: Node) -> tuple[str, ...]:
    """By what people may name a node."""
    return (node.id, node.id.rpartition("-")[0], node.name, *([] if node.rank is None else [str(node.rank)]))


def _whole(told: str) -> int | None:
    """A count or a time that our scripts wrote; None if it can be neither."""
    return int(told) if told.isascii() and told.isdecimal() and len(told) < 19 else None


def _score(told: str) -> int:
    """A score of a sorted set as a whole number; somebody may have written one that is infinite."""
    return int(min(max(float(told), -LARGEST), LARGEST))


def _pairs(reply: Sequence[Any]) -> dict[str, str]:
    return {text(k): text(v) for k, v in zip(reply[::2], reply[1::2], strict=True)}


def _entries(reply: Any) -> list[tuple[bytes, dict[str, str]]]:
    """Entries of a stream, as XRANGE gives them."""
    return [
        (
            i,
            {
                text(k): text(v)
                for k, v in (
                    fields.items() if isinstance(fields, dict) else zip(fields[::2], fields[1::2], strict=True)
                )
            },
        )
        for i, fields in reply
    ]


def _status(node: str, reply: bytes | str | None) -> dict[str, Any]:
    try:
        told = json.loads(reply or b"{}") if len(reply or b"") <= MAX_STATUS else {}
    except (ValueError, RecursionError):
        told = {}
    status = told if isinstance(told, dict) else {}
    strings = {"name": node.rsplit("-", 2)[0], "host": "", "state": ""}
    known = {k: v[:MAX_KEY_PART] if isinstance(v := status.get(k), str) else default for k, default in strings.items()}
    return status | known


def _event(entry: str, fields: Mapping[str, str]) -> Event:
    ms = entry.partition("-")[0]
    numbers = [_whole(fields.get(name, "0")) or 0 for name in ("epoch", "size")]
    words = {name: fields.get(name, "")[:MAX_DETAIL] for name in ("event", "node", "reason", "detail")}
    return Event(id=entry, time=int(ms) / 1000, epoch=numbers[0], size=numbers[1], **words)
