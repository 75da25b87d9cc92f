"""Calls to Redis: each with a time limit and bounded retries."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

import redis.exceptions as rx
from redis.cluster import RedisCluster
from redis.sentinel import SentinelConnectionPool
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential

from .endpoint import URL_VARIABLE, Endpoint, parse_endpoint
from .errors import ERRORS, CorruptStateError, ProtocolError, may_pass, translated
from .pace import Pace
from .routes import is_loopback, source_address
from .sockets import Command
from .wire import Client, ClientWire, PoolWire, Wire, drop_idle

T = TypeVar("T")
Timeout = float | Callable[[], float] | None  # in seconds
Entries = list[tuple[str, dict[str, str]]]
STREAM_START: Final = (0, 0)  # a place before every entry of a stream

ATTEMPT_TIMEOUT: Final = 5.0
READ_TIMEOUT: Final = 60.0
CONNECT_TIMEOUT: Final = 10.0
LOST_PACKET: Final = 1.2  # of one attempt to connect at least, in seconds: TCP sends a lost packet again after 1 s


class Connection:
    """A connection to Redis whose calls have a time limit and are retried.

    A call may be sent more than once, since its reply can be lost: it must have the same effect when repeated (I8).

    Args:
        client: a redis-py client of bytes; each call takes a connection from its pool, so that several threads may
            block at once.
        name: of the server in messages, without secrets.
        owned: whether :meth:`close` closes the client.
        read_timeout: how long a call may take with all its retries, in seconds.

    Raises:
        ValueError: the client decodes replies (``decode_responses=True``), or waits for them without timeout.
    """

    def __init__(
        self, client: Client, name: str | None = None, *, owned: bool = False, read_timeout: float = READ_TIMEOUT
    ) -> None:
        options = client.get_connection_kwargs()
        if options.get("decode_responses"):
            raise ValueError("The Redis client has decode_responses=True; create it without: stored values are bytes.")
        if "socket_timeout" in options and not options["socket_timeout"]:
            raise ValueError(
                "The Redis client has no socket_timeout; create it with one: a frozen server never answers."
            )
        self.client = client
        self.is_cluster = isinstance(client, RedisCluster)
        self._wire: Wire = (
            PoolWire(client.connection_pool) if owned and not isinstance(client, RedisCluster) else ClientWire(client)
        )
        self._owned = owned
        self.sends_once = isinstance(self._wire, PoolWire)  # not if redis-py itself may repeat what it sends
        self.name = name or _describe(client, options)
        self.read_timeout = read_timeout
        self.served = False  # whether a script has run there: a server that refuses writes later may accept them again
        self.attempt_timeout: float = options.get("socket_timeout") or ATTEMPT_TIMEOUT  # redis-py's default
        self._pace = Pace(self.attempt_timeout)
        # A blocking read has to end before the socket's timeout, which detects a silent server.
        self.max_block = self.attempt_timeout / 2

    @classmethod
    def open(
        cls,
        endpoint: Endpoint | str,
        attempt_timeout: float = ATTEMPT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
        connect_timeout: float | None = None,
    ) -> Connection:
        """Connect to an endpoint.

        Args:
            endpoint: where Redis is.
            attempt_timeout: how long one attempt at a call may take, in seconds. A long request or reply may take
                longer, as long as some of it gets through.
            read_timeout: how long a call may take with all its retries, in seconds.
            connect_timeout: how long to try to connect, in seconds. The last attempt may take 1.2 s even if that is
                longer, or an ``attempt_timeout`` if the server says nothing. None is 10 s, or ``read_timeout`` if that
                is less.

        Raises:
            UnavailableError: no Redis answers there within ``connect_timeout``, or it refuses the connection.
        """
        endpoint = parse_endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        timeout = min(CONNECT_TIMEOUT, read_timeout) if connect_timeout is None else connect_timeout
        opened: list[Client] = []

        def connect() -> Client:
            client = endpoint.open(attempt_timeout, max(timeout, LOST_PACKET))
            client.ping()
            opened.append(client)
            return client

        name = (
            f"{endpoint} (the default, because neither an endpoint nor {URL_VARIABLE} was given)"
            if endpoint.is_default
            else ""
        )
        started = time.monotonic()
        try:
            connect()
        except ERRORS as error:
            name, waited = name or str(endpoint), time.monotonic() - started
            if waited >= timeout or not may_pass(error, fail_over=False):
                raise translated(error, name, waited, fail_over=False) from error
        if not opened:  # outside the handler: an error that is raised there again loses its cause
            retried(partial(Pace(attempt_timeout).run, connect), name, timeout, started)
        return cls(opened[-1], str(endpoint), owned=True, read_timeout=read_timeout)

    def __repr__(self) -> str:
        return f"Connection({self.name})"

    @property
    def is_up(self) -> bool:
        """Whether the last try, if any, reached Redis."""
        return self._pace.is_up

    def call(self, operation: Callable[[Client], T], timeout: Timeout = None) -> T:
        """Run an operation of redis-py's client; see :meth:`attempt`."""

        def run() -> T:
            try:
                return operation(self.client)
            except BaseException as e:
                if not isinstance(e, ERRORS):
                    drop_idle(self.client)
                raise

        return self._tried(run, timeout)

    def attempt(self, operation: Callable[[Wire], T], timeout: Timeout = None) -> T:
        """Run an operation that has the same effect when it is repeated.

        Args:
            operation: takes the wire to Redis.
            timeout: for how long to retry, in seconds; None for ``read_timeout``, 0 for one try. An attempt on a
                server that does not answer takes ``attempt_timeout`` in any case. A function is only called once the
                first try has failed, which is rare.

        Raises:
            UnreachableError: Redis did not answer in time.
            UnavailableError: Redis refuses the call; the message says what to do.
            CorruptStateError: a key holds something that redelastic did not write.
        """
        return self._tried(partial(operation, self._wire), timeout)

    def exchange(self, *commands: Command, timeout: Timeout = None) -> list[Any]:
        """Send commands that have the same effect when they are repeated; see :meth:`attempt`.

        Returns:
            Their replies as Redis sent them.
        """
        return self._tried(partial(self._wire.exchange, *commands), timeout)

    def _tried(self, operation: Callable[[], T], timeout: Timeout) -> T:
        started = time.monotonic()
        try:
            return operation() if self._pace.is_up else self._pace.run(operation)
        except ERRORS as error:
            self._pace.note(error)
            seconds = self.read_timeout if timeout is None else timeout() if callable(timeout) else timeout
            waited = time.monotonic() - started
            if waited >= seconds or not may_pass(error, fail_over=self.served):
                raise translated(error, self.name, waited, fail_over=self.served) from error
        paced = partial(self._pace.run, operation)
        return retried(paced, self.name, seconds, started, fail_over=self.served)

    def read(self, streams: Mapping[bytes, str], block: float, timeout: float = 0) -> dict[bytes, Entries]:
        """Block until one of several streams has an entry after a given id.

        Args:
            streams: id of the last entry seen, by name of the stream; all in one Cluster slot.
            block: how long to wait, in seconds; at most ``max_block``.
            timeout: how long to retry on errors, in seconds.

        Returns:
            The new entries of each stream that has any: their ids and fields.
        """
        block_ms = b"%d" % max(1, round(1000 * min(block, self.max_block)))
        after = [i.encode() for i in streams.values()]
        [reply] = self.exchange((b"XREAD", b"BLOCK", block_ms, b"STREAMS", *streams, *after), timeout=timeout)
        found = dict(reply or ()).items()
        return {name: [(text(i), _fields(words)) for i, words in entries] for name, entries in found}

    def replicas_with(self, key: str, field: str, value: int, *, wanted: int, block: float, ttl: float) -> int:
        """Wait until as many replicas as wanted have a number in a hash.

        Args:
            key: of the hash; its time to live is set to ``ttl``, in seconds, since ``WAIT`` counts from the last
                write of its own connection.
            field: of the hash.
            value: the number that the replicas must have there.
            wanted: how many replicas to wait for.
            block: how long to wait, in seconds; at most ``max_block``.
            ttl: see ``key``.

        Returns:
            How many replicas have it; 0 if the server itself does not: it may just have replaced another server.
        """
        block_ms = max(1, round(1000 * min(block, self.max_block)))

        def wait(client: Client) -> int:
            cluster = client if isinstance(client, RedisCluster) else None
            node = cluster.get_redis_connection(cluster.get_node_from_key(key)) if cluster else client
            with node.pipeline(transaction=False) as on_one_connection:
                on_one_connection.hget(key, field)
                on_one_connection.pexpire(key, round(1000 * ttl))
                on_one_connection.wait(wanted, block_ms)
                try:
                    found, _, count = on_one_connection.execute()
                except rx.MovedError:
                    if not cluster:
                        raise
                    cluster.nodes_manager.initialize()  # redis-py does not follow the move on a connection to one node
                    return 0
            return int(count) if found == b"%d" % value else 0

        return self.call(wait, 0)

    def local_address(self) -> str | None:
        """The address of this host on its route to Redis; None if that is a loopback, a socket file or unknown.

        Raises:
            UnavailableError: Redis could not be reached.
        """
        peer = self.call(_peer)
        address = source_address(peer) if isinstance(peer, str) else ""
        return None if not address or is_loopback(address) else address

    def is_remote(self) -> bool:
        """Whether Redis is on another host, as far as its address says. Raises as :meth:`local_address` does."""
        peer = self.call(_peer)
        return isinstance(peer, str) and not is_loopback(peer)

    def close(self) -> None:
        """Close the client's connections if this object owns it; a later call opens new ones."""
        if self._owned:
            self._wire.close()
            self.client.close()


def _peer(client: Client) -> Any:
    """The address of the server that a client is connected to; its name may resolve to several."""
    if isinstance(client, RedisCluster):
        client = client.get_redis_connection(client.get_primaries()[0])
    pool = client.connection_pool
    connection = pool.get_connection()
    try:
        return None if "path" in client.get_connection_kwargs() else connection.getpeername()
    except AttributeError:  # a stand-in for Redis in this process, such as fakeredis
        return None
    finally:
        pool.release(connection)


def _describe(client: Client, options: Mapping[str, Any]) -> str:
    if isinstance(client, RedisCluster):
        return "redis+cluster://" + ",".join(node.name for node in client.get_primaries())
    if isinstance(client.connection_pool, SentinelConnectionPool):
        return f"the master {client.connection_pool.service_name!r} of the sentinels"
    if path := options.get("path"):
        return f"unix://{path}"
    return f"redis://{options.get('host', '?')}:{options.get('port', '?')}/{options.get('db') or 0}"


def _fields(words: Sequence[bytes]) -> dict[str, str]:
    texts = [text(word) for word in words]
    return dict(zip(texts[::2], texts[1::2], strict=True))


def text(value: bytes | str) -> str:
    """A reply of Redis as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def place_of(entry: str | bytes) -> tuple[int, int]:
    """The place of an entry in a stream, from its id; before all others if the id is invalid."""
    parts = text(entry).split("-")
    valid = len(parts) == 2 and all(part.isascii() and part.isdecimal() and len(part) < 21 for part in parts)
    return (int(parts[0]), int(parts[1])) if valid else STREAM_START


def sanitize(value: bytes | str) -> str:
    """Untrusted text, sanitized to one log line."""
    return "".join(sign if sign.isprintable() else " " for sign in text(value)[:1000])


def retried(operation: Callable[[], T], name: str, timeout: float, started: float, *, fail_over: bool = False) -> T:
    """Run an operation until it succeeds, fails for good, or the time is up; see :meth:`Connection.call`.

    With ``fail_over``, a server that has become a read-only replica counts as a master that will be replaced.
    """
    try:
        return Retrying(
            retry=retry_if_exception(partial(may_pass, fail_over=fail_over)),
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_delay(max(0.0, timeout - (time.monotonic() - started))),
            reraise=True,
        )(operation)
    except ERRORS as error:
        raise translated(error, name, time.monotonic() - started, fail_over=fail_over) from error


def require_keys_of_types(connection: Connection, types: Mapping[str, str], error: CorruptStateError) -> NoReturn:
    """Re-raise an error about a key's value so that it names the key, and its actual and expected types."""
    if isinstance(error, ProtocolError):
        raise error
    for key, expected in types.items():
        actual = text(connection.call(lambda client, key=key: client.type(key)))  # type: ignore[misc]
        if actual not in (expected, "none"):
            raise CorruptStateError(
                f"The key {key!r} in Redis at {connection.name} is a {actual}, but a run needs a {expected} "
                "there. Another program writes to it: remove that key, or use another key_prefix."
            ) from error
    if any(key in str(error) for key in types):
        raise error
    raise CorruptStateError(
        f"{error} It is one of the keys {', '.join(types)}: remove them once no node of the run is alive."
    ) from error
