"""Faults of a Redis that still runs: each block has a server fail in one way, and then repairs it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import redis

from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.nodes import NodeFactory
from tests.support.servers import reserved_port, wait_until

INTERVAL: Final = 0.4
LEASE: Final = 3 * INTERVAL
AT_ONCE: Final = 60.0  # limit on a busy machine of what is due at once; the alternative is a timeout of two minutes


@contextmanager
def configured(server: RedisServer, **values: object) -> Iterator[redis.Redis]:
    """Set directives for one block; yields a client that was connected before."""
    with server.get_client() as admin:
        names = {name.replace("_", "-"): value for name, value in values.items()}
        before: dict[str, str] = {name: admin.config_get(name)[name] for name in names}
        for name, value in names.items():
            admin.config_set(name, value)
        try:
            yield admin
        finally:
            for name, old in before.items():
                admin.config_set(name, old)


@contextmanager
def no_scripts(server: RedisServer) -> Iterator[None]:
    with server.get_client() as admin:
        admin.script_flush()
        yield
        admin.script_flush()


@contextmanager
def killed_connections(server: RedisServer) -> Iterator[None]:
    """Kill all connections in bursts, between which a node has time to connect and to beat, even on a busy machine."""
    ended = threading.Event()

    def kill() -> None:
        with server.get_client() as admin:
            while not ended.wait(LEASE / 2):
                for _ in range(4):
                    admin.client_kill_filter(_type="normal", skipme=True)
                    ended.wait(0.03)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    """CLIENT PAUSE ALL holds back CLIENT UNPAUSE too, so it ends by itself."""
    with server.get_client() as admin:
        admin.client_pause(round(3000 * LEASE))
        yield
        admin.ping()  # answered when the pause is over


@contextmanager
def paused_writes(server: RedisServer) -> Iterator[None]:
    with server.get_client() as admin:
        admin.client_pause(60_000, all=False)
        try:
            yield
        finally:
            admin.client_unpause()


@contextmanager
def no_connection_free(server: RedisServer) -> Iterator[None]:
    with configured(server, maxclients=1) as admin:
        admin.client_kill_filter(_type="normal", skipme=True)
        yield


@contextmanager
def full_memory(server: RedisServer) -> Iterator[None]:
    with configured(server, maxmemory=1):
        yield


@contextmanager
def read_only(server: RedisServer) -> Iterator[None]:
    """Make it a replica without a master, as after a failover that its clients do not know of; it keeps its data."""
    with server.get_client() as admin, reserved_port() as nobody:
        admin.replicaof("127.0.0.1", str(nobody))
        try:
            yield
        finally:
            admin.replicaof("NO", "ONE")


@contextmanager
def failing_disk(server: RedisServer) -> Iterator[None]:
    """A background save fails, so Redis refuses writes. Tests' servers do not save otherwise."""
    with configured(server, save="3600 1") as admin:
        in_the_way = Path(str(admin.config_get("dir")["dir"]), "dump.rdb")

        def save(expected: str) -> None:
            wait_until(admin.bgsave, "a save begins")
            wait_until(lambda: not admin.info("persistence")["rdb_bgsave_in_progress"], "the save ends")
            assert admin.info("persistence")["rdb_last_bgsave_status"] == expected

        in_the_way.unlink(missing_ok=True)
        in_the_way.mkdir()
        save("err")
        try:
            yield
        finally:
            in_the_way.rmdir()
            save("ok")


@contextmanager
def busy(server: RedisServer) -> Iterator[None]:
    """A script runs for ever."""
    with configured(server, lua_time_limit=10) as admin, server.get_client(socket_timeout=120) as culprit:

        def spin() -> None:
            with suppress(redis.ResponseError):  # SCRIPT KILL
                culprit.eval("while true do end", 0)

        def is_busy() -> bool:
            try:
                admin.ping()
            except redis.ResponseError as e:
                assert str(e).startswith("BUSY")  # noqa: PT017  (which error it is, not that there is one)
                return True
            return False

        thread = threading.Thread(target=spin)
        thread.start()
        wait_until(is_busy, "the script blocks the server")
        try:
            yield
        finally:
            admin.script_kill()
            thread.join()


Fault = Callable[[RedisServer], AbstractContextManager[None]]
# The block, the fault, what a log must say of it, and whether writes fail meanwhile.
FAULTS: Final[list[tuple[Fault, str, str, bool]]] = [
    (no_scripts, "SCRIPT FLUSH", "", False),
    (killed_connections, "CLIENT KILL of all connections, in bursts of four, three times a second", "", False),
    (paused, "CLIENT PAUSE ALL for three leases", "[Tt]imeout", True),
    (paused_writes, "CLIENT PAUSE WRITE", "[Tt]imeout", True),
    (
        no_connection_free,
        "all connections are killed, and maxclients is reached",
        "max number of clients|could not be reached",
        True,
    ),
    (full_memory, "maxmemory is reached", "out of memory.*maxmemory", True),
    (read_only, "the master becomes a read-only replica", "replica", True),
    (failing_disk, "a save fails: MISCONF", "cannot save its data", True),
    (busy, "a script runs for ever: BUSY", "BUSY|[Tt]imeout", True),
]


def group(new_node: NodeFactory, server: RedisServer, *sizes: int, **config: Any) -> list[RedisRendezvousHandler]:
    """Three nodes of the test's run."""
    config = {"keep_alive_interval": INTERVAL, "join_timeout": 40, "close_timeout": 2} | config
    return [new_node(*sizes, url=server.url, **config) for _ in range(3)]


def waiting_counts(nodes: list[RedisRendezvousHandler]) -> list[int]:
    """How many nodes wait, as each node knows."""
    return [node.num_nodes_waiting() for node in nodes]
