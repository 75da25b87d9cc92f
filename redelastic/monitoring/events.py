"""What can happen in a run: each kind of event with its typed fields, as Redis, JSON and the reference docs name them.

An event in Redis is an entry of the run's stream: ``event``, ``epoch``, ``size``, ``node``, then its kind's own fields.
A run's record has the cause of a broken round or of closing as a JSON list: the kind, the node, then the same fields.
Anyone with write access may have put anything there: a value that is not of its field's type is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, get_args

from .collectives import Collective
from .collectives import decode as decode_collectives
from .wording import LARGEST, json_in

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:  # only type checkers need it, and Python 3.10 lacks it
    dataclass_transform = lambda **_: lambda kind: kind  # noqa: E731

MAX_DIGITS: Final = 20  # of a number of 64 bits
VERSION: Final = 1  # of the JSON documents that hold events
MAX_TEXT: Final = 16_384  # characters of any text that is read from a run
MAX_NAME: Final = 512  # characters of a node's id, an address or a kind of event
MAX_REASON: Final = 1_000  # characters of a reason that is written
SAVE_TIMEOUT: Final = 30.0  # for workers to save when an operator asks, by default, in seconds
DRAIN_GRACE: Final = 30.0  # for a node to end workers that have not saved by then, and to leave, in seconds
MAX_MEMBERS: Final = 2 << 20  # characters: some 10,000 node ids
MAX_FIELDS: Final = 64  # items of a cause's list
MAX_MERGED: Final = 64  # nodes of a merged event, as in ``lua/events.lua``
EXCLUDED: Final = 1_000_000  # failures that count for a host that a preflight has excluded
LATEST: Final = 4_102_444_800.0  # the year 2100, in seconds since 1970: no server has written a later id by itself

Cause = Literal["lease", "roll_call", "conflict"]
Stream = Literal["events", "wake"]
Author = Literal["script", "agent"]
Because = Literal["max_nodes", "all_joined", "last_call", "replacement"]


def number_in(text: str) -> int | None:
    """A count or a time that redelastic wrote; None if it is neither."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def decimal_in(text: str) -> float | None:
    """A measured value that redelastic wrote; None if it is none."""
    if len(text) > 2 * MAX_DIGITS or not set(text) <= set("0123456789.e+-"):
        return None
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < LARGEST else None


def _time_in(entry: str) -> float:
    """The time of a stream's entry, in seconds since 1970; at most :data:`LATEST`."""
    ms = entry.partition("-")[0]
    return min(int(ms) / 1000, LATEST) if ms.isascii() and ms.isdecimal() and len(ms) <= MAX_DIGITS else 0.0


def _signed(text: str) -> int | None:
    value = number_in(text.removeprefix("-"))
    return -value if value is not None and text.startswith("-") else value


def _logs(text: str) -> dict[int, str]:
    found = json_in(text)
    pairs = found.items() if isinstance(found, dict) else ()
    return {rank: path for name, path in pairs if (rank := number_in(name)) is not None and isinstance(path, str)}


def _field(default: Any, decode: Callable[[str], Any], *, shared: bool = False) -> Any:
    """A field of a kind.

    Args:
        default: its value where it is not known.
        decode: reads it from text.
        shared: whether the value is the same for all nodes of a merged event.
    """
    made = {"default": default} if default.__hash__ else {"default_factory": type(default)}
    return field(**made, metadata={"decode": decode, "shared": shared})


def _count() -> Any:
    return _field(None, number_in)


def _text(limit: int = MAX_TEXT, *, shared: bool = False) -> Any:
    return _field("", lambda text: text[:limit], shared=shared)


def _choice(choices: Any) -> Any:
    return _field("", lambda text: text if text in get_args(choices) else "", shared=True)


def _flag() -> Any:
    return _field(False, lambda text: text == "1", shared=True)


KINDS: Final[dict[str, type[Event]]] = {}  # by what an event's ``event`` says


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Something happened in a run; each subclass is made a dataclass like this one.

    Attributes:
        event: its kind.
        id: its place in the stream; empty for a cause.
        time: on the server's clock, in seconds since 1970; 0 for a cause.
        epoch, size: of what was then the last round.
        node: id of the node that it happened to; empty if it happened to none.
        nodes: of a merged event, ids of all nodes that it happened to, ``node`` among them. Its other fields are
            ``node``'s, and its time is up to a few seconds later. Empty for an event of one node.
        breaks: whether it broke the last round: all members had to regroup.
        by: who records its kind: a ``script``, in the atomic step that makes the change, so exactly once; or an
            ``agent`` or handler, at least once.
        fault: whether each event of its kind is a fault, rather than what follows from one.
    """

    by: ClassVar[Author]
    fault: ClassVar[bool]

    event: str
    id: str = ""
    time: float = 0.0
    epoch: int = 0
    size: int = 0
    node: str = ""
    nodes: tuple[str, ...] = ()
    breaks: bool = False

    def __init_subclass__(cls, *, by: Author = "script", fault: bool = False) -> None:
        """Define a kind, if the class names it as its ``event``."""
        dataclass(frozen=True, kw_only=True)(cls)
        cls.by, cls.fault = by, fault
        if name := vars(cls).get("event"):
            KINDS[name] = cls

    def each(self) -> Iterator[Event]:
        """This event as each node would have reported it, as far as is known."""
        if not self.nodes:
            yield self
            return
        own = {
            f.name: f.default if f.default is not MISSING else {} for f in _own(type(self)) if not f.metadata["shared"]
        }
        for node in self.nodes:
            yield replace(self, node=node, nodes=(), **({} if node == self.node else own))

    def pairs(self) -> list[str]:
        """The known fields of its kind: names and values in turn, as text."""
        pairs: list[str] = []
        for of_kind in _own(type(self)):
            value = getattr(self, of_kind.name)
            if value is None or value is False or (not value and value != 0):  # not known; a count of 0 is known
                continue
            text = (
                json.dumps(value) if isinstance(value, dict) else " ".join(value) if isinstance(value, tuple) else value
            )
            pairs += [of_kind.name, str(int(text)) if isinstance(text, bool) else str(text)]
        return pairs

    def as_cause(self) -> str:
        """The event as a cause in a run's record."""
        return json.dumps([self.event, self.node, *self.pairs()], ensure_ascii=False)


class Joined(Event):
    """A node waits for a round; it was in none before."""

    event: str = "joined"


class Regrouped(Event):
    """A member gave up its round, and waits for the next one.

    Attributes:
        parked: whether its workers wait with it, and go on in the same processes.
    """

    event: str = "regrouped"
    parked: bool = _flag()


class Completed(Event):
    """A round is complete; epoch and size are the new round's, the node has rank 0.

    Attributes:
        because: why at that moment.
        members: ids of all its nodes, by rank.
        lost: number of nodes of the round before that did not come back.
    """

    event: str = "completed"
    because: Because | Literal[""] = _choice(Because)
    members: tuple[str, ...] = _field((), lambda text: tuple(text[:MAX_MEMBERS].split()))
    lost: int | None = _count()


class Lost(Event, fault=True):
    """A node is out of the run.

    Attributes:
        cause: its lease ran out; it did not answer a roll call; or it held another round of the same epoch.
        silent_ms: time since its last heartbeat, or since the roll call.
        asked_by: id of the node that called the roll.
    """

    event: str = "lost"
    cause: Cause | Literal[""] = _choice(Cause)
    silent_ms: int | None = _count()
    asked_by: str = _text(MAX_NAME, shared=True)


Departure = Literal[
    "finished",
    "failed",
    "drained",
    "refused",
    "barred",
    "signal",
    "closed",
    "timeout",
    "replicas",
    "anew",
    "group",
    "exited",
    "restarts",
    "secret",
]


class WorkerFailure(Event):
    """How a worker failed: fields that several kinds share.

    Attributes:
        local_rank, rank, pid: of the worker that failed first on this node.
        exit_code: with which it exited.
        signal: by which it was ended.
        idle_ms: time without progress, if it hung.
        step: the last step that a hung worker reported.
        phase: of the script, in which it hung, if it named one.
        oom_kills: kills by the kernel's OOM killer since the workers' start, if one of them explains the failure.
        memory: bytes that it used when last seen before such a kill.
        message: its own words.
    """

    local_rank: int | None = _count()
    rank: int | None = _count()
    pid: int | None = _count()
    exit_code: int | None = _field(None, _signed)
    signal: str = _text(40)
    idle_ms: int | None = _count()
    step: int | None = _count()
    phase: str = _text(48)
    oom_kills: int | None = _count()
    memory: int | None = _count()
    message: str = _text(MAX_REASON)

    def of_worker(self) -> dict[str, Any]:
        """These fields."""
        return {f.name: getattr(self, f.name) for f in _own(WorkerFailure)}


class Left(WorkerFailure):
    """A node has gone for good.

    Attributes:
        cause: why it left.
        reason: more about it, in words.
        last_step: the highest step that its workers had reported, if it was rank 0.
    """

    event: str = "left"
    cause: Departure | Literal[""] = _choice(Departure)
    reason: str = _text(MAX_REASON, shared=True)
    last_step: int | None = _count()


class Drain(Event):
    """A node was asked to let its workers save, and to leave.

    Attributes:
        reason: who or what asked.
        timeout_ms: how long the workers have to save.
    """

    event: str = "drain"
    reason: str = _text(MAX_REASON, shared=True)
    timeout_ms: int | None = _count()


class Save(Event):
    """The workers of all members were asked to save; the event's node, if any, waits to be let in until they have.

    Attributes:
        reason: who or what asked, if no node did.
        timeout_ms: how long the workers have; not known if they were not asked, but save by themselves some time.
    """

    event: str = "save"
    reason: str = _text(MAX_REASON)
    timeout_ms: int | None = _count()


class Admitted(Event):
    """Nodes that waited to be let in may join; the event's node is the first of them.

    Attributes:
        saved: whether all workers have saved before; else their time was up, or they were not asked.
    """

    event: str = "admitted"
    saved: bool = _flag()


class Failed(WorkerFailure, fault=True):
    """Workers of a node failed.

    Attributes:
        age_ms: time since the first of them did.
        idle_before_ms: time from the last progress of the node's workers until then; not known if they made none.
        follows: whether the cause may be elsewhere: the last words of all of them say that a peer is gone, or they hang
            and may wait for a peer.
    """

    event: str = "failed"
    age_ms: int | None = _count()
    idle_before_ms: int | None = _count()
    follows: bool = _field(False, "1".__eq__)


class RollCall(Event):
    """All nodes answered the roll call of this one, whose workers had failed: no node is lost.

    Attributes:
        answers: number of nodes.
        took_ms: until the last of them had answered.
    """

    event: str = "roll_call"
    answers: int | None = _count()
    took_ms: int | None = _count()


Ending = Literal["finished", "failed", "restarts", "progress", "asked"]


class Closed(WorkerFailure):
    """No further round completes; running workers may finish.

    Attributes:
        cause: a node has finished or failed; the job's restarts are used up, or brought no progress; or a user asked.
        reason: who asked, and why.
        restarts: that the job may make; or that brought no progress.
        last_step: the highest step that was reported.
    """

    event: str = "closed"
    cause: Ending | Literal[""] = _choice(Ending)
    reason: str = _text(MAX_REASON)
    restarts: int | None = _count()
    last_step: int | None = _count()


class Stopped(Closed):
    """No further round completes, and running workers have to end."""

    event: str = "stopped"


class Readmitted(Event):
    """The failures of a host, which is named as the node, were forgotten.

    Attributes:
        reason: who asked, and why.
    """

    event: str = "readmitted"
    reason: str = _text(MAX_REASON)


class Outage(Event):
    """Redis was away: every lease began anew.

    Attributes:
        away_ms: time without any heartbeat.
        back_ms: by how much the server's clock went back.
    """

    event: str = "outage"
    away_ms: int | None = _count()
    back_ms: int | None = _count()


class Restored(Event):
    """Redis had forgotten the round; this node restored its record."""

    event: str = "restored"


class Missing(Event, fault=True):
    """Nodes of a restored round did not come back.

    Attributes:
        missing: number of them.
    """

    event: str = "missing"
    missing: int | None = _count()


class Cleared(Event):
    """A stream of the run held the largest possible id, so it took no more entries: it was removed, and began anew.

    Attributes:
        stream: which one.
    """

    event: str = "cleared"
    stream: Stream | Literal[""] = _choice(Stream)


class Started(Event, by="agent"):
    """A node's workers run.

    Attributes:
        rank: of the node.
        survived: whether they are the processes of an earlier round, as far as known.
        last_step: the highest step that the node's workers have reported, in earlier rounds.
        since_progress_ms: time since their last progress there.
        logs: paths of the workers' logs on the node, by the workers' ranks.
    """

    event: str = "started"
    rank: int | None = _count()
    survived: bool = _field(False, "1".__eq__)
    last_step: int | None = _count()
    since_progress_ms: int | None = _count()
    logs: Mapping[int, str] = _field({}, _logs)


class Launched(Event, by="agent"):
    """The workers of rank 0's node run for the first time.

    Attributes:
        user: who launched the node, and on which host.
        command: of its workers, with the secrets that redelastic recognises hidden.
    """

    event: str = "launched"
    user: str = _text(MAX_NAME)
    command: str = _text(MAX_REASON)


class Progressed(Event, by="agent"):
    """The workers of rank 0 make their first step of a round, or their first one that no earlier round had made.

    Attributes:
        step: that they have reported.
        last_step: the highest step that was reported in earlier rounds; not known if none is known.
        since_progress_ms: time since they reported the step.
    """

    event: str = "progressed"
    step: int | None = _count()
    last_step: int | None = _count()
    since_progress_ms: int | None = _count()

    @property
    def redone(self) -> bool:
        """Whether an earlier round had made this step."""
        return self.step is not None and self.last_step is not None and self.step <= self.last_step


class Saved(Event, by="agent"):
    """A node's workers have saved on request, or their time to save is up.

    Attributes:
        drains: ids of the draining nodes; at most eight; none if they were asked for another reason.
        asked: number of workers that could be asked to save.
        late: whether the time was up first.
    """

    event: str = "saved"
    drains: tuple[str, ...] = _field((), lambda text: tuple(text[:MAX_TEXT].split()), shared=True)
    asked: int | None = _count()
    late: bool = _flag()


class Hung(WorkerFailure, by="agent", fault=True):
    """Workers of a node have stopped reporting progress.

    Attributes:
        hung: number of them.
        stacks: of their threads.
    """

    event: str = "hung"
    hung: int | None = _count()
    stacks: str = _text()


class Collectives(Event, by="agent"):
    """What torch's flight recorder says of a node whose workers make no progress when a round ends.

    Attributes:
        last: the last collectives of each worker that was asked, by its rank, as lists: name and description of the
            process group, number of the collective in it, operation, shape, whether it has ended; null for a worker
            that does not answer.
    """

    event: str = "collectives"
    last: Mapping[int, Sequence[Collective] | None] = _field({}, decode_collectives)


class Unwatched(Event, by="agent"):
    """Workers of a node have never reported progress, so their hangs are not detected.

    Attributes:
        ranks: of the workers.
        waited_ms: time since their start.
        stacks: of the first one's threads.
    """

    event: str = "unwatched"
    ranks: tuple[str, ...] = _field((), lambda text: tuple(text[:MAX_TEXT].split()))
    waited_ms: int | None = _count()
    stacks: str = _text()


class Log(Event, by="agent"):
    """How the log of a worker that failed ends.

    Attributes:
        rank: of the worker.
        age_ms: time since it failed.
        path: of its log on the node.
        lines: the last ones, as a terminal shows them, of its stdout too if that is a log of its own; without secrets.
    """

    event: str = "log"
    rank: int | None = _count()
    age_ms: int | None = _count()
    path: str = _text()
    lines: str = _text()


class Refused(Event, by="agent", fault=True):
    """A health check refused the node.

    Attributes:
        reason: which check, and why.
    """

    event: str = "refused"
    reason: str = _text(MAX_REASON)


class Barred(Event, by="agent", fault=True):
    """The node's host is excluded until it is readmitted.

    Attributes:
        failures: rounds in a row in which its workers failed first.
    """

    event: str = "barred"
    failures: int | None = _count()


class Unreached(Event, by="agent", fault=True):
    """The node could not reach rank 0 at the address that it had announced.

    Attributes:
        master: id of the node with rank 0.
        address: that it announced: host and port.
        seen_from: address of this node.
        reason: what happened.
    """

    event: str = "unreached"
    master: str = _text(MAX_NAME)
    address: str = _text(MAX_NAME)
    seen_from: str = _text(MAX_NAME)
    reason: str = _text(MAX_REASON)


class Preflight(Event, by="agent"):
    """The hosts that are to form a round have measured themselves and their links.

    Attributes:
        hosts: how many took part.
        outliers: names of those that stand out.
        excluded: whether these are excluded until they are readmitted.
    """

    event: str = "preflight"
    hosts: int | None = _count()
    outliers: tuple[str, ...] = _field((), lambda text: tuple(text[:MAX_TEXT].split()))
    excluded: bool = _flag()


class Outlier(Event, by="agent", fault=True):
    """A host, which is the event's node, stands out in a preflight.

    Attributes:
        measure: by which it stands out.
        value: of the host, if there is one.
        median: of all hosts.
        required: the worst value allowed, if it misses that.
        unit: of these values.
        reason: what failed, if there is no value.
    """

    event: str = "outlier"
    measure: str = _text(MAX_NAME)
    value: float | None = _field(None, decimal_in)
    median: float | None = _field(None, decimal_in)
    required: float | None = _field(None, decimal_in)
    unit: str = _text(MAX_NAME)
    reason: str = _text(MAX_REASON)


BY_SCRIPTS: Final = tuple(kind for kind in KINDS.values() if kind.by == "script")
BY_AGENTS: Final = tuple(kind for kind in KINDS.values() if kind.by == "agent")
FAULTS: Final = tuple(kind for kind in KINDS.values() if kind.fault)
_BAD_DEPARTURES: Final = frozenset({"failed", "refused", "barred", "timeout", "replicas", "secret"})
_BAD_ENDINGS: Final = frozenset({"failed", "restarts", "progress"})
_COMMON: Final = frozenset(f.name for f in fields(Event))


def is_fault(event: Event | None) -> bool:
    """Whether something went wrong, rather than as asked or planned."""
    match event:
        case Left():
            return event.cause in _BAD_DEPARTURES
        case Closed():
            return event.cause in _BAD_ENDINGS
        case _:
            return isinstance(event, FAULTS)


def fault_age(event: Event) -> float:
    """How long before its event a fault began, in seconds: measured on one host, so the server's clock can date it."""
    match event:
        case Lost():
            return (event.silent_ms or 0) / 1000
        case Hung():
            return (event.idle_ms or 0) / 1000
        case Failed():
            return (event.age_ms or 0) / 1000
        case _:
            return 0.0


def last_step(events: Iterable[Event]) -> int | None:
    """The highest step that any of the events knows; None if they know none."""
    steps = [step for event in events for step in (getattr(event, "step", None), getattr(event, "last_step", None))]
    return max((step for step in steps if step is not None), default=None)


def _own(kind: type[Event]) -> list[Any]:
    return [f for f in fields(kind) if f.name not in _COMMON]


def decode(entry: str, values: Mapping[str, str]) -> Event:
    """One entry of a run's stream of events.

    Args:
        entry: its id.
        values: of its fields, by name.
    """
    numbers = {name: number_in(values.get(name, "")) or 0 for name in ("epoch", "size")}
    nodes = tuple(values.get("nodes", "")[:MAX_TEXT].split(maxsplit=MAX_MERGED)[:MAX_MERGED])
    common = {"id": entry, "time": _time_in(entry), "node": values.get("node", "")[:MAX_NAME], "nodes": nodes}
    return _event(values.get("event", ""), values, **common, **numbers)


def decode_cause(text: str) -> Event | None:
    """Why a round is broken or a run closed, from a record or a wake-up; None for an empty text."""
    if not text:
        return None
    match json_in(text):
        case [event, node, *pairs] as found if len(found) <= MAX_FIELDS and all(isinstance(x, str) for x in found):
            return _event(event, dict(zip(pairs[::2], pairs[1::2], strict=False)), node=node[:MAX_NAME])
    return Event(event="unknown")  # redelastic did not write it


def _event(event: str, values: Mapping[str, str], **common: Any) -> Event:
    kind = KINDS.get(event)
    if kind is None:
        return Event(event=event[:MAX_NAME], **common)
    own = {f.name: f.metadata["decode"](values[f.name]) for f in _own(kind) if f.name in values}
    return kind(**common, breaks=values.get("breaks") == "1", **own)
