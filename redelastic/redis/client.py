"""redis-py's client with a shorter path to its connections: two fifths of the CPU time for a command (`PING`)."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import hiredis
import redis
from redis.connection import Connection

_MULTI: Final = hiredis.pack_command(("MULTI",))
_EXEC: Final = hiredis.pack_command(("EXEC",))


def is_of_replica(error: BaseException) -> bool:
    """Whether a server says that it is a read-only replica, even from within a script."""
    return isinstance(error, redis.ReadOnlyError) or "READONLY" in str(error)


def _is_denied(error: object) -> bool:
    """Whether a server denies us a command: by its rules, or because it was renamed."""
    return isinstance(error, redis.ResponseError) and (
        isinstance(error, redis.exceptions.NoPermissionError)
        or any(words in str(error) for words in ("NOPERM", "unknown command"))
    )


class DirectClient(redis.Redis):
    """A client that keeps the connections it has used, and takes the last one first.

    redis-py returns a connection to its pool after each command and asks the kernel before the next whether it is still
    up; it does its own retries and counting. Here a broken connection is noticed by the command that fails on it, and
    the caller repeats that: see :class:`redelastic.redis.connection.Connection`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._idle: deque[Connection] = deque()
        self._idle_pid = os.getpid()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, and return the reply in redis-py's form."""
        connection = self._take()
        try:
            connection.send_packed_command(_packed(connection, args), check_health=False)
            if options:
                reply = self.parse_response(connection, args[0], **options)
            else:  # as that does, but without the look-up in redis-py's own kind of dict, which takes 0.4 us
                reply = connection.read_response()
                callback = dict.get(self.response_callbacks, args[0].upper())
                reply = reply if callback is None else callback(reply)
        except BaseException as e:
            self._give_up(connection, e)
            raise
        self._idle.append(connection)
        return reply

    def execute_both(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, Any]:
        """Send two commands of strings and bytes together, and return both replies as they are."""
        connection = self._take()
        try:
            packed = hiredis.pack_command(first) + hiredis.pack_command(second)
            connection.send_packed_command([packed], check_health=False)
            replies = connection.read_response(), connection.read_response()
        except BaseException as e:
            connection.disconnect()  # the other reply may not have been read
            self._give_up(connection, e)
            raise
        self._idle.append(connection)
        return replies

    def may_transact(self) -> bool:
        """Whether the user may use transactions."""
        try:
            self.execute_both(("MULTI",), ("EXEC",))
        except redis.ResponseError as e:
            if _is_denied(e):
                return False
            raise
        return True

    def transact(self, commands: Sequence[bytes | list[bytes]]) -> bool:
        """Send packed commands as one transaction; raises the first error among their replies.

        Returns:
            Whether the user may still use transactions. If not, any of the commands may have been run, or none.
        """
        connection, replies = self._take(), []
        parts = [_MULTI]
        for command in (*commands, _EXEC):
            first, *others = [command] if isinstance(command, bytes) else command
            parts[-1] += first  # small parts go out together
            parts += others
        try:
            connection.send_packed_command(parts, check_health=False)
            for _ in range(len(commands) + 2):
                try:
                    replies.append(connection.read_response())
                except redis.ResponseError as e:  # noqa: PERF203  # all must be read
                    replies.append(e)
        except BaseException as e:
            self._give_up(connection, e)
            raise
        done = replies.pop()
        for reply in (*replies, *(done if isinstance(done, list) else [done])):
            if isinstance(reply, Exception):
                connection.disconnect()  # if EXEC was refused, the transaction may still be open
                self._give_up(connection, reply)
                if _is_denied(replies[0]) or _is_denied(done):
                    return False
                raise reply
        self._idle.append(connection)
        return True

    def _take(self) -> Connection:
        if self._idle_pid != os.getpid():  # a forked child: these connections are its parent's
            self._idle, self._idle_pid = deque(), os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self.connection_pool.get_connection()

    def _give_up(self, connection: Connection, error: BaseException) -> None:
        """Dispose of a connection on which a command failed; it is kept if the server only refused the command."""
        if not isinstance(error, redis.ResponseError):
            self._discard(connection)
            with contextlib.suppress(IndexError):
                while True:  # the others lead to the same server; each is popped, so that no other thread has it
                    self._discard(self._idle.pop())
        elif is_of_replica(error) or "NOREPLICAS" in str(error):
            # A master that became a replica, or lost its own: a new connection goes where its name leads now.
            self._discard(connection)
        else:
            self._idle.append(connection)

    def _discard(self, connection: Connection) -> None:
        connection.disconnect()
        self.connection_pool.release(connection)


def packed_uncopied(words: Sequence[bytes], large: int) -> list[bytes]:
    """As ``hiredis.pack_command``, but in parts: each word of ``large`` bytes or more is its own part, not copied."""
    parts, small = [], [b"*%d\r\n" % len(words)]
    for word in words:
        small.append(b"$%d\r\n" % len(word))
        if len(word) >= large:
            parts += [b"".join(small), word]
            small = []
        else:
            small.append(word)
        small.append(b"\r\n")
    return [*parts, b"".join(small)]


def _packed(connection: Connection, args: tuple[Any, ...]) -> list[bytes]:
    """Pack a command as redis-py does, which first looks at each argument, and splits a command's words."""
    try:
        if " " not in args[0]:
            return [hiredis.pack_command(args)]
    except TypeError:  # a type that hiredis does not know: redis-py rejects it, or turns it into bytes
        pass
    packed: list[bytes] = connection.pack_command(*args)
    return packed
