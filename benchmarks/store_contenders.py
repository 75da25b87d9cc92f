"""The stores compared, each on its own server, and how a process opens one."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import redis
import torch.distributed as dist

from benchmarks.harness import etcd_server
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore

OURS: Final = "redelastic"
REDIS_PY: Final = "redis-py"
TCP: Final = "TCPStore"
ETCD: Final = "EtcdStore"
FILE: Final = "FileStore"
CONTENDERS: Final = (OURS, TCP, ETCD, FILE, REDIS_PY)
LIMIT: Final = 10  # seconds for one operation before its store gives up
NO_ETCD: Final = "etcd is not installed"

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
    with (
        RedisServer() as server,
        tempfile.TemporaryDirectory(prefix="redelastic-bench-") as folder,
        etcd_server() as etcd,
    ):
        master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pids = (os.getpid(), server.pid or 0, *((etcd[1],) if etcd else ()))
        yield Servers(server.url, master.port, etcd[0] if etcd else "", folder, pids, min(os.sched_getaffinity(0)))


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


class _Checked(dist.PrefixStore):
    """A TCPStore with a check behind what it sends without waiting for a reply."""

    def set(self, key: str, value: Any) -> None:
        super().set(key, value)
        self.check([key])

    def append(self, key: str, value: Any) -> None:
        super().append(key, value)  # type: ignore[misc]  # not in torch's stubs
        self.check([key])

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        super().multi_set(keys, values)  # type: ignore[misc]
        self.check(keys[-1:])

    def queue_push(self, key: str, value: Any) -> None:
        super().queue_push(key, value)
        self.check([key])


def _redis_py(client: redis.Redis, name: str) -> SimpleNamespace:
    """The nearest commands of redis-py's client: without fencing, and without effects once."""
    return SimpleNamespace(
        set=partial(client.hset, name),
        get=partial(client.hget, name),
        add=partial(client.hincrby, name),
        check=lambda keys: client.hexists(name, keys[0]),
        wait=lambda keys: client.hexists(name, keys[0]),
        multi_set=lambda keys, values: client.hset(name, mapping=dict(zip(keys, values, strict=True))),
        multi_get=partial(client.hmget, name),
        delete_key=partial(client.hdel, name),
        num_keys=partial(client.hlen, name),
        queue_push=lambda key, value: client.rpush(f"{name}-{key}", value),
        queue_pop=lambda key: client.blpop([f"{name}-{key}"], LIMIT),
    )


@contextlib.contextmanager
def opened(contender: str, servers: Servers, name: str) -> Iterator[Any]:
    """A client of the store ``name``, with its own connection; it returns from a write once that is made."""
    timeout = timedelta(seconds=LIMIT)
    store: Any
    if contender == REDIS_PY:
        with redis.Redis.from_url(servers.redis) as client:
            yield _redis_py(client, name)
    elif contender == OURS:
        store = RedisStore(servers.redis, "bench", name, timeout=timeout)
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
        yield _Checked(name, client)
        idle.append(client)  # not after an error, which may have ended its connection
    elif contender == ETCD:
        import etcd  # noqa: PLC0415
        from torch.distributed.elastic.rendezvous.etcd_store import EtcdStore  # noqa: PLC0415

        host, _, port = servers.etcd.partition(":")
        yield EtcdStore(etcd.Client(host=host, port=int(port)), f"/{name}", timeout)
    else:
        path = Path(servers.folder) / name
        store = dist.FileStore(str(path), -1)
        store.set_timeout(timeout)
        try:
            yield store
        finally:
            path.unlink(missing_ok=True)


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
