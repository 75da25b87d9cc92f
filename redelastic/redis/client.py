"""redis-py's client with a shorter path to its connections: half of the CPU time for a command (`PING`)."""

from __future__ import annotations

import contextlib
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from socket import SO_RCVLOWAT, SOL_SOCKET, socket
from typing import Any, Final
from weakref import WeakSet

import hiredis
import redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.connection import Connection
from redis.sentinel import SentinelManagedConnection

WORD: Final = b"$%d\r\n%b\r\n"  # of a command, as it is sent: its length, and itself
_START: Final = 2**14  # bytes: to read at first, which is what a short reply needs
_MORE: Final = 2**16  # then; and what is sent in one piece
_VALUES: Final = frozenset((bytes, int, list, type(None), dict, float, bool, set))  # neither errors nor pushed
_CLOSED: Final = "The connection was closed."
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
        self.connection_pool.connection_kwargs |= {"command_packer": _Packer, "redis_connect_func": _log_in}
        self._idle: deque[Connection] = deque()
        _clients.add(self)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command, and return the reply in redis-py's form."""
        if not options:
            reply = self.exchange(_Packer.pack(*args)[0])[0]
            callback = dict.get(self.response_callbacks, args[0].upper())  # `parse_response` takes 0.4 us to find it
            return reply if callback is None else callback(reply)
        connection = self.take()
        try:
            send(connection, b"".join(connection.pack_command(*args)))
            reply = self.parse_response(connection, args[0], **options)
        except BaseException as e:
            self._give_up(connection, e)
            raise
        self._idle.append(connection)
        return reply

    def exchange(self, packed: bytes, count: int = 1, least: int = 1) -> list[Any]:
        """Send packed commands, and return their replies as they came, not in redis-py's form.

        Args:
            packed: one or more commands, one after the other.
            count: how many they are.
            least: how many bytes must have come before this wakes up, over plain TCP; fewer would be waited for until
                the socket's time is up.
        """
        connection = self.take()
        try:
            sock, reader = connection._sock, connection._parser._reader
            if sock is None or reader is None:
                raise redis.ConnectionError(_CLOSED)  # noqa: TRY301
            marked = least > 1 and type(sock) is socket  # the end of a TLS record may be shorter, and come alone
            if marked:
                sock.setsockopt(SOL_SOCKET, SO_RCVLOWAT, least)
            if len(packed) < _MORE:
                sock.sendall(packed)
            else:
                _send_long(sock, packed)
            reader.feed(sock.recv(_START))
            if marked:
                sock.setsockopt(SOL_SOCKET, SO_RCVLOWAT, 1)
            reply = reader.gets()
            replies = [reply] if count == 1 and type(reply) in _VALUES else receive(connection, count, reply)
        except BaseException as e:
            self._give_up(connection, e, all_read=count == 1)
            if isinstance(e, OSError | ValueError) and not is_of_a_handler(e):
                raise _redis_pys(e) from e
            raise
        finally:
            reply = None  # an error must not hold itself, and all callers' variables, through its traceback
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
        connection, replies = self.take(), []
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
                    replies += receive(connection)
                except redis.ResponseError as e:  # noqa: PERF203  # all must be read
                    replies.append(e)
        except BaseException as e:
            self._give_up(connection, e)
            raise
        done = replies.pop()
        for reply in (*replies, *(done if isinstance(done, list) else [done])):
            if isinstance(reply, Exception):
                self._give_up(connection, reply, all_read=False)  # if EXEC was refused, it may still be open
                if _is_denied(replies[0]) or _is_denied(done):
                    return False
                raise reply
        self._idle.append(connection)
        return True

    def take(self) -> Any:
        """A connection that nobody else uses, until it is given back or up."""
        try:
            while True:
                connection: Any = self._idle.pop()
                if connection._sock is not None:
                    return connection
                self.connection_pool.release(connection)  # somebody has closed it
        except IndexError:
            return self.connection_pool.get_connection()

    def close(self) -> None:
        """Close all connections; the next command opens a new one."""
        self._discard_idle()
        super().close()

    def _give_up(self, connection: Any, error: BaseException, *, all_read: bool = True) -> None:
        """Dispose of a connection on which a command failed; one that was merely refused, with all replies, is kept."""
        refused = isinstance(error, redis.ResponseError) and not is_of_replica(error) and "NOREPLICAS" not in str(error)
        if refused and all_read:
            self._idle.append(connection)
        else:
            self._discard(connection)
        if not refused:  # lost, or it leads to a master that became a replica, or lost its own: so do the others
            self._discard_idle()

    def _discard_idle(self) -> None:
        with contextlib.suppress(IndexError):
            while True:  # each is popped, so that no other thread has it
                self._discard(self._idle.pop())

    def _discard(self, connection: Connection) -> None:
        connection.disconnect()
        self.connection_pool.release(connection)


_clients: Final[WeakSet[DirectClient]] = WeakSet()


def _forget_all() -> None:
    """In a forked child, whose parent's these connections are."""
    for client in list(_clients):
        client._idle = deque()


os.register_at_fork(after_in_child=_forget_all)


class _Packer:
    """Packs what redis-py sends; hiredis' packer ends the process if a signal handler raises while it has a number."""

    @staticmethod
    def pack(name: str | bytes, *words: Any) -> list[bytes]:
        """See redis-py; a name may be of two words."""
        return [pack((*name.split(), *words))]


def _log_in(connection: Any) -> None:
    """As redis-py does it. An interrupted login is closed: in its pool, the next user would get the login's replies."""
    try:
        connection.on_connect()
    except BaseException:
        connection.disconnect()
        raise


# A process that has waited finds each function cold, and fetching it takes longer than running it. So these do in few
# steps what takes redis-py many.
# ruff: noqa: SLF001  # of redis-py's connections; pyproject.toml admits one major version, which tests/redis covers


def pack(words: Sequence[Any]) -> bytes:
    """A command as it is sent; raises :exc:`redis.DataError` for words that are neither text, bytes nor numbers."""
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


def fixed(words: Sequence[bytes]) -> bytes:
    """Words of a template that do not change, packed; the others are :data:`WORD`."""
    return (WORD * len(words) % counted(words)).replace(b"%", b"%%")


def _encoded(word: Any) -> bytes:
    if isinstance(word, str):
        return word.encode(errors="backslashreplace")  # a file's name, say, that is not UTF-8
    if type(word) in (int, float):
        return repr(word).encode()
    if isinstance(word, bytes | bytearray | memoryview):
        return bytes(word)
    raise redis.DataError(f"A word of a command is {word!r}: give text, bytes or a number.")


def send(connection: Any, packed: bytes) -> None:
    """Send a packed command; raises as redis-py's ``send_packed_command``, and where that would connect again."""
    sock = connection._sock
    if sock is None:  # on a new connection, replies would be taken for those of earlier commands
        raise redis.ConnectionError(_CLOSED)
    try:
        if len(packed) < _MORE:
            sock.sendall(packed)
        else:
            _send_long(sock, packed)
    except OSError as e:
        if is_of_a_handler(e):
            raise
        raise _redis_pys(e) from e


def _send_long(sock: Any, packed: bytes) -> None:
    """Send; raises TimeoutError if none of it gets through for the socket's time, which `sendall` has for the whole."""
    rest = memoryview(packed)
    while rest:
        rest = rest[sock.send(rest) :]


def receive(connection: Any, count: int = 1, reply: Any = NOT_ENOUGH_DATA) -> list[Any]:
    """The next replies; raises as redis-py's ``read_response``, at the first that is an error.

    Args:
        connection: where they come.
        count: how many.
        reply: the first, if that has been read.
    """
    sock, reader = connection._sock, connection._parser._reader
    if sock is None or reader is None:
        raise redis.ConnectionError(_CLOSED)
    replies: list[Any] = []
    size = _START
    try:
        while True:
            if reply is NOT_ENOUGH_DATA:
                reply = reader.gets()
            if type(reply) in _VALUES:
                replies.append(reply)
                if len(replies) == count:
                    return replies
            elif reply is not NOT_ENOUGH_DATA:
                _handle(connection, reply)
            elif data := sock.recv(size):
                reader.feed(data)
                size = _MORE
            else:
                raise redis.ConnectionError("The server closed the connection.")
            reply = NOT_ENOUGH_DATA
    except (OSError, ValueError) as e:  # ValueError: of TLS, where another thread has closed it
        if is_of_a_handler(e):
            raise
        raise _redis_pys(e) from e
    finally:
        del reply  # an error must not hold itself, and all callers' variables, through its traceback


def _handle(connection: Any, reply: Any) -> None:
    """Take what the server has pushed; raise an error."""
    try:
        if isinstance(reply, hiredis.PushNotification):
            connection._parser.handle_push_response(reply)
        elif isinstance(reply, redis.ReadOnlyError) and isinstance(connection, SentinelManagedConnection):
            raise redis.ConnectionError("The previous master is now a replica.") from reply
        else:
            raise reply
    finally:
        del reply


def is_of_a_handler(error: BaseException) -> bool:
    """Whether a signal handler raised an error, such as that of an alarm's time limit: it says nothing of Redis."""
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


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
