"""What tests ask of a group of nodes: to join, and what Redis holds of their run."""

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
    try:
        return RunControl(node.backend.connection, node.backend.keys).state()
    except UnknownRunError:
        return None


def record(node: RedisRendezvousHandler) -> Any:
    """The parts of the run that must be there again."""
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
    with ThreadPoolExecutor(len(nodes)) as pool:
        infos = [future.result(60) for future in [pool.submit(node.next_rendezvous) for node in nodes]]
    return [(info.rank, info.world_size) for info in infos]


def events(node: RedisRendezvousHandler, kind: str) -> list[Any]:
    told = RunControl(node.backend.connection, node.backend.keys).events()
    return [event for event in told if event.event == kind]


def join_all(pool: ThreadPoolExecutor, *nodes: RedisRendezvousHandler) -> list[RendezvousInfo]:
    joining = [pool.submit(node.next_rendezvous) for node in nodes]
    return [future.result(60) for future in joining]


def ranks(infos: list[RendezvousInfo]) -> list[int]:
    return [info.rank for info in infos]
