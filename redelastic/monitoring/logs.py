"""Where the logs of a run's workers are, and how the logs of failed workers end: from events and statuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .events import Event, Failed, Log, Lost, Started
from .failure import RoundFailure, failure_of
from .failure import document as failure_document
from .records import Node


@dataclass(frozen=True)
class Place:
    """Where a worker writes its log.

    Attributes:
        rank: of the worker in the job.
        node: id of its node.
        epoch: of its round.
        path: of its log on that node.
    """

    rank: int
    node: str
    epoch: int
    path: str


@dataclass(frozen=True)
class Failure:
    """A worker that failed.

    Attributes:
        rank, node, epoch, path: as in :class:`Place`.
        time: when it failed, on the server's clock, in seconds since 1970.
        tail: the last lines of its log, without secrets.
    """

    rank: int
    node: str
    epoch: int
    path: str
    time: float
    tail: str


def places(events: Iterable[Event], nodes: Iterable[Node] = ()) -> list[Place]:
    """The logs of the last round whose agents reported them, by rank.

    Args:
        events: of the run; if many nodes started at once, only the first are in them.
        nodes: of the run now; the status of each names its workers' logs.
    """
    reported = [*_places_in_events(events), *_places_in_statuses(nodes)]
    last = max((place.epoch for place in reported), default=0)
    found = {place.rank: place for place in reported if place.epoch == last}
    return [found[rank] for rank in sorted(found)]


def _places_in_events(events: Iterable[Event]) -> Iterator[Place]:
    for event in events:
        if isinstance(event, Started):
            for rank, path in event.logs.items():
                yield Place(rank, event.node, event.epoch, path)


def _places_in_statuses(nodes: Iterable[Node]) -> Iterator[Place]:
    for node in nodes:
        epoch = node.status.get("epoch")
        for worker in node.workers:
            rank, path = worker.get("rank"), worker.get("log")
            if isinstance(epoch, int) and isinstance(rank, int) and isinstance(path, str):
                yield Place(rank, node.id, epoch, path)


def failures(events: Iterable[Event]) -> list[Failure]:
    """Workers that failed, the newest round last, and within each round the first to fail first."""
    found = [
        Failure(e.rank, e.node, e.epoch, e.path, e.time - (e.age_ms or 0) / 1000, e.lines)
        for e in events
        if isinstance(e, Log) and e.rank is not None
    ]
    return sorted(found, key=lambda failure: (failure.epoch, failure.time))


def first_failure(events: Iterable[Event]) -> Failure | None:
    """The first worker to fail in the last round in which one did.

    Prefers rounds that lost no node: in other rounds, workers fail because a peer is gone.
    """
    kept = list(events)
    with_losses = {event.epoch for event in kept if isinstance(event, Lost)}
    found = failures(kept)
    found = [one for one in found if one.epoch not in with_losses] or found
    found = [one for one in found if one.epoch == found[-1].epoch]
    why = failure_of(kept, found[0].epoch) if found else None
    blamed = why.cause if why else None
    of_cause = (
        one for one in found if isinstance(blamed, Failed) and (one.node, one.rank) == (blamed.node, blamed.rank)
    )
    return next(of_cause, next(iter(found), None))


def document(run_id: str, found: list[Place], failed: Failure | None, why: RoundFailure | None) -> dict[str, Any]:
    """What ``redelastic logs --json`` prints."""
    return {
        "run": run_id,
        "logs": [asdict(one) for one in found],
        "failed": failed and asdict(failed),
        "failure": failure_document(why),
    }
