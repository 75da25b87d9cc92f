"""The seam to Redis: commands go out, replies come back, over redis-py's connections or its Cluster client."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol, TypeAlias

import hiredis
import redis
from redis.cluster import RedisCluster

Client: TypeAlias = "redis.Redis | RedisCluster"
Command: TypeAlias = "tuple[bytes, ...]"
Word: TypeAlias = "str | bytes | int | float"

_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]  # its stub has tuples of one word
_PIECE: Final = 2**18  # bytes: each piece of a long command may take the socket's time-out


class Wire(Protocol):
    """The interface through which a connection sends commands to Redis."""

    def exchange(self, *commands: Command) -> list[Any]:
        """Send commands, and return their replies as Redis sent them; raises the first error among them."""

    def close(self) -> None:
        """Close the connections that the wire itself holds."""


class PoolWire:
    """Exchanges over connections that it takes from a redis-py pool and keeps; the last one used is used first.

    redis-py returns a connection to its pool after each command, and asks the kernel before the next one whether it is
    still up: half of the CPU time of a command. Here a broken connection fails the command, and
    :class:`redelastic.redis.connection.Connection` repeats it.
    """

    def __init__(self, pool: redis.ConnectionPool) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()
        self._pid = os.getpid()

    def exchange(self, *commands: Command) -> list[Any]:
        """See :class:`Wire`."""
        handled = sys.exc_info()[1]
        connection = self._take()
        try:
            connection.send_packed_command(_packed(commands), check_health=False)
            if len(commands) == 1:
                replies = [connection.read_response(disable_decoding=True)]
            else:
                replies = _read(connection, len(commands))
        except redis.ResponseError as e:
            if _leaves_master(e):
                self._give_up(connection)
            else:
                self._idle.append(connection)
            raise
        except BaseException as e:
            closed = not connection.is_connected
            self._give_up(connection)
            if not _is_of_handler(e):
                for below in _causes(e, handled):
                    if _is_of_handler(below):
                        raise below from None  # redis-py took it for a lost connection
                if closed and isinstance(e, AttributeError | ValueError):
                    raise redis.ConnectionError("Another thread closed the connection.") from e
            raise
        self._idle.append(connection)
        return replies

    def close(self) -> None:
        """Close the idle connections."""
        try:
            while True:  # each is popped, so that no other thread has it
                self._discard(self._idle.pop())
        except IndexError:
            pass

    def _take(self) -> Any:
        if self._pid != os.getpid():  # the idle connections of a forked process are its parent's
            self._idle, self._pid = deque(), os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            return self._pool.get_connection()

    def _give_up(self, connection: Any) -> None:
        """Discard a connection that failed, and the idle ones, which lead to the same server."""
        self._discard(connection)
        self.close()

    def _discard(self, connection: Any) -> None:
        connection.disconnect()
        self._pool.release(connection)


class ClientWire:
    """Exchanges through redis-py's Cluster client, or through a user's own client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def exchange(self, *commands: Command) -> list[Any]:
        """See :class:`Wire`."""
        return [self._execute(*command) for command in commands]

    def close(self) -> None:
        """See :class:`Wire`; it holds none, as the client closes its own."""

    def _execute(self, verb: bytes, *words: bytes) -> Any:
        name = verb.decode()  # redis-py's Cluster client does not take a name in bytes
        if name != "XREAD":
            return self._client.execute_command(name, *words)
        options: dict[str, Any] = {}
        if isinstance(self._client, RedisCluster):  # the client would ask the server for the keys of each XREAD
            stream = words[words.index(b"STREAMS") + 1]
            options["target_nodes"] = self._client.get_node_from_key(stream.decode(errors="surrogateescape"))
        return _unparsed(self._client.execute_command(name, *words, **options))


def encoded(words: Sequence[Word]) -> Command:
    """Words of a command as bytes; raises :exc:`redis.DataError` for one that is neither text, bytes nor a number.

    hiredis crashes if a signal handler raises while it turns a number into text, so it gets bytes alone.
    """
    return tuple([word if type(word) is bytes else _encoded(word) for word in words])


def _encoded(word: Word) -> bytes:
    if isinstance(word, str):
        return word.encode(errors="backslashreplace")  # such as a file's name that is not UTF-8
    if type(word) in (int, float):
        return repr(word).encode()
    if isinstance(word, bytes | bytearray | memoryview):
        return bytes(word)
    raise redis.DataError(f"A word of a command is {word!r}: give text, bytes or a number.")


class Packer:
    """Packs the commands that redis-py itself sends; see :func:`encoded`."""

    @staticmethod
    def pack(name: str | bytes, *words: Word) -> list[bytes]:
        """See redis-py; a name may consist of two words."""
        return [_pack(encoded((*name.split(), *words)))]


def log_in(connection: Any) -> None:
    """Log in as redis-py does, and close the connection if that is interrupted.

    redis-py would return it to its pool, and its next user would read the login's replies.
    """
    try:
        connection.on_connect()
    except BaseException:
        connection.disconnect()
        raise


def is_of_replica(error: BaseException) -> bool:
    """Whether the server is a read-only replica according to an error, even one from within a script."""
    return isinstance(error, redis.ReadOnlyError) or "READONLY" in str(error)


def _leaves_master(error: redis.ResponseError) -> bool:
    """Whether a new connection may lead to another master: this server became a replica, or has lost its replicas."""
    return is_of_replica(error) or "NOREPLICAS" in str(error)


def _packed(commands: Sequence[Command]) -> list[Any]:
    packed = b"".join(map(_pack, commands))
    if len(packed) <= _PIECE:
        return [packed]
    whole = memoryview(packed)
    return [whole[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]


def _read(connection: Any, count: int) -> list[Any]:
    """Read all replies, so that none is left for the next command; raises the first error among them."""
    replies, refused = [], None
    try:
        for _ in range(count):
            try:
                replies.append(connection.read_response(disable_decoding=True))
            except redis.ResponseError as e:  # noqa: PERF203
                refused = refused or e
        if refused is not None:
            raise refused
        return replies
    finally:
        del refused  # an error must not hold its callers' variables through its own traceback


def _is_of_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error, such as an alarm's time limit: Redis is not its cause."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _causes(error: BaseException, handled: BaseException | None) -> Iterator[BaseException]:
    """The causes of an error, except for one that was being handled before."""
    below = error.__cause__ or error.__context__
    while below is not None and below is not handled:
        yield below
        below = below.__cause__ or below.__context__


def _unparsed(reply: Any) -> dict[bytes, list[Any]]:
    """The reply to an ``XREAD`` as Redis sent it, from what redis-py made of it."""
    found = {}
    for name, entries in dict(reply or ()).items():
        flat = entries[0] if isinstance(entries[0], list) else entries  # RESP3 nests them in one more list
        found[name] = [(i, [word for pair in fields.items() for word in pair]) for i, fields in flat]
    return found
