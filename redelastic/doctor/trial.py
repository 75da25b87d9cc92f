"""Our protocol, tried on a server: the user's rights, a rendezvous, a store, and how long each takes."""

from __future__ import annotations

import re
import socket
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import redis
import torch.distributed as dist
from redis.cluster import RedisCluster
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.redis.connection import Connection, text
from redelastic.redis.endpoint import Endpoint
from redelastic.redis.errors import ACL_RULES, RedelasticError, UnreachableError
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.backend import RedisRendezvousBackend
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.settings import Settings
from redelastic.store import RedisStore

from .finding import Finding, Level
from .server import masters

TTL: Final = 60.0  # how long leftovers that could not be removed stay, in seconds
ATTEMPT_TIMEOUT: Final = 1.5
TIMEOUT: Final = 2.0  # of the rendezvous, and of an operation on the store, in seconds
PINGS: Final = 100
PINGS_S: Final = 1.5  # no more pings after this time, in seconds
SLOW_MS: Final = 10.0
SLOW_WAKE_MS: Final = 100.0  # what I7 promises
WAKES: Final = 5
BLOCKED_S: Final = 0.05  # after which a reader is assumed to be blocked
KINDS: Final = ("string", "hash", "set", "zset", "stream", "list")

# One harmless call of each command that a run sends or that its scripts call: these have just its user's rights.
# A word of KINDS stands for a key of that type.
PROBES: Final = (
    "PING",
    "TIME",
    "EVAL return(1) 1 string",
    f"EVALSHA {'0' * 40} 1 string",
    *("DEL string", "SET string v", "GET string", "MGET string", "EXISTS string", "TYPE string"),
    *("HSET hash f 1", "HSETNX hash f 1", "HGET hash f", "HMGET hash f", "HGETALL hash", "HKEYS hash", "HLEN hash"),
    *("HEXISTS hash f", "HINCRBY hash f 1", "HDEL hash g"),
    *("SADD set m", "SCARD set", "SISMEMBER set m", "SMEMBERS set", "SREM set n"),
    *("ZADD zset 1 m", "ZCARD zset", "ZCOUNT zset 0 1", "ZRANGE zset 0 1", "ZRANGEBYSCORE zset 0 1", "ZSCORE zset m"),
    *("ZREM zset n", "ZREMRANGEBYRANK zset 5 6"),
    *("XADD stream * f v", "XREVRANGE stream + - COUNT 1", "XREAD COUNT 1 STREAMS stream 0"),
    *("RPUSH list v", "LLEN list", "LPOP list"),
    *(f"PEXPIRE {kind} {round(1000 * TTL)}" for kind in KINDS),
    "PTTL string",
)
_DENIED_COMMAND: Final = re.compile(r"run the '([^' |]+)|unknown command [`']([^'`,]+)")


@dataclass(frozen=True)
class _CornerKeys(RunKeys):
    """Keys in the run's slot that match its ACL pattern but are not the run's own."""

    corner: str = ""

    def _key(self, name: str) -> str:
        return super()._key(f"{self.corner}:{name}")

    def probe(self, kind: str) -> str:
        """The name of a key of that type to try commands on."""
        return self._key(f"probe-{kind}")


class Corner:
    """Where a trial writes: among a run's keys, apart from those the run uses.

    Args:
        key_prefix: prefix of the run's keys.
        run_id: id of the run; empty for one of the trial's own.

    Raises:
        ValueError: they cannot be part of a key.
    """

    def __init__(self, key_prefix: str, run_id: str) -> None:
        self.name = f"doctor-{uuid.uuid4().hex[:12]}"
        self.keys = _CornerKeys(run_id or self.name, key_prefix, self.name)
        self.store_keys = RunKeys(self.keys.run_id, key_prefix).store(self.name)
        store_keys = [f"{what}-{which}" for what in ("value", "count") for which in ("first", "second")]
        store_keys += [f"wake-{n}" for n in range(WAKES)]
        self._written = [*self.keys.types, *(self.keys.probe(kind) for kind in KINDS)]
        self._written += [self.store_keys.data, self.store_keys.waits, self.store_keys.once]
        self._written += [text(self.store_keys.stream(key.encode())) for key in store_keys]
        for epoch in range(2):  # the scripts of a rendezvous take the keys of the round before
            store = self.keys.store(epoch)
            self._written += [store.data, store.waits, store.once]

    @property
    def pattern(self) -> str:
        """The pattern of the trial's key names."""
        return f"{self.keys.prefix}:{{{self.keys.run_id}}}:*"

    @property
    def rules(self) -> str:
        """The ACL rules that the user needs: for the run, or for all runs under the key prefix."""
        keys = f"~{self.keys.prefix}:*" if self.keys.run_id == self.name else f"~{self.pattern}"
        return f"{keys} {ACL_RULES.partition(' ')[2]}"

    def handler(self, endpoint: Endpoint) -> RedisRendezvousHandler:
        """A node of a run in this corner, with a connection of its own.

        Raises:
            UnavailableError: Redis could not be reached.
        """
        connection = Connection.open(endpoint, ATTEMPT_TIMEOUT, TIMEOUT, TIMEOUT)
        settings = Settings(
            run_id=self.keys.run_id,
            min_nodes=2,
            max_nodes=2,
            join_timeout=TIMEOUT,
            read_timeout=TIMEOUT,
            ttl=TTL,
            key_prefix=self.keys.prefix,
        )
        backend = RedisRendezvousBackend(connection, settings.run_id, settings.key_prefix, TTL)
        backend.keys = self.keys
        handler = RedisRendezvousHandler(backend, settings)
        self._written.append(self.keys.status(handler.membership.node))
        return handler

    def clear(self, connection: Connection) -> None:
        """Remove everything written; what the server does not let us remove expires."""
        try:
            connection.call(lambda client: client.delete(*self._written), timeout=0)
        except RedelasticError:
            return


# -- Round trips


def examine_round_trips(connection: Connection) -> Iterator[Finding]:
    """Measure the round trip to the server.

    Raises:
        UnavailableError: it stopped answering.
    """
    client = next(iter(masters(connection).values()))
    times: list[float] = []
    until = time.monotonic() + PINGS_S
    while len(times) < PINGS and (not times or time.monotonic() < until):
        times.append(_timed(lambda: connection.call(lambda _: client.ping())))
    median, most = statistics.median(times), max(times)
    level: Level = "warning" if median > SLOW_MS else "ok"
    advice = "Move Redis closer to the nodes: a rendezvous takes several round trips." if level != "ok" else ""
    found = f"{median:.2f} ms median, {most:.2f} ms maximum of {len(times)} round trips"
    yield Finding("trial", "latency", level, found, advice, {"median_ms": median, "max_ms": most})


def _timed(operation: Callable[[], object]) -> float:
    """How long the operation takes, in ms."""
    started = time.perf_counter()
    operation()
    return 1000 * (time.perf_counter() - started)


# -- Rights


def examine_rights(connection: Connection, corner: Corner) -> Finding:
    """Try each command that a run needs once.

    ACL DRYRUN would also tell, but only administrators.

    Raises:
        UnavailableError: the server stopped answering.
    """
    replies = connection.call(lambda client: _probe(client, corner.keys))
    denied = [str(reply) for reply in replies if isinstance(reply, redis.ResponseError) and _is_denial(reply)]
    commands = sorted({(m[1] or m[2]).upper() for reply in denied if (m := _DENIED_COMMAND.search(reply))})
    if commands:
        found = f"this user may not run {', '.join(commands[:8])}{', …' if len(commands) > 8 else ''}"
        return Finding("trial", "rights", "problem", found, f"It needs the rules '{corner.rules}' (SECURITY.md).")
    if denied:
        advice = f"If the user is for one run, name it with --run; otherwise grant it ~{corner.keys.prefix}:*."
        return Finding("trial", "rights", "problem", f"this user may not use the keys {corner.pattern}", advice)
    return Finding("trial", "rights", "ok", f"this user may do everything that a run needs with {corner.pattern}")


def _probe(client: redis.Redis | RedisCluster, keys: _CornerKeys) -> list[Any]:
    if isinstance(client, RedisCluster):
        client = client.get_redis_connection(client.get_node_from_key(keys.probe(KINDS[0])))
    pipeline = client.pipeline(transaction=False)
    for line in PROBES:
        command, *words = line.split()
        pipeline.execute_command(command, *(keys.probe(word) if word in KINDS else word for word in words))
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _is_denial(reply: redis.ResponseError) -> bool:
    return isinstance(reply, redis.exceptions.NoPermissionError) or str(reply).startswith("unknown command")


# -- A rendezvous and a store


def try_rendezvous(endpoint: Endpoint, corner: Corner) -> Iterator[Finding]:
    """Let two nodes in two threads find each other, and connect to the store that rank 0 serves.

    Raises:
        UnreachableError: the server stopped answering.
    """
    handlers: list[RedisRendezvousHandler] = []
    try:
        handlers += (corner.handler(endpoint) for _ in range(2))
        started = time.perf_counter()
        with ThreadPoolExecutor(len(handlers)) as pool:
            joins = [pool.submit(handler.next_rendezvous) for handler in handlers]
            rounds = [join.result() for join in joins]
        ms = 1000 * (time.perf_counter() - started)
        ranks = sorted(entered.rank for entered in rounds)
        if ranks == [0, 1] and all(entered.world_size == 2 for entered in rounds):
            yield Finding("trial", "rendezvous", "ok", f"2 nodes in {ms:.1f} ms", numbers={"ms": ms})
        else:
            yield Finding("trial", "rendezvous", "problem", f"2 nodes got the ranks {ranks}", "Report this as a bug.")
        place = rounds[0].bootstrap_store_info
        if place is not None and handlers[0].use_agent_store:
            yield _bootstrap(place.master_addr, place.master_port)
    except UnreachableError:
        raise
    except (RedelasticError, RendezvousError) as e:
        if isinstance(e.__cause__, UnreachableError):
            raise e.__cause__ from None
        yield Finding("trial", "rendezvous", "problem", "failed", str(e))
    finally:
        for handler in handlers:
            handler.end("finished", "closes", timeout=0)  # a single attempt: its keys are removed anyway


def _bootstrap(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), TIMEOUT / 2).close()
    except OSError as e:
        advice = "Workers connect there: check name resolution and the firewall, or give --local-addr."
        return Finding("trial", "bootstrap", "problem", f"{host}:{port} cannot be reached from this host: {e}", advice)
    return Finding("trial", "bootstrap", "ok", f"rank 0 is reachable at {host}")


def try_store(connection: Connection, corner: Corner) -> Iterator[Finding]:
    """Use each operation of a store once, and measure how soon a blocked reader wakes."""
    keys = corner.keys
    store = RedisStore(connection, keys.run_id, corner.name, key_prefix=keys.prefix, timeout=TIMEOUT, ttl=TTL)
    try:
        _use(store, "first")  # loads the scripts, which later nodes find there
        times = _use(store, "second")
        shown = ", ".join(f"{name} {ms:.1f}" for name, ms in times.items())
        numbers = {f"{name}_ms": ms for name, ms in times.items()}
        yield Finding("trial", "store", "ok", f"{shown} ms", numbers=numbers)
        median = statistics.median(_wake_up(store, f"wake-{n}") for n in range(WAKES))
        found, numbers = f"a blocked reader in {median:.1f} ms", {"median_ms": median}
        if median > SLOW_WAKE_MS:
            yield Finding(
                "trial", "wake-up", "warning", found, "See latency, and check the server's other load.", numbers
            )
        else:
            yield Finding("trial", "wake-up", "ok", found, numbers=numbers)
    except dist.DistError as e:
        yield Finding("trial", "store", "problem", "failed", str(e))
    finally:
        store.close()


def _use(store: RedisStore, which: str) -> dict[str, float]:
    """How long each operation takes, in ms.

    Raises:
        DistError: one of them returned something wrong.
    """
    value, count = f"value-{which}", f"count-{which}"
    operations: dict[str, tuple[Callable[[], object], object]] = {
        "set": (lambda: store.set(value, "a"), None),
        "get": (lambda: store.get(value), b"a"),
        "add": (lambda: store.add(count, 2), 2),
        "wait": (lambda: store.wait([value, count]), None),
        "compare_set": (lambda: store.compare_set(value, "a", "b"), b"b"),
    }
    times: dict[str, float] = {}
    for name, (operation, expected) in operations.items():
        started = time.perf_counter()
        got = operation()
        times[name] = 1000 * (time.perf_counter() - started)
        if got != expected:
            raise dist.DistError(f"{name} returned {got!r}, not {expected!r}; report this as a bug.")
    return times


def _wake_up(store: RedisStore, key: str) -> float:
    """How long after a ``set`` a blocked ``get`` returns, in ms."""

    def read() -> float:
        store.get(key)
        return time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        time.sleep(BLOCKED_S)
        started = time.perf_counter()
        store.set(key, "x")
        return 1000 * (reader.result() - started)
