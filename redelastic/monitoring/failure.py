"""Why a round failed, and what came of it: one cause for a round, from the run's events."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, cast

from . import events as kinds
from .collectives import explain
from .events import Event, fault_age
from .sentences import cause, cause_document, sentence, worker_failure
from .wording import count, duration, known, short

if TYPE_CHECKING:
    from . import documents
    from .records import Run

OTHERS: Final = 3  # how many of the nodes that suffered are described
SILENT: Final = "not known: all nodes fell silent"
MAX_WORDS: Final = 160  # characters of what one of them says
_NONE_LEFT: Final = frozenset({"failed", "restarts", "progress"})  # why a run ends instead of one more restart
_FAULTY: Final = frozenset({"failed", "exited", "signal"})  # reasons to leave that are faults


@dataclass(frozen=True)
class RoundFailure:
    """A round that failed.

    Attributes:
        epoch: of the round.
        time: when it failed, on the server's clock, in seconds since 1970.
        cause: what broke it: a worker's failure, or the loss or exit of a node; None if that is not known, because all
            workers that failed say that a peer is gone, or hang and may wait for a peer, or all nodes fell silent.
        log: path of the failed worker's log, on its node; empty if it has none, or no worker is the cause.
        waits: which ranks waited for which in a collective, if workers hung and this is known; else empty.
        others: failures of other nodes' workers.
        survived: number of other nodes whose workers left the round in order to go on in the next one.
        stopped: number of the round's nodes whose workers ended with it, without the cause's; None if not known.
        charged: whether it counts as a restart of the job; None if no agent counted it.
        excluded: whether the cause's host was excluded.
        ended: the run's end, if it ended because of it or before another round.
        next_epoch: of the round after it; None if there is none yet.
        down: time until that round was complete, in seconds.
    """

    epoch: int
    time: float
    cause: Event | None = None
    log: str = ""
    waits: str = ""
    others: Sequence[kinds.Failed] = ()
    survived: int = 0
    stopped: int | None = None
    charged: bool | None = None
    excluded: bool = False
    ended: kinds.Closed | None = None
    next_epoch: int | None = None
    down: float | None = None


def last_failure(events: Sequence[Event], since: int = 0) -> RoundFailure | None:
    """The last round that failed; None if none did.

    Args:
        events: of the run, oldest first.
        since: epoch of the first round that counts.
    """
    newest_first = list(takewhile(lambda event: event.epoch >= since, reversed(events)))
    recent = newest_first[::-1]
    epochs = dict.fromkeys(event.epoch for event in newest_first if _may_be_fault(event))
    return next(filter(None, (failure_of(recent, epoch) for epoch in epochs)), None)


def _may_be_fault(event: Event) -> bool:
    return isinstance(event, kinds.Failed | kinds.Lost) or (isinstance(event, kinds.Left) and event.cause in _FAULTY)


def why_failed(run: Run, events: Sequence[Event], since: int = 0) -> RoundFailure | None:
    """Why the last round that failed did; of a run whose nodes all fell silent, at best why its last round did.

    Args:
        run: as it is now.
        events: of the run, oldest first.
        since: epoch of the first round that counts.
    """
    if run.died_at is None:
        return last_failure(events, since)
    return last_failure(events, run.epoch) or RoundFailure(epoch=run.epoch, time=run.died_at)


def last_fault(events: Sequence[Event]) -> Event | None:
    """The newest fault, not what followed from it; None if there is none.

    Args:
        events: of the run, oldest first.
    """
    newest = next((event for event in reversed(events) if isinstance(event, kinds.FAULTS)), None)
    why = failure_of(events, newest.epoch) if isinstance(newest, kinds.Failed) else None
    return why.cause if why and why.cause else newest


def failure_of(events: Sequence[Event], epoch: int) -> RoundFailure | None:
    """How a round failed; None if it did not, as far as the events tell.

    Args:
        events: of the run, oldest first.
        epoch: of the round.
    """
    own = list(_of_round(events, epoch))
    members = next((event.members for event in own if isinstance(event, kinds.Completed)), ())
    failed = [one for one in own if isinstance(one, kinds.Failed)]
    reporters = {one.node for one in failed}
    faults = sorted([*failed, *(one for one in own if _has_gone(one, members, reporters))], key=_since)
    planned = any(isinstance(one, kinds.Left) and one.breaks and one.cause not in _FAULTY for one in own)
    if not faults:
        return None
    hangs = isinstance(faults[0], kinds.Failed) and faults[0].idle_ms is not None
    if planned and _follows(faults[0]) and not hangs:
        return None
    first = None if _follows(faults[0]) else faults[0]
    node = first.node if first else ""
    parked = {one.node for one in own if isinstance(one, kinds.Regrouped) and one.parked} - {node}
    ended = next((one for one in own if isinstance(one, kinds.Closed)), None)
    after = next((one for one in events if isinstance(one, kinds.Completed) and one.epoch > epoch), None)
    began = max(0.0, faults[0].time - fault_age(faults[0]))
    return RoundFailure(
        epoch=epoch,
        time=began,
        cause=first,
        log=_log(own, first),
        waits=_waits(own) if hangs else "",
        others=[one for one in failed if one.node != node],
        survived=len(parked),
        stopped=len({*members} - {node} - parked) if members else None,
        charged=not any(isinstance(one, kinds.Lost) for one in faults) if failed else None,
        excluded=any(isinstance(one, kinds.Barred) and one.node == node for one in own),
        ended=ended if after is None or ended is None or ended.time <= after.time else None,
        next_epoch=after.epoch if after else None,
        down=max(0.0, after.time - began) if after else None,
    )


def _of_round(events: Sequence[Event], epoch: int) -> Iterator[Event]:
    for event in events:
        if event.epoch == epoch:
            yield from event.each()


def _has_gone(event: Event, members: Sequence[str], reporters: Collection[str]) -> bool:
    """Whether a fault took a member out; for one of the ``reporters`` that is the failure of its workers, not this."""
    was_member = not members or event.node in members  # they are not known if the round began before the events kept
    match event:
        case kinds.Lost():
            return event.breaks or was_member
        case kinds.Left():
            return event.cause in _FAULTY and event.node not in reporters and (event.breaks or was_member)
    return False


def _follows(event: Event) -> bool:
    return isinstance(event, kinds.Failed) and event.follows


def _since(event: Event) -> tuple[bool, bool, float]:
    """The order of causes.

    A node that does not answer a roll call was gone before the failure for which the roll was called. A failure that
    follows a peer's is no cause.
    """
    called = isinstance(event, kinds.Lost) and event.cause == "roll_call"
    return _follows(event), not called, event.time - fault_age(event)


def _log(own: Sequence[Event], first: Event | None) -> str:
    if not isinstance(first, kinds.Failed) or first.rank is None:
        return ""
    for event in own:
        if isinstance(event, kinds.Log) and (event.node, event.rank) == (first.node, first.rank) and event.path:
            return event.path
    started = (event for event in own if isinstance(event, kinds.Started) and event.node == first.node)
    return next((event.logs[first.rank] for event in started if first.rank in event.logs), "")


def _waits(own: Sequence[Event]) -> str:
    """Why ranks wait, of what all nodes have said."""
    found = [one.last for one in own if isinstance(one, kinds.Collectives)]
    return explain({rank: last for each in found for rank, last in each.items()})


# -- as text


def lines(failure: RoundFailure) -> list[tuple[str, str]]:
    """The failure in words, for every place that shows it: pairs of what a line is about, and the line."""
    if failure.cause is None and not failure.others:
        return [("cause", SILENT)]
    found = [("cause", _cause_line(failure))]
    if failure.waits:
        found.append(("waits", failure.waits))
    if isinstance(failure.cause, kinds.Failed):
        found.append(("log", failure.log or "no file: the output went to a terminal or a pipe"))
    if suffered := _others_line(failure):
        found.append(("others", suffered))
    found.append(("then", _then_line(failure)))
    return [(name, short(text)) for name, text in found]


def _cause_line(failure: RoundFailure) -> str:
    match first := failure.cause:
        case None if any(one.idle_ms is not None for one in failure.others):
            return "not known: workers make no progress, and nothing shows which of them the others wait for"
        case None:
            return "not known: every worker that failed says that a peer is gone, and no other failure was reported"
        case kinds.Failed():
            return f"{first.node}: {worker_failure(first)}"
        case kinds.Lost() if first.cause != "conflict":
            return f"{cause(first)}; why is not known"
        case _:
            return cause(first)


def _others_line(failure: RoundFailure) -> str:
    # A failure that says nothing of a peer may have a cause of its own, unless a node is gone.
    suffered = [one for one in failure.others if one.follows or not isinstance(failure.cause, kinds.Failed)]
    because = "workers failed because of it on " if failure.cause else "workers failed on "
    parts = [(because, suffered), ("workers also failed on ", [one for one in failure.others if one not in suffered])]
    text = "; ".join(before + _describe_others(others) for before, others in parts if others)
    if failure.cause is None:
        return text
    stopped = (failure.stopped or 0) - len(failure.others)
    told = ((stopped, "ended with it"), (failure.survived, "survived it"))
    rest = [f"the workers of {count(nodes, 'more node')} {what}" for nodes, what in told if nodes > 0]
    return "; ".join(filter(None, (text, *rest)))


def _describe_others(others: Sequence[kinds.Failed]) -> str:
    described = [f"{one.node} (rank {known(one.rank)}): {_words(one)}" for one in others[:OTHERS]]
    if (more := len(others) - len(described)) > 0:
        described.append(count(more, "more node"))
    return "; ".join(described)


def _words(one: kinds.Failed) -> str:
    """What a worker says, or how it ended."""
    ended = one.signal or ("" if one.exit_code is None else f"exited with {one.exit_code}")
    text = one.message or ended or sentence(one)
    return text if len(text) <= MAX_WORDS else text[:MAX_WORDS] + "…"


def _then_line(failure: RoundFailure) -> str:
    done = []
    if failure.charged is not None and not (failure.ended and failure.ended.cause in _NONE_LEFT):
        done.append("one restart of the job was charged" if failure.charged else "no restart was charged")
    if failure.excluded:
        done.append("the host was excluded")
    if failure.ended is not None:
        done.append(f"the run was {failure.ended.event}: {_end(failure.ended)}")
    elif failure.next_epoch is not None:
        done.append(f"round {failure.next_epoch} followed {duration(failure.down or 0)} later")
    else:
        done.append("the next round is not complete yet")
    return "; ".join(done)


def _end(ended: kinds.Closed) -> str:
    """Why the run ended, without the failure, which the line about the cause has."""
    match ended.cause:
        case "failed":
            return f"{ended.node} had no restart left" if ended.node else "no restart was left"
        case "restarts":
            return f"the job had used up its {count(ended.restarts or 0, 'restart')}"
        case "progress":
            return f"{count(ended.restarts or 0, 'restart')} had brought no progress"
        case _:
            return cause(ended)


def document(failure: RoundFailure | None) -> documents.Failure | None:
    """The failure as JSON; ``lines``, the same in words; None if there is none."""
    if failure is None:
        return None
    worker: dict[str, Any] = dict.fromkeys(_OF_WORKER)
    if isinstance(failure.cause, kinds.WorkerFailure):
        worker = failure.cause.of_worker()
    found = {
        "epoch": failure.epoch,
        "time": failure.time,
        "cause": failure.cause.event if failure.cause else None,
        "node": failure.cause.node if failure.cause else None,
        **worker,
        "log": failure.log,
        "waits": failure.waits,
        "others": [{"node": one.node, "follows": one.follows, "text": sentence(one)} for one in failure.others],
        **{name: getattr(failure, name) for name in _AS_THEY_ARE},
        "ended": cause_document(failure.ended),
        "lines": [list(line) for line in lines(failure)],
    }
    return cast("documents.Failure", found)


_OF_WORKER: Final = tuple(kinds.WorkerFailure(event="").of_worker())  # fields
_AS_THEY_ARE: Final = ("survived", "stopped", "charged", "excluded", "next_epoch", "down")
