"""The seam to Redis: commands go out, replies come back, over redis-py's connections or its Cluster client."""

from __future__ import annotations

import contextlib
import os
import sys
from collections import deque
from typing import Any, Protocol, TypeAlias

import redis
from redis.cluster import RedisCluster

from .interrupts import causes, is_of_handler
from .sockets import Command, WholeConnection, pack_command

Client: TypeAlias = "redis.Redis | RedisCluster"


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
        connection: Any = None
        try:
            connection = self._take()
            connection.send_packed_command([b"".join(map(pack_command, commands))], check_health=False)
            if len(commands) == 1:
                replies = [connection.read_response(disable_decoding=True)]
            else:
                replies = _read(connection, len(commands))
        except redis.ResponseError as e:
            if _leaves_master(e) or _hung_up(e):
                self._give_up(connection)
            elif connection is not None:
                self._idle.append(connection)
            raise
        except BaseException as e:
            closed = connection is not None and not connection.is_connected
            if connection is not None:
                self._give_up(connection)
            _raise_error_of_handler(e, handled)
            if closed and isinstance(e, AttributeError | ValueError) and not is_of_handler(e):
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
            while True:
                connection = self._idle.pop()
                if not (isinstance(connection, WholeConnection) and connection.was_closed()):
                    return connection
                self._discard(connection)
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
        handled = sys.exc_info()[1]
        try:
            return [self._execute(*command) for command in commands]
        except BaseException as e:
            if not isinstance(e, redis.RedisError | redis.RedisClusterException):
                drop_idle(self._client)
            _raise_error_of_handler(e, handled)
            if isinstance(e, redis.RedisClusterException) and isinstance(self._client, RedisCluster):
                _find_again(self._client)
            raise

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


def is_of_replica(error: BaseException) -> bool:
    """Whether the server is a read-only replica according to an error, even one from within a script."""
    return isinstance(error, redis.ReadOnlyError) or "READONLY" in str(error)


def _raise_error_of_handler(error: BaseException, handled: BaseException | None) -> None:
    """Raise a signal handler's error that redis-py took for a lost connection; ``handled`` was raised before."""
    if not is_of_handler(error):
        for below in causes(error, handled):
            if is_of_handler(below):
                raise below from None


def drop_idle(client: Client) -> None:
    """Close a client's idle connections: on one that redis-py took back amid an exchange, a reply is still to come."""
    if isinstance(client, RedisCluster):
        client.disconnect_connection_pools()
    else:
        client.connection_pool.disconnect(inuse_connections=False)


def _find_again(cluster: RedisCluster) -> None:
    """Ask the Cluster's last known nodes for its present ones, once none that the user named answers."""
    known = [(node.host, node.port) for node in cluster.get_nodes()]
    with contextlib.suppress(redis.RedisError, redis.RedisClusterException):
        cluster.nodes_manager.initialize(additional_startup_nodes_info=known)


def _hung_up(error: redis.ResponseError) -> bool:
    """Whether the server closes the connection after such an error."""
    return str(error).startswith("Protocol error")


def _leaves_master(error: redis.ResponseError) -> bool:
    """Whether a new connection may lead to another master: this server became a replica, or has lost its replicas."""
    return is_of_replica(error) or "NOREPLICAS" in str(error)


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


def _unparsed(reply: Any) -> dict[bytes, list[Any]]:
    """The reply to an ``XREAD`` as Redis sent it, from what redis-py made of it."""
    found = {}
    for name, entries in dict(reply or ()).items():
        flat = entries[0] if isinstance(entries[0], list) else entries  # RESP3 nests them in one more list
        found[name] = [(i, [word for pair in fields.items() for word in pair]) for i, fields in flat]
    return found
