"""Calls to Redis: each with a time limit, bounded retries, and errors turned into torch's, in this one place."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import redis.exceptions as rx
from redis.cluster import RedisCluster
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_exponential_jitter
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

from .endpoint import Client, Endpoint, parse_endpoint

T = TypeVar("T")
Entries = list[tuple[str, dict[str, str]]]

ATTEMPT_TIMEOUT: Final = 5.0
READ_TIMEOUT: Final = 60.0
CONNECT_TIMEOUT: Final = 10.0


class UnreachableError(RendezvousConnectionError):
    """Redis does not answer now; trying again may help."""


class FencedError(RendezvousError):
    """The caller's epoch is not the run's newest any more (I4)."""


class Connection:
    """A Redis server as this package talks to it.

    Every call may be sent more than once: a reply can be lost, and then only the caller's second try is known to have
    arrived. So nothing goes through here that has not the same effect when repeated (I8).

    Args:
        client: a redis-py client of bytes; a connection is taken from its pool for each call, so that several threads
            may block at once, and redis-py gives forked children connections of their own.
        name: what to call the server in messages; no secrets.
        owned: whether :meth:`close` closes the client.
        read_timeout: how long a call may take with all its retries, in seconds.

    Raises:
        ValueError: the client decodes replies (``decode_responses=True``).
    """

    def __init__(
        self, client: Client, name: str | None = None, *, owned: bool = False, read_timeout: float = READ_TIMEOUT
    ) -> None:
        options = client.get_connection_kwargs()
        if options.get("decode_responses"):
            raise ValueError("The Redis client has decode_responses=True; make it without: stored values are bytes.")
        self.client = client
        self._owned = owned
        self.name = name or _describe(client, options)
        self.read_timeout = read_timeout
        # A blocking read has to end before the socket's own time-out does, which is how a silent server is noticed.
        self.max_block = (options.get("socket_timeout") or 2 * ATTEMPT_TIMEOUT) / 2

    @classmethod
    def open(
        cls, endpoint: Endpoint | str, attempt_timeout: float = ATTEMPT_TIMEOUT, read_timeout: float = READ_TIMEOUT
    ) -> Connection:
        """Connect to an endpoint.

        Raises:
            RendezvousConnectionError: no Redis answers there within 10 seconds, or it refuses us.
        """
        endpoint = parse_endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        opened: list[Client] = []

        def connect() -> Client:
            client = endpoint.open(attempt_timeout)
            client.ping()
            opened.append(client)
            return client

        retried(connect, str(endpoint), CONNECT_TIMEOUT)
        return cls(opened[-1], str(endpoint), owned=True, read_timeout=read_timeout)

    def __repr__(self) -> str:
        return f"Connection({self.name})"

    def call(self, operation: Callable[[Client], T], timeout: float | None = None) -> T:
        """Run an operation that has the same effect when it is repeated.

        Args:
            operation: takes the client.
            timeout: how long it may take with all its retries, in seconds; None for ``read_timeout``, 0 for one try.

        Raises:
            UnreachableError: Redis did not answer in time.
            RendezvousConnectionError: it refuses us; the text says what to do.
            RendezvousStateError: a key holds something that is not ours.
        """
        return retried(lambda: operation(self.client), self.name, self.read_timeout if timeout is None else timeout)

    def read(self, streams: Mapping[bytes, str], block: float, timeout: float = 0) -> dict[bytes, Entries]:
        """Block until one of several streams has an entry after the given id.

        Args:
            streams: id of the last entry seen, by name of the stream; all in one Cluster slot.
            block: how long to wait, in seconds; ``max_block`` at most is waited.
            timeout: how long to retry on errors, in seconds.

        Returns:
            The new entries of each stream that has some: id and fields.
        """
        names = list(streams)
        block_ms = max(1, round(1000 * min(block, self.max_block)))
        command = ("XREAD", "BLOCK", block_ms, "STREAMS", *names, *(streams[name] for name in names))

        def xread(client: Client) -> Any:
            if isinstance(client, RedisCluster):  # would ask the server for the keys of an XREAD, each time
                return client.execute_command(*command, target_nodes=client.get_node_from_key(names[0]))
            return client.execute_command(*command)

        reply = self.call(xread, timeout) or {}
        found = reply.items() if isinstance(reply, dict) else reply
        return {
            name: [(text(i), {text(k): text(v) for k, v in (fields or {}).items()}) for i, fields in entries]
            for name, entries in found
        }

    def local_address(self) -> str | None:
        """The address of this host on its way to Redis; None if that is a loopback, a socket file or unknown."""
        options = self.client.get_connection_kwargs()
        if isinstance(self.client, RedisCluster):
            node = self.client.get_primaries()[0]
            options = {"host": node.host, "port": node.port}
        try:
            target = socket.getaddrinfo(options["host"], options.get("port", 0), type=socket.SOCK_DGRAM)[0]
            with socket.socket(target[0], socket.SOCK_DGRAM) as probe:
                probe.connect(target[4])  # sends nothing; only looks up the route
                address: str = probe.getsockname()[0]
        except (KeyError, OSError):
            return None
        return None if address == "::1" or address.startswith("127.") else address

    def close(self) -> None:
        """Close the client's connections, if it is ours; a later call opens new ones."""
        if self._owned:
            self.client.close()


def _describe(client: Client, options: Mapping[str, Any]) -> str:
    if isinstance(client, RedisCluster):
        return "redis+cluster://" + ",".join(node.name for node in client.get_primaries())
    if path := options.get("path"):
        return f"unix://{path}"
    return f"redis://{options.get('host', '?')}:{options.get('port', '?')}/{options.get('db') or 0}"


def text(value: bytes | str) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


_PASSING_REPLY: Final = re.compile(
    r"^(BUSY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|MOVED|ASK)\b|[Ss]cript killed by user|max number of clients"
)
_FINAL: Final = (rx.AuthenticationError, rx.AuthorizationError, rx.MaxConnectionsError)


def _is_passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    if isinstance(error, _FINAL):
        return "max number of clients" in str(error)
    if isinstance(
        error,
        rx.ConnectionError
        | rx.TimeoutError
        | rx.ClusterDownError
        | rx.TryAgainError
        | rx.ClusterError
        | rx.RedisClusterException,
    ):
        return True
    return isinstance(error, rx.ResponseError) and bool(_PASSING_REPLY.search(str(error)))


def retried(operation: Callable[[], T], name: str, timeout: float) -> T:
    """Run an operation until it succeeds, fails for good, or the time is up; see :meth:`Connection.call`."""
    started = time.monotonic()
    try:
        return operation()
    except (rx.RedisError, rx.RedisClusterException, OSError) as error:
        if timeout <= 0 or not _is_passing(error):
            _raise(error, name, time.monotonic() - started)
    try:
        return Retrying(
            retry=retry_if_exception(_is_passing),
            wait=wait_exponential_jitter(initial=0.02, max=1.0, jitter=0.05),
            stop=stop_after_delay(max(0.0, timeout - (time.monotonic() - started))),
            reraise=True,
        )(operation)
    except (rx.RedisError, rx.RedisClusterException, OSError) as error:
        _raise(error, name, time.monotonic() - started)


def _raise(error: Exception, name: str, waited: float) -> NoReturn:
    """The one map from redis-py's errors to torch's."""
    reply = str(error)
    failed: type[RendezvousError] = RendezvousConnectionError
    if "FENCED " in reply:
        failed = FencedError
        message = reply.partition("FENCED ")[2]
    elif isinstance(error, rx.AuthenticationError | rx.AuthorizationError) or reply.startswith(("NOAUTH", "WRONGPASS")):
        message = (
            f"Redis at {name} refused the login: {reply}. Put the right user and password into REDELASTIC_REDIS_URL "
            "or into the endpoint's URL."
        )
    elif (
        isinstance(error, rx.NoPermissionError) or "NOPERM" in reply or "can't access at least one of the keys" in reply
    ):
        message = (
            f"Redis at {name} denies this user a key or command: {reply}. The user needs the rule "
            "'~<key_prefix>:{<run_id>}:* +@all -@dangerous' (see Security in the README)."
        )
    elif isinstance(error, rx.ReadOnlyError) or "READONLY" in reply:
        message = f"Redis at {name} is a read-only replica. Name its master, or use redis+sentinel:// to follow it."
    elif isinstance(error, rx.OutOfMemoryError) or reply.startswith("OOM"):
        message = f"Redis at {name} is out of memory: {reply}. Raise its maxmemory, or remove what fills it."
    elif "CORRUPT " in reply:
        failed = RendezvousStateError
        message = (
            f"Redis at {name} holds something that is not ours: {reply.partition('CORRUPT ')[2]}. Remove that key."
        )
    elif reply.startswith("WRONGTYPE") or "WRONGTYPE" in reply:
        failed = RendezvousStateError
        message = f"Redis at {name} holds a key of a wrong type: {reply}."
    elif isinstance(error, rx.InvalidResponse):
        message = f"What answers at {name} is not a Redis server: {reply}. Check host and port."
    elif isinstance(error, rx.ResponseError) and not _is_passing(error):
        failed = RendezvousError
        message = f"Redis at {name} answered with an error: {reply}."
    else:
        failed = UnreachableError
        message = (
            f"Redis at {name} could not be reached within {waited:.1f} s: {reply or type(error).__name__}. "
            "Check that it runs, and that this host may connect to it."
        )
    raise failed(message) from error


def require_keys_of_types(connection: Connection, types: Mapping[str, str], error: RendezvousStateError) -> NoReturn:
    """Re-raise an error about a key's type so that it names the key, what it should hold and what it holds."""
    for key, expected in types.items():
        actual = text(connection.call(lambda client, key=key: client.type(key)))  # type: ignore[misc]
        if actual not in (expected, "none"):
            raise RendezvousStateError(
                f"The key {key!r} in Redis at {connection.name} holds a {actual}, not the {expected} that a run keeps "
                "there. Something else writes to it: remove that key, or choose another key_prefix."
            ) from error
    raise error
