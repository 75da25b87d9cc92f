"""What became of a run's nodes and rounds, and where the time went: derived from the run's events alone."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

if TYPE_CHECKING:  # importing it imports redis-py, which takes 0.1 s
    from redelastic.run.records import Event

State = Literal["training", "starting", "regrouping", "waiting", "unknown"]
STATES: Final[tuple[State, ...]] = get_args(State)

_BY_SCRIPTS: Final = frozenset(
    {
        *("joined", "completed", "lost", "left", "drain", "failed", "roll_call", "closed", "stopped", "readmitted"),
        *("outage", "restored"),
    }
)
_RESENT_WITHIN: Final = 60.0  # in seconds: how long a call and its retries take; the same note within it is a repeat
_DURATION: Final = re.compile(r"\b(?:after|for|within) ([0-9]{1,9}(?:\.[0-9]{1,3})?) s\b", re.ASCII)
_RANK: Final = re.compile(r"\brank ([0-9]{1,9}) of [0-9]", re.ASCII)


@dataclass
class Span:
    """What a node did for a while.

    Attributes:
        state: ``training``: member of a round that stands; as far as is known, its workers run. ``starting``: member
            whose agent has not yet reported that they do. ``regrouping``: was a member, from the fault that broke the
            round until the next one. ``waiting``: joined, and not in the last round. ``unknown``: there, but what
            it did was before the oldest event kept.
        start, end: on the server's clock, in seconds since 1970.
        epoch: of the node's round; 0 for none.
        rank: in that round; None if not known.
    """

    state: State
    start: float
    end: float
    epoch: int = 0
    rank: int | None = None


@dataclass
class NodeHistory:
    """A node of a run.

    Attributes:
        id: of this process on its host.
        spans: what it did, oldest first; there may be gaps.
        gone_at: when it was lost or left; None if, as far as is known, it still exists.
        why: why it is gone.
    """

    id: str
    spans: list[Span] = field(default_factory=list)
    gone_at: float | None = None
    why: str = ""

    @property
    def name(self) -> str:
        """Its host's name, as people know it."""
        return self.id.rsplit("-", 2)[0]


@dataclass
class RoundHistory:
    """A completed round. Times are on the server's clock, in seconds since 1970.

    Attributes:
        epoch: its fencing token.
        size: number of nodes; more than ``members`` where not all are known.
        completed_at: None if that was before the oldest event kept.
        because: why it was completed then.
        members: rank by node, by rank; None for a rank that is not known.
        started_at: when the last of its members reported that its workers run; None if none did.
        broken_at: when it was known to be broken; None if it stands, or stood until the run ended.
        fault_at: when the fault began, if the event says: a node that lost its lease was silent for 6 s before.
        broken_by: what broke it, and why.
        down: time from the fault until the next round was completed, or the run closed or ended; in seconds.
        restart: time from the fault until the workers of the next round ran, in seconds; None if no agent reported it.
    """

    epoch: int
    size: int
    completed_at: float | None = None
    because: str = ""
    members: dict[str, int | None] = field(default_factory=dict)
    started_at: float | None = None
    broken_at: float | None = None
    fault_at: float | None = None
    broken_by: str = ""
    down: float | None = None
    restart: float | None = None


@dataclass(frozen=True)
class History:
    """A run, or the part of it that its events still cover.

    Attributes:
        start, end: of what it covers, on the server's clock, in seconds since 1970.
        complete: whether that includes the run's beginning: Redis keeps about 10,000 events, at least 3 MiB of them.
        nodes: in order of first appearance.
        rounds: oldest first.
        events: all of them, without those that an agent sent again.
        outages: from when until when the server was away.
        closed: why the run was closed; empty while it is open.
    """

    start: float
    end: float
    complete: bool
    nodes: Sequence[NodeHistory]
    rounds: Sequence[RoundHistory]
    events: Sequence[Event]
    outages: Sequence[tuple[float, float]]
    closed: str

    @property
    def seconds(self) -> dict[State, float]:
        """Total time of all nodes in each state."""
        told = dict.fromkeys(STATES, 0.0)
        for span in self._spans():
            told[span.state] += span.end - span.start
        return told

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the share of the nodes' time spent training, 0 to 1; None if unknown.

        A node's time counts from its join until it is gone, except while it is a spare beside a round that stands.
        Training ends when a fault begins: when a lost node was last heard of, or a hung worker last made progress.
        """
        seconds = self.seconds
        counted = sum(seconds.values()) - seconds["unknown"] - self._spare_seconds()
        return seconds["training"] / counted if counted > 0 else None

    def _spans(self) -> Iterator[Span]:
        return (span for node in self.nodes for span in node.spans)

    def _spare_seconds(self) -> float:
        """Total time that nodes waited beside a round that stood."""
        starts: list[float] = []  # of rounds that stood, one after the other
        ends: list[float] = []
        before = [0.0]  # how long rounds had stood in all when each of them began
        for this, later in zip_longest(self.rounds, self.rounds[1:]):
            start = this.completed_at or self.start
            end = later.completed_at if later and later.completed_at is not None else self.end
            end = end if this.fault_at is None else this.fault_at
            if end > start:
                starts.append(start)
                ends.append(end)
                before.append(before[-1] + end - start)

        def stood_until(time: float) -> float:
            i = bisect_right(starts, time)
            return before[i] - max(0.0, ends[i - 1] - time) if i else 0.0

        return sum(stood_until(s.end) - stood_until(s.start) for s in self._spans() if s.state == "waiting")

    def extended(self, end: float) -> History:
        """This history if nothing more happens until ``end``: what :func:`replay` would return, without the work.

        ``end`` must be after its last event: what began at its very end is not in it.
        """
        if end <= self.end:
            return self

        def live_on(node: NodeHistory) -> NodeHistory:
            if node.gone_at is not None or not node.spans or node.spans[-1].end < self.end:
                return node
            return replace(node, spans=[*node.spans[:-1], replace(node.spans[-1], end=end)])

        rounds = [*self.rounds]
        if rounds and (fault_at := rounds[-1].fault_at) is not None and not self.closed:
            rounds[-1] = replace(rounds[-1], down=end - fault_at)
        return replace(self, end=end, nodes=[live_on(node) for node in self.nodes], rounds=rounds)

    def since(self, start: float) -> History:
        """The part of this history from ``start`` on, in the same time units."""
        start = max(self.start, start)
        events = [event for event in self.events if event.time >= start]
        named = {one.node for event in events for one in event.each()}
        nodes = [
            replace(node, spans=[replace(s, start=max(start, s.start)) for s in node.spans if s.end > start])
            for node in self.nodes
        ]
        first = max((i for i, r in enumerate(self.rounds) if (r.completed_at or 0) <= start), default=0)
        return replace(
            self,
            start=start,
            complete=self.complete and start == self.start,
            nodes=[node for node in nodes if node.spans or node.id in named],
            rounds=self.rounds[first:],
            events=events,
            outages=[(max(start, a), b) for a, b in self.outages if b > start],
        )


def replay(events: Sequence[Event], now: float | None = None) -> History:
    """Work out a run's history from its events.

    Who is in a round follows from the protocol: former members, then the others as they arrived. So do ranks, except
    for new nodes under topology labels: there only the rank that an agent reported is certain.

    Args:
        events: at least one, oldest first; the beginning may be missing.
        now: until when the remaining nodes live on, on the server's clock; None for the last event.
    """
    story = _Replay(events)
    for i, event in enumerate(events):
        story.take_in(event, events[i + 1] if i + 1 < len(events) else None)
    return story.history(max(events[-1].time, now or 0))


class _Replay:
    """The run as it stands after the events taken in so far; the names are those of PROTOCOL.md."""

    def __init__(self, events: Sequence[Event]) -> None:
        first = events[0]
        self._start = first.time
        self._complete = first.epoch == 0
        self._agents = {one.node for event in events if event.event == "started" for one in event.each()}
        self._nodes: dict[str, NodeHistory] = {}
        self._open: dict[str, Span] = {}
        self._members: set[str] = set()
        self._former: dict[str, int | None] = {}  # candidates that were members of the last round, and their rank
        self._arrived: dict[str, None] = {}  # the other candidates, in their order
        self._rounds: list[RoundHistory] = []
        if first.epoch > 0 and first.event != "completed":
            self._rounds.append(RoundHistory(first.epoch, first.size))
        self._events: list[Event] = []
        self._seen: dict[tuple[Any, ...], float] = {}
        self._outages: list[tuple[float, float]] = []
        self._closed, self._closed_at = "", 0.0

    def take_in(self, event: Event, following: Event | None) -> None:
        """Advance by one event; ``following`` is the one after it."""
        if event.event not in _BY_SCRIPTS:
            same = (event.event, event.epoch, event.node, event.reason, event.detail, event.nodes)
            if event.time - self._seen.get(same, -_RESENT_WITHIN) < _RESENT_WITHIN:
                return
            self._seen[same] = event.time
        self._events.append(event)
        for one in event.each():
            self._happened(one, following)

    def _happened(self, event: Event, following: Event | None) -> None:
        """Something has happened to one node, or to none."""
        if event.node and event.event != "readmitted":  # its node is a host
            self._nodes.setdefault(event.node, NodeHistory(event.node))
        elif event.event in {"joined", "started", "lost", "left"}:
            return  # nobody's: not written by us
        match event.event:
            case "joined":
                self._joined(event)
            case "completed":
                self._completed(event)
            case "started":
                self._started(event)
            case "lost" | "left":
                self._gone(event, following)
            case "outage":
                self._outages.append((max(self._start, event.time - _duration(event)), event.time))
            case _:
                self._other(event)

    def _other(self, event: Event) -> None:
        if event.event in {"failed", "hung"} and event.node in self._members:
            self._break(event, f"{event.node}: {event.reason}")
        elif event.event in {"closed", "stopped"} and not self._closed:
            self._closed, self._closed_at = event.reason or "nobody says why", event.time

    def _joined(self, event: Event) -> None:
        node, this = event.node, self._rounds[-1] if self._rounds else None
        self._nodes[node].gone_at, self._nodes[node].why = None, ""
        if event.reason == "regroups":
            if this and node not in self._members and not self._complete:
                self._admit(node, this)
            self._break(event, f"{node} regroups")
            self._members.discard(node)
            self._former[node] = this.members.get(node) if this else None
            if node not in self._open or self._open[node].state == "unknown":
                self._enter(node, "regrouping", (this and this.fault_at) or event.time, this)
            return
        self._arrived[node] = None
        self._enter(node, "waiting", event.time)
        if this and self._members and this.completed_at is not None and this.because != "max_nodes joined":
            self._break(event, f"{node} waits to join")

    def _completed(self, event: Event) -> None:
        for node in self._members:  # I1: it held no round: its membership was guessed, as the beginning is missing
            self._arrived[node] = None
        chosen = [*sorted(self._former, key=lambda node: _last_if_none(self._former[node])), *self._arrived]
        chosen = chosen[: event.size]
        if event.node and event.node not in chosen:  # it has waited since before the beginning
            chosen = [*chosen[: max(0, event.size - 1)], event.node]
        this = RoundHistory(event.epoch, event.size, event.time, event.reason, _ranks(chosen, self._former, event))
        self._rounds.append(this)
        self._members = set(chosen)
        for node in chosen:
            self._former.pop(node, None)
            self._arrived.pop(node, None)
            self._enter(node, "starting" if node in self._agents else "training", event.time, this)

    def _started(self, event: Event) -> None:
        node, this = event.node, self._rounds[-1] if self._rounds else None
        if this is None or this.epoch != event.epoch or node in self._former:
            return
        if node not in self._members:
            if self._complete or self._nodes[node].gone_at is not None:
                return
            self._admit(node, this)
        if found := _RANK.search(event.reason):
            rank = int(found[1])
            for other in [n for n, guessed in this.members.items() if guessed == rank and n != node]:
                self._set_rank(other, this, None)  # there are topology labels
            self._set_rank(node, this, rank)
        this.started_at = event.time
        if self._open[node].state in {"starting", "unknown"} and this.broken_at is None:
            self._enter(node, "training", event.time, this)

    def _set_rank(self, node: str, this: RoundHistory, rank: int | None) -> None:
        this.members[node] = rank
        for span in self._nodes[node].spans:
            span.rank = rank if span.epoch == this.epoch else span.rank

    def _gone(self, event: Event, following: Event | None) -> None:
        node, was_member = event.node, event.node in self._members
        closes = following and following.event in {"closed", "stopped"} and following.node == node
        known = was_member or node in self._former or node in self._arrived
        if not known and not self._complete and not self._nodes[node].spans:
            self._enter(node, "unknown", self._start)
        elif was_member and not closes:
            self._break(event, f"{node} {event.reason}")
        self._end(node, event.time)
        self._members.discard(node)
        self._former.pop(node, None)
        self._arrived.pop(node, None)
        self._nodes[node].gone_at, self._nodes[node].why = event.time, event.reason

    def _admit(self, node: str, this: RoundHistory) -> None:
        """Count a node as a member of the last round although its join is missing from the events."""
        self._arrived.pop(node, None)
        self._members.add(node)
        this.members[node] = None
        self._enter(node, "unknown", this.completed_at or self._start, this)

    def _break(self, event: Event, why: str) -> None:
        """The last round's members must regroup; the first event to say so is kept."""
        this = self._rounds[-1] if self._rounds else None
        if this is None or this.broken_at is not None or self._closed:
            return
        this.broken_at, this.broken_by = event.time, why
        since = event.time - _duration(event) if event.event in {"lost", "hung"} else event.time
        this.fault_at = max(this.completed_at or self._start, since)
        for node in self._members:
            self._enter(node, "regrouping", this.fault_at, this)

    def _enter(self, node: str, state: State, at: float, this: RoundHistory | None = None) -> None:
        """Begin a span, and end or take back what came before; ``at`` may be in the past."""
        self._end(node, at)
        epoch, rank = (this.epoch, this.members.get(node)) if this else (0, None)
        span = self._open[node] = Span(state, at, at, epoch, rank)
        self._nodes[node].spans.append(span)

    def _end(self, node: str, at: float) -> None:
        spans, opened = self._nodes[node].spans, self._open.pop(node, None)
        if opened:
            opened.end = at
        while spans and spans[-1].start >= at:
            spans.pop()
        if spans:
            spans[-1].end = min(spans[-1].end, at)

    def history(self, end: float) -> History:
        """What happened in the run until ``end``."""
        for node in list(self._open):
            self._end(node, end)
        over = self._closed_at if self._closed else end
        for this, later in zip_longest(self._rounds, self._rounds[1:]):
            this.members = dict(sorted(this.members.items(), key=lambda item: _last_if_none(item[1])))
            if this.fault_at is not None:
                this.down = max(0.0, ((later and later.completed_at) or over) - this.fault_at)
                this.restart = later.started_at - this.fault_at if later and later.started_at else None
        nodes = list(self._nodes.values())
        start = min([self._start, *(node.spans[0].start for node in nodes if node.spans)])
        return History(start, end, self._complete, nodes, self._rounds, self._events, self._outages, self._closed)


def _ranks(chosen: Sequence[str], former: dict[str, int | None], completed: Event) -> dict[str, int | None]:
    """Ranks as `assign` in `lua/complete.lua` assigns them, as far as the events show."""
    ranks = {node: rank for node in chosen if (rank := former.get(node)) is not None and rank < completed.size}
    homeless = [node for node in chosen if node not in ranks]
    told: dict[str, int | None] = {**ranks, **dict.fromkeys(homeless)}
    if len(chosen) == completed.size and all(former.get(node, 0) is not None for node in chosen):
        taken = set(ranks.values())
        holes = (rank for rank in range(completed.size) if rank not in taken)
        told |= zip(homeless, holes, strict=True)
        if told.get(completed.node) == 0:
            return told
        told |= dict.fromkeys(homeless)  # labels decided their ranks
    if completed.node:
        told |= {node: None for node, rank in told.items() if rank == 0}
        told[completed.node] = 0
    return told


def _last_if_none(rank: int | None) -> float:
    return float("inf") if rank is None else rank


def _duration(event: Event) -> float:
    found = _DURATION.search(event.reason)
    return float(found[1]) if found else 0.0
