"""A worker's log as it grows: a person asks for it in Redis, and the node's agent puts its last lines there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final, NamedTuple

from redelastic.redis.connection import text

from .events import number_in
from .wording import json_in

if TYPE_CHECKING:
    from redelastic.redis.connection import Connection
    from redelastic.redis.keys import RunKeys

MAX_LINES: Final = 16_384  # characters that are read; an agent writes a third
INTERVAL: Final = 1.0  # between two looks for a request, in seconds
ASKED_FOR: Final = 10.0  # how long a request holds, and an answer is kept, in seconds: a person's page asks again


class LiveLog(NamedTuple):
    """The end of a worker's log.

    Attributes:
        local_rank: of the worker.
        path: of the log on the node; empty if its output goes elsewhere.
        lines: the last ones, without secrets.
    """

    local_rank: int
    path: str
    lines: str


class LiveLogs:
    """Requests for logs of a run's workers, and the answers.

    Args:
        connection: to Redis.
        keys: of the run.
    """

    def __init__(self, connection: Connection, keys: RunKeys) -> None:
        self._connection, self._keys = connection, keys

    def ask(self, node: str, local_rank: int) -> LiveLog | None:
        """Ask a node for a worker's log, for some seconds; returns the last answer, if it is of this worker.

        Raises:
            RedelasticError: Redis cannot be reached, or a key holds something else.
        """
        request, found = (key.encode() for key in self._keys.live_log(node))
        until = (b"PX", b"%d" % round(1000 * ASKED_FOR))
        _, reply = self._connection.exchange((b"SET", request, b"%d" % local_rank, *until), (b"GET", found))
        match json_in(reply or b""):
            case [int(rank), str(path), str(lines)] if rank == local_rank:
                return LiveLog(rank, path, lines[-MAX_LINES:])
        return None

    def wanted(self, node: str) -> int | None:
        """The local rank of the worker of this node whose log somebody asks for; None if nobody does."""
        [reply] = self._connection.exchange((b"GET", self._keys.live_log(node)[0].encode()), timeout=0)
        return None if reply is None else number_in(text(reply))

    def answer(self, node: str, log: LiveLog) -> None:
        """Put the end of a log where :meth:`ask` finds it."""
        words = self._keys.live_log(node)[1].encode(), json.dumps(log).encode()
        self._connection.exchange((b"SET", *words, b"PX", b"%d" % round(1000 * ASKED_FOR)), timeout=0)
