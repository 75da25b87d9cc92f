"""Nodes of this process: have them join a round, and read from Redis what it holds of their run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousInfo

from redelastic.monitoring.control import RunControl, UnknownRunError
from redelastic.monitoring.records import Run
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.waiting import Within

until = Within(60)


def state(node: RedisRendezvousHandler) -> Run | None:
    """The node's run; None if Redis has none."""
    try:
        return RunControl(node.backend.connection, node.backend.keys).state()
    except UnknownRunError:
        return None


def record(node: RedisRendezvousHandler) -> Any:
    """The part of the run that must be the same after a loss of data."""
    run = state(node)
    return run and (
        run.epoch,
        run.size,
        run.min_nodes,
        run.max_nodes,
        [(n.id, n.rank) for n in run.members],
        run.broken,
    )


def join(*nodes: RedisRendezvousHandler) -> list[tuple[int, int]]:
    """Have nodes join a round; their ranks, each with the number of nodes."""
    with ThreadPoolExecutor(len(nodes)) as pool:
        return [(info.rank, info.world_size) for info in join_all(pool, *nodes)]


def events(node: RedisRendezvousHandler, kind: str) -> list[Any]:
    """The events of one kind in the node's run."""
    found = RunControl(node.backend.connection, node.backend.keys).events()
    return [event for event in found if event.event == kind]


def join_all(pool: ThreadPoolExecutor, *nodes: RedisRendezvousHandler) -> list[RendezvousInfo]:
    """Have nodes join a round, each in a thread of a pool."""
    joining = [pool.submit(node.next_rendezvous) for node in nodes]
    return [future.result(60) for future in joining]


def ranks(infos: list[RendezvousInfo]) -> list[int]:
    return [info.rank for info in infos]
