"""A run from outside: how tools and agents read it and change it without being a node of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeVar

from redis import RedisCluster
from redis.exceptions import NoPermissionError

from redelastic.redis import scripts
from redelastic.redis.connection import Connection, Entries, place_of, require_keys_of_types, text
from redelastic.redis.errors import CorruptStateError, UnavailableError
from redelastic.redis.keys import DEFAULT_TTL, SAVED, RunKeys, check_key_part

from .curves import MEASURES, MINUTE, MINUTES, Curves
from .events import EXCLUDED, MAX_REASON, MAX_TEXT, Event, decode, decode_cause, last_step, number_in
from .records import Node, Run, RunReply, decode_run, pairs_of

T = TypeVar("T")


class UnknownRunError(LookupError):
    """Redis has no run with that id."""


class UnknownNodeError(LookupError):
    """No node of the run matches, or several do."""


BLOCK: Final = 1.0  # how long to wait for events at a time, in seconds
STEP_EVENTS: Final = 256  # newest events in which to look for a step: the starts of 10,000 nodes make 172
RESAVE_INTERVAL: Final = 10.0  # seconds after which another request makes workers save again


class SaveRequest(NamedTuple):
    """A request to all workers of a round to save."""

    epoch: int
    size: int
    place: tuple[int, int]  # among the requests of the round


class RunControl:
    """Reads and changes one run, for a caller that need not be a node of it.

    Args:
        connection: to Redis.
        keys: of the run.
        timeout: for how long to retry a call, in seconds; None for the connection's ``read_timeout``.
    """

    def __init__(self, connection: Connection, keys: RunKeys, timeout: float | None = None) -> None:
        self._connection = connection
        self._keys = keys
        self._timeout = timeout

    def state(self) -> Run:
        """Everything known about the run now.

        Raises:
            UnknownRunError: Redis has nothing of it.
            UnavailableError: Redis could not be reached, or refused the call.
            CorruptStateError: a key of the run holds something that redelastic did not write.
        """
        found = self._script(scripts.INSPECT, [])
        with _of_redis(self._connection):
            reply = RunReply.decode(found)
            names = [self._keys.status(node) for node in reply.nodes]
            statuses = self._call(lambda client: client.mget(names)) if names else []
            run = decode_run(self._keys, reply, dict(zip(reply.nodes, statuses, strict=True)))
        if run is None:
            raise UnknownRunError(
                f"Redis at {self._connection.name} has no run {self._keys.run_id!r} with the key prefix "
                f"{self._keys.prefix!r}; `redelastic list` lists the runs. A run's keys expire once "
                "the run has been unused for its ttl."
            )
        return run

    def events(self, after: str = "-", count: int | None = None) -> list[Event]:
        """The run's events, oldest first.

        Args:
            after: id of the last event that the caller has seen; "-" for all.
            count: how many at most, the newest ones; None for all that Redis still has.

        Raises:
            UnavailableError, CorruptStateError: as for :meth:`state`.
        """
        start = after if after == "-" else f"({after}"

        def read(client: Any) -> Any:
            return client.execute_command(
                "XREVRANGE", self._keys.events, "+", start, *(["COUNT", count] if count else [])
            )

        with _of_redis(self._connection):
            return [decode(text(entry), pairs_of(fields)) for entry, fields in self._call(read)][::-1]

    def follow(self, after: str) -> Iterator[list[Event] | UnavailableError]:
        """Yield events as they happen, for ever; an empty list when none happened for :data:`BLOCK` seconds.

        While Redis is away, yields the error that says so, as often.

        Args:
            after: id of the last event that the caller has seen; "0" for none.
        """
        key = self._keys.events.encode()
        while True:
            try:
                with _of_redis(self._connection):
                    entries: Entries = self._connection.read({key: after}, BLOCK).get(key, [])
                    events = [decode(entry, fields) for entry, fields in entries]
            except UnavailableError as e:  # noqa: PERF203  (it waits anyway)
                yield e
                time.sleep(BLOCK)
            else:
                after = events[-1].id if events else after
                yield events

    def note(self, event: Event) -> None:
        """Add an event of a node to the stream, its fields cut if too long; added twice if the reply is lost.

        When many nodes report the same at once, most are merged into one, as ``lua/events.lua`` says for which kinds.
        """
        self._script(scripts.NOTE, [event.event, event.node, *(field[:MAX_TEXT] for field in event.pairs())])

    def find(self, named: str) -> Node:
        """The only node with this id (its last part may be left out), name or rank.

        Raises:
            UnknownNodeError: there is none, or several.
            UnknownRunError: there is no such run.
        """
        nodes = self.state().nodes
        found = [node for node in nodes if named in _names_of(node)]
        exact = [node for node in found if node.id == named]
        if len(exact or found) == 1:
            return (exact or found)[0]
        if found:
            raise UnknownNodeError(
                f"{len(found)} nodes of run {self._keys.run_id!r} are named {named!r}: "
                f"{', '.join(node.id for node in found[:8])}; give an id."
            )
        known = ", ".join(node.id for node in nodes[:8]) or "none"
        raise UnknownNodeError(
            f"Run {self._keys.run_id!r} has no node {named!r}, by id, name or rank; it has {known}"
            + (", …." if len(nodes) > 8 else ".")
        )

    def drain(self, node: str, reason: str, timeout: float) -> bool:
        """Ask a node to let its workers save and then to leave.

        Args:
            node: the node's id.
            reason: who or what asked.
            timeout: how long the workers have to save, in seconds.

        Returns:
            Whether the node exists.
        """
        return bool(self._script(scripts.DRAIN, [node, reason[:MAX_REASON], round(1000 * timeout)]))

    def save(self, reason: str, timeout: float) -> SaveRequest | None:
        """Ask the workers of all members to save; they go on training.

        Args:
            reason: who or what asked.
            timeout: how long they have, in seconds.

        Returns:
            What :meth:`unsaved` takes; None if no node holds a round.
        """
        reply = self._script(scripts.SAVE, [reason[:MAX_REASON], round(1000 * timeout)])
        if not reply:
            return None
        with _of_redis(self._connection):
            epoch, size, place = reply
            return SaveRequest(int(epoch), int(size), place_of(place))

    def unsaved(self, asked: SaveRequest) -> list[int]:
        """The ranks of the nodes whose workers are not known to have saved for a request."""
        names = [SAVED.format(rank) for rank in range(asked.size)]
        places = self._call(lambda client: client.hmget(self._keys.store(asked.epoch).data, names))
        return [rank for rank, place in enumerate(places) if place_of(place or b"") < asked.place]

    def close(self, reason: str, *, stop: bool, ttl: float = DEFAULT_TTL) -> Event:
        """Close the run (I5).

        Args:
            reason: who or what closed it.
            stop: whether nodes must end their workers; otherwise the workers may finish.
            ttl: how long to remember this if no node has joined yet, in seconds.

        Returns:
            Why it was first closed.
        """
        asked = ["cause", "asked", "reason", reason[:MAX_REASON]]
        with _of_redis(self._connection):
            cause = decode_cause(text(self._script(scripts.CLOSE, [round(1000 * ttl), int(stop), "", *asked])))
        return cause or Event(event="unknown")

    def failures(self, name: str) -> int:
        """How many rounds in a row a worker of this host was the first to fail."""
        return _count_of(self._call(lambda client: client.hget(self._keys.failures, name)))

    def restarts(self) -> int:
        """The job's restarts after worker failures, except where a node was lost meanwhile."""
        return _count_of(self._call(lambda client: client.hget(self._keys.run, "restarts")))

    def last_step(self) -> int | None:
        """The highest step that the newest events know; None if they know none."""
        return last_step(self.events(count=STEP_EVENTS))

    def measure(self, values: Mapping[str, float]) -> None:
        """Add what a node has measured to the run's curves; lost if Redis is away.

        Args:
            values: as :func:`redelastic.monitoring.curves.measured` returns them.
        """
        words = [word for name, value in values.items() for word in (name, MEASURES[name], value)]
        fixed = [round(1000 * MINUTE * MINUTES), MINUTES]
        scripts.CURVE(self._connection, [self._keys.curves], [*fixed, *words], timeout=0)

    def read_curves(self, curves: Curves, now: float) -> None:
        """Read the minutes that are missing; a key that holds something else has none.

        Args:
            curves: of this run.
            now: on the server's clock, in seconds.
        """
        minutes = curves.missing(now)
        if not minutes:
            return
        command = (b"HMGET", self._keys.curves.encode(), *(b"%d" % minute for minute in minutes))
        with contextlib.suppress(CorruptStateError):
            [found] = self._connection.exchange(command, timeout=self._timeout)
            curves.add(minutes, [text(value or b"") for value in found])

    def exclude(self, name: str, ttl: float = DEFAULT_TTL) -> None:
        """Keep a host out of the run until it is readmitted, if its nodes heed that.

        Args:
            name: the host's name.
            ttl: how long to remember this if no node has joined yet, in seconds.
        """
        key = self._keys.failures
        self._call(lambda client: client.execute_command("HSET", key, name, EXCLUDED))
        self._call(lambda client: client.execute_command("PEXPIRE", key, round(1000 * ttl)))

    def readmit(self, name: str, by: str) -> bool:
        """Forget a host's failures, record that as an event, and wake its nodes that are barred for them.

        Args:
            name: the host's name.
            by: who or what asked.

        Returns:
            Whether there were any.
        """
        return bool(self._script(scripts.READMIT, [name, by[:MAX_REASON]]))

    def _script(self, script: scripts.Script, args: Sequence[Any]) -> Any:
        return self._checked(lambda: script(self._connection, [*self._keys.types], args, self._timeout))

    def _call(self, operation: Callable[[Any], T]) -> T:
        return self._checked(lambda: self._connection.call(operation, self._timeout))

    def _checked(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except CorruptStateError as e:
            require_keys_of_types(self._connection, self._keys.types, e)


def list_runs(connection: Connection, prefix: str) -> list[str]:
    """The ids of all runs under a key prefix.

    Raises:
        UnavailableError: Redis could not be reached, or this user may only see one run's keys.
    """
    pattern = f"{check_key_part('key prefix', prefix)}:{{*}}:run"

    def scan(client: Any) -> list[bytes]:
        options = {"target_nodes": RedisCluster.PRIMARIES} if isinstance(client, RedisCluster) else {}
        return list(client.scan_iter(match=pattern, count=1000, **options))

    try:
        with _of_redis(connection):
            found = connection.call(scan)
    except UnavailableError as e:
        if not isinstance(e.__cause__, NoPermissionError):
            raise
        raise UnavailableError(
            f"Redis at {connection.name} does not let this user list runs: that needs ~{prefix}:* and "
            "+scan, and a job's own user has neither. Name the run: `redelastic status RUN`."
        ) from e
    return sorted({text(key)[len(prefix) + 2 : -len("}:run")] for key in found})


@contextlib.contextmanager
def _of_redis(connection: Connection) -> Iterator[None]:
    """Report a reply of a shape that Redis does not send there."""
    try:
        yield
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as e:
        raise UnavailableError(
            f"What answers at {connection.name} does not answer as Redis does ({type(e).__name__}: {str(e)[:200]}): "
            "check the endpoint, and what is between it and this host."
        ) from e


def _names_of(node: Node) -> tuple[str, ...]:
    """The names by which people may refer to a node."""
    return (node.id, node.id.rpartition("-")[0], node.name, *([] if node.rank is None else [str(node.rank)]))


def _count_of(field: bytes | str | None) -> int:
    """A count that may be missing; 0 if it is not a number."""
    return number_in(text(field or b"")) or 0
