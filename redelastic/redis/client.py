"""redis-py's client with a shorter path to its connections: two thirds of the CPU time for a command (`PING`)."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Final

import hiredis
import redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.connection import Connection
from redis.sentinel import SentinelManagedConnection

WORD: Final = b"$%d\r\n%b\r\n"  # of a command, as it is sent: its length, and itself
_START: Final = 2**14  # bytes: what a short reply needs; redis-py reads the rest of a longer one
_VALUES: Final = frozenset((bytes, int, list, type(None), dict, float, bool, set))  # neither errors nor pushed
_MULTI: Final = b"*1\r\n$5\r\nMULTI\r\n"
_EXEC: Final = b"*1\r\n$4\r\nEXEC\r\n"


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
        if not options and (packed := _packed(args)):
            reply = self.exchange(packed)[0]
            callback = dict.get(self.response_callbacks, args[0].upper())  # `parse_response` takes 0.4 us to find it
            return reply if callback is None else callback(reply)
        connection = self._take()
        try:
            send(connection, b"".join(connection.pack_command(*args)))
            reply = self.parse_response(connection, args[0], **options)
        except BaseException as e:
            self._give_up(connection, e)
            raise
        self._idle.append(connection)
        return reply

    def exchange(self, packed: bytes, count: int = 1) -> list[Any]:
        """Send packed commands, and return their replies as they came, not in redis-py's form.

        Args:
            packed: one or more commands, one after the other.
            count: how many they are.
        """
        connection = self._take()
        try:
            send(connection, packed)
            replies = [read(connection) for _ in range(count)]
        except BaseException as e:
            if count > 1:
                connection.disconnect()  # the other replies may not have been read
            self._give_up(connection, e)
            raise
        self._idle.append(connection)
        return replies

    def may_transact(self) -> bool:
        """Whether the user may use transactions."""
        try:
            self.exchange(_MULTI + _EXEC, 2)
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
        parts = [[_MULTI]]
        for command in (*commands, _EXEC):
            first, *others = [command] if isinstance(command, bytes) else command
            parts[-1].append(first)  # small parts go out together
            parts += [[other] for other in others]
        try:
            for part in parts:
                send(connection, part[0] if len(part) == 1 else b"".join(part))
            for _ in range(len(commands) + 2):
                try:
                    replies.append(read(connection))
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

    def _take(self) -> Any:
        if self._idle_pid != os.getpid():  # a forked child: these connections are its parent's
            self._idle, self._idle_pid = deque(), os.getpid()
        try:
            connection: Any = self._idle.pop()
        except IndexError:
            return self.connection_pool.get_connection()
        if connection._sock is None:  # since the client was closed
            self.connection_pool.release(connection)
            return self.connection_pool.get_connection()
        return connection

    def _give_up(self, connection: Connection, error: BaseException) -> None:
        """Dispose of a connection on which a command failed; it is kept if the server only refused the command."""
        refused = isinstance(error, redis.ResponseError)
        if refused and not (is_of_replica(error) or "NOREPLICAS" in str(error)):
            self._idle.append(connection)
            return
        # It is lost, or leads to a master that became a replica, or lost its own: a new one follows the name.
        self._discard(connection)
        with contextlib.suppress(IndexError):
            while True:  # the others lead to the same server; each is popped, so that no other thread has it
                self._discard(self._idle.pop())

    def _discard(self, connection: Connection) -> None:
        connection.disconnect()
        self.connection_pool.release(connection)


# A process that has waited finds each function cold, and fetching it takes longer than running it. So these do in few
# steps what takes redis-py many; only long replies are left to it.
# ruff: noqa: SLF001  # of redis-py's connections; pyproject.toml admits one major version, which tests/redis covers


def pack(words: Sequence[Any]) -> bytes:
    """A command as it is sent; raises TypeError for words that are neither text, bytes nor numbers."""
    return pack_bytes([word if type(word) is bytes else _encoded(word) for word in words])


def pack_bytes(words: Sequence[bytes]) -> bytes:
    """As :func:`pack`, for bytes alone."""
    return (b"*%d\r\n" % len(words) + WORD * len(words)) % counted(words)


def counted(words: Iterable[bytes]) -> tuple[int | bytes, ...]:
    """What :data:`WORD` takes for each word."""
    found: list[int | bytes] = []
    for word in words:
        found.append(len(word))
        found.append(word)
    return tuple(found)


def _encoded(word: Any) -> bytes:
    if isinstance(word, str):
        return word.encode()
    if type(word) in (int, float):
        return repr(word).encode()
    if isinstance(word, bytes):
        return word
    raise TypeError(f"a word of a command is {word!r}")


def send(connection: Any, packed: bytes) -> None:
    """Send a packed command; raises as redis-py's ``send_packed_command``, and where that would connect again."""
    sock = connection._sock
    if sock is None:  # on a new connection, replies would be taken for those of earlier commands
        raise redis.ConnectionError("The connection was closed.")
    try:
        sock.sendall(packed)
    except OSError as e:
        raise _redis_pys(e) from e


def read(connection: Any) -> Any:
    """The next reply; raises as redis-py's ``read_response``."""
    while True:
        sock, reader = connection._sock, connection._parser._reader
        if sock is None or reader is None:
            raise redis.ConnectionError("The connection was closed.")
        reply = reader.gets()
        if reply is NOT_ENOUGH_DATA:
            try:
                start = sock.recv(_START)
            except (OSError, ValueError) as e:  # ValueError: of TLS, where another thread has closed it
                raise _redis_pys(e) from e
            if not start:
                raise redis.ConnectionError("The server closed the connection.")
            reader.feed(start)
            reply = reader.gets()
            if reply is NOT_ENOUGH_DATA:
                return connection.read_response()
        if type(reply) in _VALUES:
            return reply
        try:
            if not isinstance(reply, hiredis.PushNotification):
                return _raised(connection, reply)
            connection._parser.handle_push_response(reply)
        finally:
            del reply  # an error must not hold itself, and all callers' variables, through its traceback


def _raised(connection: Any, reply: Any) -> Any:
    """Raise a reply that is an error; returns any other."""
    try:
        if isinstance(reply, redis.ReadOnlyError) and isinstance(connection, SentinelManagedConnection):
            raise redis.ConnectionError("The previous master is now a replica.") from reply
        if isinstance(reply, Exception):
            raise reply
        return reply
    finally:
        del reply


def _redis_pys(error: Exception) -> redis.RedisError:
    return redis.TimeoutError("Timeout") if isinstance(error, TimeoutError) else redis.ConnectionError(str(error))


def packed_uncopied(words: Sequence[bytes], large: int) -> list[bytes]:
    """As :func:`pack_bytes`, but in parts: each word of ``large`` bytes or more is its own part, not copied."""
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


def _packed(args: tuple[Any, ...]) -> bytes | None:
    """A packed command; None where redis-py does more: it splits a name of two words, and rejects some types."""
    try:
        return None if " " in args[0] else pack(args)
    except TypeError:
        return None
