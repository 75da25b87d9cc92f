"""Where the logs of a run's workers are, and how those of failed workers end: events by agents, read back here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from .records import Event, Node

STARTED: Final = "started"
FAILED: Final = "log"

_PLACE: Final = re.compile(r"rank ([0-9]{1,9}): (.+)", re.ASCII)
_FAILURE: Final = re.compile(r"rank ([0-9]{1,9}) failed ([0-9]{1,9}\.[0-9]{1,3}) s ago; its log: (.*)", re.ASCII)


def places_text(paths: Mapping[int, str]) -> str:
    """Detail of the event ``started``: the log of each worker, by its rank."""
    return "\n".join(f"rank {rank}: {path}" for rank, path in sorted(paths.items()))


def failure_text(rank: int, ago: float, path: str) -> str:
    """Reason of the event ``log``; its detail is the log's end."""
    return f"rank {rank} failed {max(0.0, ago):.3f} s ago; its log: {path}"


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
        nodes: those of the run now: each reports in its status where its workers write.
    """
    told = [*_told_by_events(events), *_told_by_statuses(nodes)]
    last = max((place.epoch for place in told), default=0)
    found = {place.rank: place for place in told if place.epoch == last}
    return [found[rank] for rank in sorted(found)]


def _told_by_events(events: Iterable[Event]) -> Iterator[Place]:
    for event in events:
        for line in event.detail.splitlines() if event.event == STARTED else ():
            if told := _PLACE.fullmatch(line):
                yield Place(int(told[1]), event.node, event.epoch, told[2])


def _told_by_statuses(nodes: Iterable[Node]) -> Iterator[Place]:
    for node in nodes:
        epoch = node.status.get("epoch")
        for worker in node.workers:
            rank, path = worker.get("rank"), worker.get("log")
            if isinstance(epoch, int) and isinstance(rank, int) and isinstance(path, str):
                yield Place(rank, node.id, epoch, path)


def failures(events: Iterable[Event]) -> list[Failure]:
    """Workers that failed, the newest round last, and within each round the first to fail first."""
    found = [
        Failure(int(told[1]), event.node, event.epoch, told[3], event.time - float(told[2]), event.detail)
        for event in events
        if event.event == FAILED and (told := _FAILURE.fullmatch(event.reason))
    ]
    return sorted(found, key=lambda failure: (failure.epoch, failure.time))


def first_failure(events: Iterable[Event]) -> Failure | None:
    """The first worker to fail in the last round in which one did.

    Prefers rounds that lost no node: in the others, workers fail because their peer is gone.
    """
    told = list(events)
    of_losses = {event.epoch for event in told if event.event == "lost"}
    found = failures(told)
    found = [one for one in found if one.epoch not in of_losses] or found
    return next((one for one in found if one.epoch == found[-1].epoch), None)


def document(run_id: str, found: list[Place], failed: Failure | None) -> dict[str, Any]:
    """What ``redelastic logs --json`` prints."""
    return {"run": run_id, "logs": [asdict(one) for one in found], "failed": failed and asdict(failed)}
