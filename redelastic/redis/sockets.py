"""redis-py's connections with a bounded set-up that is whole or void, and with time limits on lack of progress."""

from __future__ import annotations

import select
import socket
import ssl
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import hiredis
import redis
import redis.connection as rc
import redis.exceptions as rx
from redis.sentinel import SentinelConnectionPool, SentinelManagedConnection, SentinelManagedSSLConnection

from .interrupts import causes, is_of_handler
from .names import look_up

Command: TypeAlias = "tuple[bytes, ...]"
Word: TypeAlias = "str | bytes | int | float"

pack_command: Final[Callable[[Command], bytes]] = hiredis.pack_command  # type: ignore[assignment]  # its stub has tuples of one word
_PIECE: Final = 2**16  # bytes: each piece of a long command may take the socket's time-out
# Less than this is unsent in the kernel when a command has been "sent": its reply then arrives within the time-out.
_MAX_UNSENT: Final = 2**17  # bytes
_SHORTEST_IDLE: Final = 1.0  # in seconds, after which a server may close a connection
_CONNECT_TIMEOUT: Final = 10.0  # in seconds, where none is given
# Raised when a connection breaks, not when the server refuses it.
_BROKEN_TLS: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)


def encoded(words: Sequence[Word]) -> Command:
    """Words of a command as bytes; raises :exc:`redis.DataError` for one that is neither text, bytes nor a number.

    hiredis crashes if a signal handler raises while it turns a number into text, so it gets bytes alone.
    """
    return tuple(
        [  # no call for what most words are: a heartbeat has thirty
            word
            if type(word) is bytes
            else word.encode("utf-8", "backslashreplace")  # such as a file's name that is not UTF-8
            if type(word) is str
            else b"%d" % word
            if type(word) is int
            else _encoded(word)
            for word in words
        ]
    )


def _encoded(word: Word) -> bytes:
    if isinstance(word, str):
        return word.encode("utf-8", "backslashreplace")
    if type(word) is float:
        return repr(word).encode()
    if isinstance(word, bytes | bytearray | memoryview):
        return bytes(word)
    raise rx.DataError(f"A word of a command is {word!r}: give text, bytes or a number.")


class Packer:
    """Packs the commands that redis-py itself sends; see :func:`encoded`."""

    @staticmethod
    def pack(name: str | bytes, *words: Word) -> list[bytes]:
        """See redis-py; a name may consist of two words."""
        return [pack_command(encoded((*name.split(), *words)))]


def tls_refusal(error: BaseException) -> ssl.SSLError | None:
    """Why the TLS handshake failed, where an error says that; redis-py hides it below a ConnectionError."""
    found = (e for e in (error, *causes(error)) if isinstance(e, ssl.SSLError) and not isinstance(e, _BROKEN_TLS))
    return next(found, None)


class WholeConnection(rc.AbstractConnection):
    """A connection that is used only if its set-up came to its end.

    redis-py returns a connection to its pool even if a signal handler's exception ended its set-up: it may not be
    logged in, or its next user would read the login's replies. Here an unfinished connection is closed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._is_set_up = False
        self._channel: socket.socket | None = None
        self._sending_took = 0.0  # in seconds, by the last command
        self._sent_at = 0.0  # the last command, in seconds on the monotonic clock
        super().__init__(*args, **{"command_packer": Packer, **options})

    def connect(self) -> None:
        """Connect, unless the connection is set up; see redis-py."""
        if not self._is_set_up:
            self.disconnect()
        super().connect()

    def connect_check_health(self, check_health: bool = True, retry_socket_connect: bool = True) -> None:
        """As :meth:`connect`; see redis-py."""
        try:
            super().connect_check_health(check_health, retry_socket_connect)
            self._is_set_up = True
        except BaseException:
            self.disconnect()
            raise

    def disconnect(self, *args: Any, **options: Any) -> None:
        """Close the socket; see redis-py."""
        self._is_set_up, self._channel = False, None
        super().disconnect(*args, **options)

    def _connect(self) -> socket.socket:
        channel: socket.socket = super()._connect()  # type: ignore[safe-super]  # of the next class
        self._channel = channel
        return channel

    def send_packed_command(self, command: Any, check_health: bool = True) -> None:
        """Send a command; a long one may take any time, as long as some of it gets through within each time-out.

        Raises:
            redis.ResponseError: the server has hung up, and this is why, such as a value above its limit.
        """
        if self._channel is None:
            self.connect_check_health(check_health)
        channel, started = self._channel, time.monotonic()
        self._sent_at = started
        try:
            for piece in _pieces([command] if isinstance(command, bytes | memoryview) else command):
                channel.sendall(piece)  # type: ignore[union-attr]  # None if another thread has closed it
        except TimeoutError as e:
            self.disconnect()
            raise rx.TimeoutError("Timeout writing to socket") from e
        except OSError as e:
            try:
                self.read_response()
            except (rx.ConnectionError, rx.TimeoutError) as why:
                e = tls_refusal(why) or e  # of a client's certificate, which a server may refuse after the handshake
            raise rx.ConnectionError(f"Error while writing to socket: {e}") from e
        except BaseException:
            self.disconnect()
            raise
        self._sending_took = time.monotonic() - started

    def can_read(self, timeout: float = 0) -> bool:
        """Whether something can be read; see redis-py.

        Raises:
            redis.ConnectionError: the connection is closed, perhaps by another thread at this moment.
        """
        try:
            return bool(super().can_read(timeout))
        except (AttributeError, TypeError, ValueError) as e:
            if self._channel is not None or is_of_handler(e):
                raise
            raise rx.ConnectionError("Another thread closed the connection.") from e

    def was_closed(self) -> bool:
        """Whether the server has closed the connection while it was idle, as its setting ``timeout`` says."""
        channel = self._channel
        if channel is None or time.monotonic() - self._sent_at < _SHORTEST_IDLE:
            return False
        look = select.poll()
        look.register(channel, select.POLLIN)
        return bool(look.poll(0))

    def read_response(self, *args: Any, **options: Any) -> Any:
        """Read a reply; after a command that took long to send, it may take as long: what lies between has buffers."""
        if self._sending_took > (self.socket_timeout or 0):
            options.setdefault("timeout", self._sending_took)
        return super().read_response(*args, **options)


class BoundedConnection(rc.Connection):
    """A TCP connection whose name look-up and attempts at all addresses together take ``socket_connect_timeout``."""

    def _connect(self) -> socket.socket:
        timeout = self.socket_connect_timeout or _CONNECT_TIMEOUT
        deadline = time.monotonic() + timeout
        places = look_up(self.host, self.port, timeout)
        failed: OSError | None = None
        try:
            for i, place in enumerate(places):
                left = deadline - time.monotonic()
                try:
                    return self._open(place, max(0.001, left / (len(places) - i)))
                except OSError as e:
                    if is_of_handler(e):
                        raise
                    failed = e
            raise failed or OSError(f"{self.host} has no address")
        finally:
            del failed  # an error must not hold its callers' variables through its own traceback

    def _open(self, place: Any, timeout: float) -> socket.socket:
        family, kind, protocol, _, address = place
        channel = socket.socket(family, kind, protocol)
        try:
            channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_NOTSENT_LOWAT"):
                channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _MAX_UNSENT)
            if self.socket_keepalive:
                channel.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option, value in self.socket_keepalive_options.items():
                    channel.setsockopt(socket.IPPROTO_TCP, option, value)
            channel.settimeout(timeout)
            channel.connect(address)
            channel.settimeout(self.socket_timeout)
        except BaseException:
            channel.close()
            raise
        return channel


class TcpConnection(WholeConnection, BoundedConnection):
    """To a server."""


class AnsweredConnection(WholeConnection):
    """A TLS connection that is set up once the server has answered on it.

    In TLS 1.3 a server looks at the client's certificate, and sends tickets, after the client's handshake. Where that
    is there before the first command, redis-py's pool takes the connection for a closed one, or for one with a reply
    that nobody read.
    """

    def on_connect_check_health(self, check_health: bool = True) -> None:
        """Log in, and have an answer; see redis-py."""
        sent_at = self._sent_at
        super().on_connect_check_health(check_health)
        if self._sent_at == sent_at:  # there was no login, whose reply would be the answer
            self.send_command("PING", check_health=False)
            self.read_response()


class TlsConnection(AnsweredConnection, rc.SSLConnection, BoundedConnection):
    """To a server, over TLS."""


class UnixConnection(WholeConnection, rc.UnixDomainSocketConnection):
    """To a server's socket file."""


class MasterConnection(WholeConnection, SentinelManagedConnection, BoundedConnection):
    """To the master that sentinels name."""


class MasterTlsConnection(AnsweredConnection, SentinelManagedSSLConnection, BoundedConnection):
    """To the master that sentinels name, over TLS."""


class Pool(redis.ConnectionPool):
    """A pool that holds its idle connections only: one in use that its user has lost is closed.

    A signal handler's exception may come before its user has it, or before it is given back. redis-py's pool would keep
    such a connection open until the pool is closed.
    """

    def reset(self) -> None:
        """Forget all connections; see redis-py."""
        super().reset()
        self._in_use_connections: Any = weakref.WeakSet()


class MasterPool(Pool, SentinelConnectionPool):
    """Connections to the master that sentinels name."""


def make_client(options: dict[str, Any]) -> redis.Redis:
    """A client over these connections: to a socket file, if the options of redis-py have a ``path``, or to a server."""
    kind = UnixConnection if "path" in options else TlsConnection if options.get("ssl") else TcpConnection
    options = {name: value for name, value in options.items() if name != "ssl"}
    return redis.Redis.from_pool(Pool(kind, **options))


def keepalive(silence: float) -> dict[int, int]:
    """Options of a TCP socket with which the kernel gives up a peer after ``silence``, in seconds, and its next probe.

    It probes an idle peer. What was sent and is not confirmed counts too, but no reply that takes long.
    """
    wanted = {
        "TCP_KEEPIDLE": max(1, round(silence / 2)),
        "TCP_KEEPINTVL": max(1, round(silence / 6)),
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": round(1000 * silence),
    }
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def _pieces(parts: Sequence[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    for part in parts:
        if len(part) <= _PIECE:
            yield part
        else:
            whole = memoryview(part)
            for start in range(0, len(whole), _PIECE):
                yield whole[start : start + _PIECE]
