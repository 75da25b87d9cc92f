"""The stores compared, each on its own server, and how a process opens one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import hiredis
import torch.distributed as dist
from redelastic.store.line import MOST

from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore

OURS: Final = "redelastic"
BARE: Final = "Redis, bare"
TCP: Final = "TCPStore"
ETCD: Final = "EtcdStore"
FILE: Final = "FileStore"
HASH: Final = "HashStore"
ACROSS_PROCESSES: Final = (OURS, TCP, ETCD, FILE, BARE)
CONTENDERS: Final = (*ACROSS_PROCESSES, HASH)
LIMIT: Final = 10  # seconds for one operation before its store gives up
NO_ETCD: Final = "etcd is not installed"
ONE_PROCESS: Final = "one process only"

_idle: Final[dict[int, list[dist.TCPStore]]] = {}  # clients by port, reused


@dataclass(frozen=True)
class Servers:
    """Where the contenders' servers are, in a form to pass to another process."""

    redis: str
    tcp_port: int
    etcd: str  # empty if not installed
    folder: str
    pids: tuple[int, ...]
    clients_core: int  # free of servers while they are kept apart

    def missing(self, contender: str) -> str:
        """Why a contender cannot take part; empty if it can."""
        return NO_ETCD if contender == ETCD and not self.etcd else ""


@contextlib.contextmanager
def serving() -> Iterator[Servers]:
    """Start what the stores need; TCPStore's server is a thread of this process, as it is of rank 0's in a job."""
    with RedisServer() as redis, tempfile.TemporaryDirectory(prefix="redelastic-bench-") as folder, _etcd() as etcd:
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids = (os.getpid(), redis.pid or 0, *((etcd[1],) if etcd else ()))
        yield Servers(redis.url, master.port, etcd[0] if etcd else "", folder, pids, min(os.sched_getaffinity(0)))


@contextlib.contextmanager
def apart(servers: Servers) -> Iterator[None]:
    """Keep the servers off the clients' core, if there are several.

    Otherwise the kernel moves them together and apart, and a round trip takes now 20 µs, now 60 µs.
    """
    forkserver.ensure_running()  # all later processes inherit its cores
    cores = os.sched_getaffinity(0)
    try:
        _pin(servers.pids, cores - {servers.clients_core} or cores)
        yield
    finally:
        _pin(servers.pids, cores)


def _pin(pids: tuple[int, ...], cores: set[int]) -> None:
    for pid in pids:
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # a thread that has ended
                os.sched_setaffinity(int(task.name), cores)


@contextlib.contextmanager
def _etcd() -> Iterator[tuple[str, int] | None]:
    """Torch's own private etcd with the API v2; its data is in memory if the system offers that."""
    try:
        import etcd  # noqa: F401, PLC0415
        from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer  # noqa: PLC0415
    except ImportError:
        yield None
        return
    if not shutil.which("etcd"):
        yield None
        return
    memory = Path("/dev/shm")  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="redelastic-bench-", dir=memory if memory.is_dir() else None) as folder:
        server = EtcdServer(folder)
        try:
            server.start(stderr=subprocess.DEVNULL)
            yield server.get_endpoint(), server._get_etcd_server_process().pid  # noqa: SLF001
        finally:
            server.stop()


class _BareSocket:
    """Commands of Redis and their replies, on a blocking socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._reader = connection, hiredis.Reader()
        self._owed = 0  # replies that nobody has waited for

    def ask(self, *words: Any) -> Any:
        """Send a command, and return its reply."""
        self._connection.sendall(hiredis.pack_command(words))
        if self._owed:
            self._settle(0)
        return self._read()

    def ask_both(self, one: tuple[Any, ...], other: tuple[Any, ...]) -> tuple[Any, Any]:
        """Send two commands together, and return both replies; wakes up for more than the shortest reply."""
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, len(b":1\r\n") + 1)
        self._connection.sendall(hiredis.pack_command(one) + hiredis.pack_command(other))
        self._reader.feed(self._connection.recv(65536))
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        return self._read(), self._read()

    def tell(self, *words: Any) -> None:
        """Send a command, and wait only if as many are under way as a store of ours lets be."""
        self._connection.sendall(hiredis.pack_command(words))
        self._owed += 1
        if self._owed == MOST:
            self._settle(MOST // 2)

    def _settle(self, keep: int) -> None:
        while self._owed > keep:
            self._read()
            self._owed -= 1

    def _read(self) -> Any:
        while (reply := self._reader.gets()) is False:
            self._reader.feed(self._connection.recv(65536))
        if isinstance(reply, Exception):
            raise reply
        return reply


@contextlib.contextmanager
def bare_redis(url: str, name: str) -> Iterator[SimpleNamespace]:
    """The limit: Redis' own commands on a blocking socket, without timeouts, retries, fencing and effects once."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname, parts.port or 0), LIMIT) as connection:
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        socket_ = _BareSocket(connection)
        ask = socket_.ask
        if parts.password:
            ask("AUTH", unquote(parts.password))
        yield SimpleNamespace(
            ask=ask,
            ask_both=socket_.ask_both,
            tell=socket_.tell,
            set=lambda key, value: ask("HSET", name, key, value),
            get=lambda key: ask("HGET", name, key),
            add=lambda key, amount: ask("HINCRBY", name, key, amount),
            check=lambda keys: ask("HEXISTS", name, keys[0]),
            wait=lambda keys: ask("HEXISTS", name, keys[0]),
            multi_set=lambda keys, values: ask("HSET", name, *chain(*zip(keys, values, strict=True))),
            multi_get=lambda keys: ask("HMGET", name, *keys),
            delete_key=lambda key: ask("HDEL", name, key),
            num_keys=lambda: ask("HLEN", name),
            queue_push=lambda key, value: ask("RPUSH", f"{name}-{key}", value),
            queue_pop=lambda key: ask("BLPOP", f"{name}-{key}", LIMIT),
        )


@contextlib.contextmanager
def opened(contender: str, servers: Servers, name: str, *, acknowledge: bool = True) -> Iterator[Any]:
    """A client of the store ``name``, with its own connection; ours waits for its writes if ``acknowledge``."""
    timeout = timedelta(seconds=LIMIT)
    store: Any
    if contender == BARE:
        with bare_redis(servers.redis, name) as bare:
            yield bare
    elif contender == OURS:
        store = RedisStore(servers.redis, "bench", name, timeout=timeout, acknowledge=acknowledge)
        try:
            yield store
        finally:
            store.close()
    elif contender == TCP:
        idle = _idle.setdefault(servers.tcp_port, [])
        client = (
            idle.pop()
            if idle
            else dist.TCPStore("127.0.0.1", servers.tcp_port, None, False, timeout, wait_for_workers=False)
        )
        yield dist.PrefixStore(name, client)
        idle.append(client)  # not after an error, which may have ended its connection
    elif contender == ETCD:
        import etcd  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore  # noqa: PLC0415

        host, _, port = servers.etcd.partition(":")
        yield EtcdStore(etcd.Client(host=host, port=int(port)), f"/{name}", timeout)
    elif contender == FILE:
        path = Path(servers.folder) / name
        store = dist.FileStore(str(path), -1)
        store.set_timeout(timeout)
        try:
            yield store
        finally:
            path.unlink(missing_ok=True)
    else:
        store = dist.HashStore()
        store.set_timeout(timeout)
        yield store


def refusal(contender: str, error: Exception) -> str:
    """What a cell says about a contender that failed; ours must not fail.

    Raises:
        Exception: the error itself, if the contender is ours.
    """
    if contender == OURS:
        raise error
    said = str(error)
    if isinstance(error, NotImplementedError | AttributeError) or "pure virtual" in said or "INTERNAL ASSERT" in said:
        return "does not have it"
    if "timeout" in said.lower():
        return f"not within {LIMIT} s"
    return f"fails: {said.splitlines()[0][:60].replace('|', '/')}" if said else f"fails: {type(error).__name__}"
