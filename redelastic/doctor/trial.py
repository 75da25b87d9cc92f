"""The protocol, tried on a server: a rendezvous, a store, and how long each takes. The only check that needs torch."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.logs import only_errors_of
from redelastic.monitoring.events import Left
from redelastic.redis.connection import Connection, text
from redelastic.redis.endpoint import Endpoint
from redelastic.redis.errors import RedelasticError, UnreachableError
from redelastic.rendezvous.backend import RedisRendezvousBackend
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.settings import Settings
from redelastic.store import RedisStore

from .finding import Finding, Level, finding
from .rights import TTL, WAKES, Corner

ATTEMPT_TIMEOUT: Final = 1.5  # in seconds
TIMEOUT: Final = 2.0  # of the rendezvous, and of an operation on the store, in seconds
SLOW_WAKE_MS: Final = 100.0  # what I7 promises
BLOCKED_S: Final = 0.05  # after which a reader is assumed to be blocked


_found: Final = partial(finding, "trial")


def try_rendezvous(endpoint: Endpoint, corner: Corner) -> Iterator[Finding]:
    """Let two nodes in two threads find each other, and connect to the store that rank 0 serves.

    Raises:
        UnreachableError: the server stopped answering.
    """
    with only_errors_of(RedisRendezvousHandler.__module__):  # the findings say here what nodes say of themselves
        yield from _try(endpoint, corner)


def _try(endpoint: Endpoint, corner: Corner) -> Iterator[Finding]:
    handlers: list[RedisRendezvousHandler] = []
    try:
        handlers += (_node(endpoint, corner) for _ in range(2))
        started = time.perf_counter()
        with ThreadPoolExecutor(len(handlers)) as pool:
            joins = [pool.submit(handler.next_rendezvous) for handler in handlers]
            rounds = [join.result() for join in joins]
        ms = 1000 * (time.perf_counter() - started)
        ranks = sorted(entered.rank for entered in rounds)
        if ranks == [0, 1] and all(entered.world_size == 2 for entered in rounds):
            yield _found("rendezvous", "ok", f"2 nodes in {ms:.1f} ms", ms=ms)
        else:
            yield _found("rendezvous", "problem", f"2 nodes got the ranks {ranks}", "Report this as a bug.")
        place = rounds[0].bootstrap_store_info
        if place is not None and handlers[0].use_agent_store:
            yield _bootstrap(place.master_addr, place.master_port)
    except UnreachableError:
        raise
    except (RedelasticError, RendezvousError) as e:
        if isinstance(e.__cause__, UnreachableError):
            raise e.__cause__ from None
        yield _found("rendezvous", "problem", "failed", str(e))
    finally:
        for handler in handlers:
            handler.end(Left(cause="finished"), "closes", timeout=0)  # a single attempt: its keys are removed anyway


def _node(endpoint: Endpoint, corner: Corner) -> RedisRendezvousHandler:
    """A node of a run in this corner, with a connection of its own."""
    connection = Connection.open(endpoint, ATTEMPT_TIMEOUT, TIMEOUT, TIMEOUT)
    settings = Settings(
        run_id=corner.keys.run_id,
        min_nodes=2,
        max_nodes=2,
        join_timeout=TIMEOUT,
        read_timeout=TIMEOUT,
        ttl=TTL,
        key_prefix=corner.keys.prefix,
    )
    backend = RedisRendezvousBackend(connection, settings.run_id, settings.key_prefix, TTL)
    backend.keys = corner.keys
    handler = RedisRendezvousHandler(backend, settings)
    corner.add(corner.keys.status(handler.node.id))
    return handler


def _bootstrap(host: str, port: int) -> Finding:
    try:
        socket.create_connection((host, port), TIMEOUT / 2).close()
    except OSError as e:
        advice = "Workers connect there: check name resolution and the firewall, or give --local-addr."
        return _found("bootstrap", "problem", f"{host}:{port} cannot be reached from this host: {e}", advice)
    return _found("bootstrap", "ok", f"rank 0 is reachable at {host}")


def try_store(connection: Connection, corner: Corner) -> Iterator[Finding]:
    """Use each operation of a store once, and measure how soon a blocked reader wakes."""
    keys = corner.keys
    store = RedisStore(connection, keys.run_id, corner.name, key_prefix=keys.prefix, timeout=TIMEOUT, ttl=TTL)
    try:
        _use(store, "first")  # loads the scripts, which later nodes find there
        times = _use(store, "second")
        shown = ", ".join(f"{name} {ms:.1f}" for name, ms in times.items())
        yield _found("store", "ok", f"{shown} ms", "", **{f"{name}_ms": ms for name, ms in times.items()})
        median = statistics.median(_wake_up(store, f"wake-{n}") for n in range(WAKES))
        level: Level = "warning" if median > SLOW_WAKE_MS else "ok"
        advice = "See latency, and check the server's other load."
        yield _found("wake-up", level, f"a blocked reader in {median:.1f} ms", advice, median_ms=median)
    except dist.DistError as e:
        yield _found("store", "problem", "failed", str(e))
    finally:
        for key in store.list_sender_keys():
            corner.add(text(key))
        store.close()


def _use(store: RedisStore, which: str) -> dict[str, float]:
    """Measure how long each operation takes, in ms.

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
    """Measure how long after a ``set`` a blocked ``get`` returns, in ms."""

    def read() -> float:
        store.get(key)
        return time.perf_counter()

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        time.sleep(BLOCKED_S)
        started = time.perf_counter()
        store.set(key, "x")
        return 1000 * (reader.result() - started)
