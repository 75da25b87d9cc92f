"""A run seen from outside: what people, tools and agents read of it and ask of it, without a place in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeVar

from redis import RedisCluster
from redis.exceptions import NoPermissionError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError

from redelastic.redis import scripts
from redelastic.redis.connection import Connection, Entries, require_keys_of_types, text
from redelastic.redis.keys import RunKeys, check_key_part

from .records import MAX_DETAIL, Event, Node, Run, decode_event, decode_events, decode_run, ids_in, whole

T = TypeVar("T")

MAX_REASON: Final = 1_000  # characters of an event's reason


class UnknownRunError(LookupError):
    """Redis holds no run of that id."""


class UnknownNodeError(LookupError):
    """The run has no such node, or several."""


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
        ids = ids_in(reply)
        names = [self._keys.status(node) for node in ids]
        statuses = self._connection.call(lambda client: client.mget(names)) if names else []
        run = decode_run(self._keys, reply, dict(zip(ids, statuses, strict=True)))
        if run is None:
            raise UnknownRunError(
                f"Redis at {self._connection.name} has no run {self._keys.run_id!r} with the key prefix "
                f"{self._keys.prefix!r}; `redelastic list` lists the runs. A run's keys expire after its ttl, once "
                "nobody uses it."
            )
        return run

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

        return decode_events(self._call(read))[::-1]

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
            yield [decode_event(i, fields) for i, fields in entries]

    def note(self, event: str, node: str, reason: str, detail: str = "") -> None:
        """Add an :class:`Event` to the stream, what is too long of it cut; twice, if the reply is lost.

        Where many nodes tell of the same kind of event, most are told of together, without their details.
        """
        self._script(scripts.NOTE, [event, node, reason[:MAX_REASON], detail[:MAX_DETAIL]])

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
                f"{len(found)} nodes of run {self._keys.run_id!r} are named {named!r}: "
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
        return _whole_of(self._call(lambda client: client.hget(self._keys.failures, name)))

    def restarts(self) -> int:
        """Of the job, for failed workers; those for a node that was lost meanwhile are not counted."""
        return _whole_of(self._call(lambda client: client.hget(self._keys.run, "restarts")))

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

    try:
        found = connection.call(scan)
    except RendezvousConnectionError as e:
        if not isinstance(e.__cause__, NoPermissionError):
            raise
        raise RendezvousConnectionError(
            f"Redis at {connection.name} does not let this user list runs: that needs ~{prefix}:* and "
            "+scan, and a job's own user has neither. Name the run: `redelastic status RUN`."
        ) from e
    return sorted({text(key)[len(prefix) + 2 : -len("}:run")] for key in found})


def _called(node: Node) -> tuple[str, ...]:
    """By what people may name a node."""
    return (node.id, node.id.rpartition("-")[0], node.name, *([] if node.rank is None else [str(node.rank)]))


def _whole_of(field: bytes | str | None) -> int:
    """A count that may not be there; 0 if it is none."""
    return whole(text(field or b"")) or 0
