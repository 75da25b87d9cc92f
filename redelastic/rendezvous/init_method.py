"""``init_process_group(init_method="redis://…")``: a process group whose store is in Redis, not with rank 0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from torch.distributed import Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from redelastic.monitoring.events import Left
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import SCHEMES
from redelastic.store import RedisStore
from redelastic.torch_errors import torch_errors

from .backend import RedisRendezvousBackend
from .handler import EPOCH_VARIABLE, EXIT_TIMEOUT, PREFIX_VARIABLE, RedisRendezvousHandler
from .settings import Settings, parameters_from_url

RUN_VARIABLE: Final = "TORCHELASTIC_RUN_ID"
# Outside an agent a thread of the training process beats, and cannot while a call such as `pickle.load` holds the
# interpreter's lock. So the lease is a minute.
MISSED_BEATS: Final = "30"

# By process, server, prefix and run: a process stays a member of its run until it exits, or makes its next group there.
_handlers: Final[dict[tuple[int, str, str, str], RedisRendezvousHandler]] = {}
KEPT_STORES: Final = 2  # of the last rounds: torch's C++ may still hold the last but one


@dataclass
class _Worker:
    """This process as a worker of its agents: the stores of its last rounds, over one connection.

    Attributes:
        stores: by epoch.
        groups: how many groups it has made in the last round. All workers make the same groups, and torch uses the same
            key names for each: a group must not find the keys of the previous one.
    """

    connection: Connection
    stores: dict[int, RedisStore] = field(default_factory=dict)
    groups: int = 0

    def next_store(self, epoch: int, settings: Settings) -> RedisStore:
        """The store of the next group in a round."""
        if epoch not in self.stores:
            self.groups = 0
            self.stores[epoch] = RedisStore(
                self.connection, settings.run_id, epoch=epoch, key_prefix=settings.key_prefix, ttl=settings.ttl
            )
            while len(self.stores) > KEPT_STORES:
                self.stores.pop(next(iter(self.stores))).close()
        self.groups += 1
        return self.stores[epoch].prefixed(f"worker/{self.groups}")


_workers: Final[dict[tuple[int, str, str, str], _Worker]] = {}  # by process, endpoint, prefix and run


def register_init_method() -> None:
    """Register ``redis://`` and the other schemes with ``torch.distributed``; a second call changes nothing.

    Afterwards ``init_process_group(init_method=URL)`` takes the URL of :func:`redelastic.handler_from_url`. In a worker
    of torchrun with this rendezvous, ``redis://host:port/db`` is enough, or ``redis://`` alone if
    ``REDELASTIC_REDIS_URL`` is set: the process joins the store of its agents' round. Elsewhere the processes find each
    other by a rendezvous of their own in the run ``run_id`` of the URL, of ``WORLD_SIZE`` processes, or of
    ``min_nodes`` to ``max_nodes``; rank and world size may come from the environment, from the URL, or from that
    rendezvous.

    Such a process renews its lease itself, and does not while a call holds Python's interpreter lock: ``pickle.load``
    of millions of objects, or an extension. So ``keep_alive_max_attempt`` is 30 there, and the lease a minute. A longer
    call breaks the group: it trains on, but makes no new one. In return, the others' waits for a process that was
    killed take up to a minute, and so does a new start under the same run id after all processes were killed.
    """
    for scheme in SCHEMES:
        if scheme not in _rendezvous_handlers:
            register_rendezvous_handler(scheme, _rendezvous)


def _rendezvous(url: str, timeout: timedelta = default_pg_timeout, **_unused: Any) -> Iterator[tuple[Store, int, int]]:
    base, _, query = url.partition("?")
    if "://" not in base:  # without a host, torch drops the slashes once it has added a rank and a world size
        base = base.replace(":", "://", 1)
    options = dict(parse_qsl(query, keep_blank_values=True))
    rank = _number("rank", options.pop("rank", os.environ.get("RANK")))
    size = _number("world_size", options.pop("world_size", os.environ.get("WORLD_SIZE")))
    options.setdefault("run_id", os.environ.get(RUN_VARIABLE, ""))
    if options.keys().isdisjoint({"key_prefix", "prefix"}) and PREFIX_VARIABLE in os.environ:
        options["key_prefix"] = os.environ[PREFIX_VARIABLE]
    epoch = _number(EPOCH_VARIABLE, os.environ.get(EPOCH_VARIABLE))
    if size is not None and not options.keys() & {"min_nodes", "max_nodes", "min_workers", "max_workers"}:
        options |= {"min_nodes": str(size), "max_nodes": str(size)}
    options.setdefault("keep_alive_max_attempt", MISSED_BEATS)
    options.setdefault("last_call_timeout", "0")
    options.setdefault("join_timeout", options.pop("timeout", str(timeout.total_seconds())))
    params = parameters_from_url(f"{base}?{urlencode(options)}")
    if params.endpoint == "redis://":  # only the scheme: the environment has the rest
        params.endpoint = ""

    settings = Settings.from_parameters(params)
    is_worker = settings.run_id == os.environ.get(RUN_VARIABLE)
    if is_worker and epoch is not None and rank is not None and size is not None:
        place = (os.getpid(), params.endpoint, settings.key_prefix, settings.run_id)
        if place not in _workers:
            _workers[place] = _Worker(_connection(params.endpoint, settings, timeout))
        store = _workers[place].next_store(epoch, settings)
        store.set_timeout(timeout)
        yield store, rank, size
    else:
        yield _join(_connection(params.endpoint, settings, timeout), settings, rank, timeout)
    raise RuntimeError("A process group cannot regroup by itself; restart the workers in the next round.")


@torch_errors()
def _connection(endpoint: str, settings: Settings, timeout: timedelta) -> Connection:
    return Connection.open(
        settings.endpoint(endpoint), settings.attempt_timeout, settings.read_timeout, timeout.total_seconds()
    )


def _join(connection: Connection, settings: Settings, rank: int | None, timeout: timedelta) -> tuple[Store, int, int]:
    """Find the other processes by a rendezvous; a process that fails in it leaves, so that all fail."""
    place = (os.getpid(), connection.name, settings.key_prefix, settings.run_id)
    if former := _handlers.pop(place, None):
        former.end(Left(cause="group"), "goes on")
    backend = RedisRendezvousBackend(connection, settings.run_id, settings.key_prefix, settings.ttl)
    handler = RedisRendezvousHandler(backend, settings)
    handler.exports_environment = False  # the environment names the round of this worker's agent
    try:
        info = handler.next_rendezvous()
        info.store.set_timeout(timeout)
        rank = info.rank if rank is None else rank
        _claim_rank(rank, info, settings.run_id)
    except BaseException as e:
        handler.end(Left(cause="timeout", reason=str(e)), "goes on", EXIT_TIMEOUT)
        raise
    _handlers[place] = handler
    return info.store, rank, info.world_size


def _claim_rank(rank: int, info: RendezvousInfo, run_id: str) -> None:
    if rank >= info.world_size:
        raise ValueError(f"rank={rank} is not below the world size of {info.world_size} of run {run_id!r}.")
    if info.store.add(f"redelastic/rank/{rank}", 1) != 1:
        raise ValueError(f"rank={rank} is used twice in run {run_id!r}; give each process its own rank, or none.")


def _number(name: str, value: str | None) -> int | None:
    if value is not None and not (value.isascii() and value.isdecimal()):
        raise ValueError(f"{name}={value!r} must be a whole number, 0 or more.")
    return None if value is None else int(value)
