"""Calls to Redis: each with a time limit, bounded retries, and errors turned into torch's, in this one place."""

from __future__ import annotations

import re
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, NoReturn, TypeVar

import redis.exceptions as rx
from redis.cluster import RedisCluster
from redis.sentinel import MasterNotFoundError, SentinelConnectionPool
from tenacity import Retrying, retry_if_exception, stop_after_delay, wait_random_exponential
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
# What the user of one run, or of one prefix with ~<key_prefix>:*, has to be allowed.
ACL_RULES: Final = "~<key_prefix>:{<run_id>}:* +@read +@write +@connection +eval +evalsha +time -@dangerous"


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
        ValueError: the client decodes replies (``decode_responses=True``), or waits for them without a time-out.
    """

    def __init__(
        self, client: Client, name: str | None = None, *, owned: bool = False, read_timeout: float = READ_TIMEOUT
    ) -> None:
        options = client.get_connection_kwargs()
        if options.get("decode_responses"):
            raise ValueError("The Redis client has decode_responses=True; make it without: stored values are bytes.")
        if "socket_timeout" in options and not options["socket_timeout"]:
            raise ValueError(
                "The Redis client has no socket_timeout; make it with one: a server that freezes stays mute."
            )
        self.client = client
        self._owned = owned
        self.name = name or _describe(client, options)
        self.read_timeout = read_timeout
        # A blocking read has to end before the socket's own time-out does, which is how a silent server is noticed.
        self.max_block = (options.get("socket_timeout") or 2 * ATTEMPT_TIMEOUT) / 2

    @classmethod
    def open(
        cls,
        endpoint: Endpoint | str,
        attempt_timeout: float = ATTEMPT_TIMEOUT,
        read_timeout: float = READ_TIMEOUT,
        connect_timeout: float = CONNECT_TIMEOUT,
    ) -> Connection:
        """Connect to an endpoint.

        Args:
            endpoint: where Redis is.
            attempt_timeout: how long one attempt at a call may take, in seconds.
            read_timeout: how long a call may take with all its retries, in seconds.
            connect_timeout: how long connecting is tried, in seconds; the last attempt may end that much later.

        Raises:
            RendezvousConnectionError: no Redis answers there within ``connect_timeout``, or it refuses us.
        """
        endpoint = parse_endpoint(endpoint) if isinstance(endpoint, str) else endpoint
        opened: list[Client] = []

        def connect() -> Client:
            client = endpoint.open(min(attempt_timeout, connect_timeout))
            client.ping()
            opened.append(client)
            return client

        retried(connect, str(endpoint), connect_timeout)
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
        elif isinstance(self.client.connection_pool, SentinelConnectionPool):
            options = self.client.connection_pool.sentinel_manager.sentinels[0].get_connection_kwargs()
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
    if isinstance(client.connection_pool, SentinelConnectionPool):
        return f"the master {client.connection_pool.service_name!r} of its sentinels"
    if path := options.get("path"):
        return f"unix://{path}"
    return f"redis://{options.get('host', '?')}:{options.get('port', '?')}/{options.get('db') or 0}"


def text(value: bytes | str) -> str:
    """A reply of Redis as text."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


_PASSING_REPLY: Final = re.compile(
    r"^(BUSY|LOADING|MASTERDOWN|CLUSTERDOWN|TRYAGAIN|NOREPLICAS|UNBLOCKED)\b"
    r"|[Ss]cript killed by user|max number of clients"
)
_PASSING: Final = (
    rx.ConnectionError,
    rx.TimeoutError,
    rx.ClusterDownError,
    rx.TryAgainError,
    rx.ClusterError,
    rx.RedisClusterException,
)
_FINAL: Final = (rx.AuthenticationError, rx.AuthorizationError, rx.MaxConnectionsError)
# What a connection that broke raises, and not one that was refused.
_BROKEN_TLS: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)
_SCRIPT_SUFFIX: Final = re.compile(r" script: [0-9a-f]{40}, on .*$")  # that Redis 7 adds to a script's error
_SENTINEL_REPR: Final = re.compile(r"<redis\.client\.Redis\(.*?host=(.*?),port=(\d+).*?\)>\)>\)>")
_NO_CLUSTER: Final = "Cluster mode is not enabled"


def _cause(error: BaseException) -> BaseException:
    """What redis-py's Cluster client met: it wraps it into an exception that says less."""
    if isinstance(error, rx.RedisClusterException) and isinstance(error.__cause__, Exception):
        return error.__cause__
    return error


def _tls_refusal(error: BaseException) -> ssl.SSLError | None:
    """Why TLS could not be agreed on; redis-py hides it below a ConnectionError."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, ssl.SSLError) and not isinstance(below, _BROKEN_TLS):
            return below
        below = below.__cause__ or below.__context__
    return None


def _is_passing(error: BaseException) -> bool:
    """Whether trying again may help."""
    error = _cause(error)
    if isinstance(error, _FINAL):
        return "max number of clients" in str(error)
    if isinstance(error, MasterNotFoundError) and "AuthenticationError" in str(error):
        return False
    if isinstance(error, _PASSING):
        return not _tls_refusal(error) and _NO_CLUSTER not in str(error)
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
            wait=wait_random_exponential(multiplier=0.05, max=1.0),
            stop=stop_after_delay(max(0.0, timeout - (time.monotonic() - started))),
            reraise=True,
        )(operation)
    except (rx.RedisError, rx.RedisClusterException, OSError) as error:
        _raise(error, name, time.monotonic() - started)


def _raise(error: Exception, name: str, waited: float) -> NoReturn:
    failed, message = _translate(error, name, waited)
    raise failed(message) from error


def _translate(  # noqa: C901, PLR0911, PLR0912  (a list, to be read from the top)
    error: Exception, name: str, waited: float
) -> tuple[type[RendezvousError], str]:
    """The one map from redis-py's errors to torch's."""
    cause = _cause(error)
    reply = _SCRIPT_SUFFIX.sub("", _SENTINEL_REPR.sub(r"\1:\2", str(cause))).rstrip(". ")
    if "FENCED " in reply:
        return FencedError, reply.partition("FENCED ")[2]
    if "CORRUPT " in reply:
        return RendezvousStateError, (
            f"Redis at {name} holds something that is not ours: {reply.partition('CORRUPT ')[2]}. "
            "Remove that key once no node of the run is alive."
        )
    if "WRONGTYPE" in reply:
        return RendezvousStateError, (
            f"Redis at {name} holds a key of a wrong type: {reply}. Remove it, or choose another key_prefix."
        )
    if isinstance(cause, MasterNotFoundError) and "AuthenticationError" in reply:
        return RendezvousConnectionError, (
            f"The sentinels of {name} refused the login: {reply}. Put ?sentinel_password=…, and &sentinel_username=… "
            "if they have users, at the end of the endpoint's URL."
        )
    if isinstance(cause, rx.AuthenticationError | rx.AuthorizationError):
        return RendezvousConnectionError, (
            f"Redis at {name} refused the login: {reply}. Put the right user and password into its URL, or "
            "into REDELASTIC_REDIS_URL and give the endpoint as host:port."
        )
    if isinstance(cause, rx.NoPermissionError) or "NOPERM" in reply or "The user executing the script can't" in reply:
        return RendezvousConnectionError, (
            f"Redis at {name} denies this user a key or command: {reply}. Check that the run id and the key_prefix are "
            f"those that the user is for; it needs the rules '{ACL_RULES}' (see Security in the README)."
        )
    if isinstance(cause, rx.ReadOnlyError) or "READONLY" in reply:
        return RendezvousConnectionError, (
            f"Redis at {name} is a read-only replica. Name its master, or use redis+sentinel:// to follow it."
        )
    if isinstance(cause, rx.OutOfMemoryError) or reply.startswith("OOM"):
        return RendezvousConnectionError, (
            f"Redis at {name} is out of memory: {reply}. Raise its maxmemory, or remove what fills it."
        )
    if isinstance(cause, rx.MovedError | rx.AskError):
        return RendezvousConnectionError, (
            f"Redis at {name} is a node of a Cluster, and keeps this run elsewhere. Use redis+cluster://."
        )
    if _NO_CLUSTER in reply:
        return RendezvousConnectionError, f"Redis at {name} is no Cluster. Use redis://, or rediss:// with TLS."
    if "DB index" in reply or "SELECT is not allowed" in reply:
        return RendezvousConnectionError, (
            f"Redis at {name} does not have that database: {reply}. Leave the number out, or raise its 'databases'."
        )
    if refusal := _tls_refusal(cause):
        reason = getattr(refusal, "verify_message", "") or refusal.reason or str(refusal)
        return RendezvousConnectionError, (
            f"TLS with Redis at {name} failed: {reason}. Check that it serves TLS on that port, that ca_cert is the "
            "file of its CA, that its certificate is for that host, and that ssl_cert and ssl_cert_key suit it."
        )
    if isinstance(cause, rx.InvalidResponse):
        return RendezvousConnectionError, (
            f"What answers at {name} is not a Redis server: {reply}. Check host and port; for TLS use rediss://."
        )
    if isinstance(cause, rx.ResponseError) and not _is_passing(cause):
        if "user_script" in reply:
            return RendezvousStateError, f"Redis at {name} holds something that our script cannot read: {reply}."
        if reply.startswith("unknown command 'SENTINEL'"):
            return RendezvousConnectionError, f"What answers at {name} is no sentinel. Use redis://, or its own port."
        if reply.startswith("unknown command"):
            return RendezvousConnectionError, (
                f"What answers at {name} does not know our commands: {reply}. It has to be Redis 6.2 or later, or "
                "Valkey; if it is a sentinel, use redis+sentinel://host:port/master-name."
            )
        return RendezvousError, f"Redis at {name} answered with an error: {reply}."
    if isinstance(cause, MasterNotFoundError):
        return UnreachableError, (
            f"The sentinels of {name} named no master within {waited:.1f} s: {reply}. Check that they run there and "
            "watch a master of that name, and that it is up."
        )
    if isinstance(error, OSError) or _is_passing(error):
        return UnreachableError, (
            f"Redis at {name} could not be reached within {waited:.1f} s: {reply or type(cause).__name__}. "
            "Check that it runs there, that this host may connect to it, and that both or none use TLS (rediss://)."
        )
    return RendezvousError, f"redis-py refused a call to Redis at {name}: {reply or type(cause).__name__}."


def require_keys_of_types(connection: Connection, types: Mapping[str, str], error: RendezvousStateError) -> NoReturn:
    """Re-raise an error about what a key holds so that it names the key, what it should hold and what it holds."""
    for key, expected in types.items():
        actual = text(connection.call(lambda client, key=key: client.type(key)))  # type: ignore[misc]
        if actual not in (expected, "none"):
            raise RendezvousStateError(
                f"The key {key!r} in Redis at {connection.name} holds a {actual}, not the {expected} that a run keeps "
                "there. Something else writes to it: remove that key, or choose another key_prefix."
            ) from error
    if any(key in str(error) for key in types):
        raise error
    raise RendezvousStateError(
        f"{error} It is one of the keys {', '.join(types)}: remove them once no node of the run is alive."
    ) from error
