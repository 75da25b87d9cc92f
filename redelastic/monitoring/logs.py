"""Where the logs of a run's workers are, and how the logs of failed workers end: from events and statuses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from .documents import FailedWorker, Logs, Place
from .events import Event, Failed, Log, Lost, Started
from .failure import document as failure_document
from .failure import failure_of, why_failed
from .records import Node, Run


def places(events: Iterable[Event], nodes: Iterable[Node] = ()) -> list[Place]:
    """The logs of the last round whose agents reported them, by rank.

    Args:
        events: of the run; if many nodes started at once, only the first are in them.
        nodes: of the run now; the status of each names its workers' logs.
    """
    reported = [*_places_in_events(events), *_places_in_statuses(nodes)]
    last = max((place["epoch"] for place in reported), default=0)
    found = {place["rank"]: place for place in reported if place["epoch"] == last}
    return [found[rank] for rank in sorted(found)]


def _places_in_events(events: Iterable[Event]) -> Iterator[Place]:
    for event in events:
        if isinstance(event, Started):
            for rank, path in event.logs.items():
                yield Place(rank=rank, node=event.node, epoch=event.epoch, path=path)


def _places_in_statuses(nodes: Iterable[Node]) -> Iterator[Place]:
    for node in nodes:
        epoch = node.status.get("epoch")
        for worker in node.workers:
            rank, path = worker.get("rank"), worker.get("log")
            if isinstance(epoch, int) and isinstance(rank, int) and isinstance(path, str):
                yield Place(rank=rank, node=node.id, epoch=epoch, path=path)


def failures(events: Iterable[Event]) -> list[FailedWorker]:
    """Workers that failed, the newest round last, and within each round the first to fail first."""
    found = [
        FailedWorker(
            rank=e.rank, node=e.node, epoch=e.epoch, path=e.path, time=e.time - (e.age_ms or 0) / 1000, tail=e.lines
        )
        for e in events
        if isinstance(e, Log) and e.rank is not None
    ]
    return sorted(found, key=lambda failed: (failed["epoch"], failed["time"]))


def first_failure(events: Sequence[Event]) -> FailedWorker | None:
    """The first worker to fail in the last round in which one did.

    Prefers rounds that lost no node: in other rounds, workers fail because a peer is gone.
    """
    with_losses = {event.epoch for event in events if isinstance(event, Lost)}
    found = failures(events)
    found = [one for one in found if one["epoch"] not in with_losses] or found
    if not found:
        return None
    found = [one for one in found if one["epoch"] == found[-1]["epoch"]]
    why = failure_of(events, found[0]["epoch"])
    cause = (why.cause.node, why.cause.rank) if why and isinstance(why.cause, Failed) else None
    return next((one for one in found if (one["node"], one["rank"]) == cause), found[0])


def document(run: Run, events: Sequence[Event], rank: int | None = None) -> Logs:
    """What ``redelastic logs --json`` prints.

    Args:
        run: as it is now.
        events: of the run, oldest first.
        rank: of the only worker that matters; None for all.
    """
    if rank is None:
        failed, why = first_failure(events), why_failed(run, events)
    else:
        failed, why = next((one for one in reversed(failures(events)) if one["rank"] == rank), None), None
    found = [place for place in places(events, run.nodes) if rank in (None, place["rank"])]
    return {"run": run.run_id, "logs": found, "failed": failed, "failure": failure_document(why)}
