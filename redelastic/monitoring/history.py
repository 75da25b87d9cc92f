"""The history of a run's nodes and rounds, and of their time: a fold over the run's events."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, Final, Literal, get_args

from . import events as kinds
from .events import Event

State = Literal["training", "redone", "starting", "regrouping", "waiting", "unknown"]
STATES: Final[tuple[State, ...]] = get_args(State)

_RESENT_WITHIN: Final = 60.0  # in seconds, which a call and its retries take: the same report within it is a repeat


@dataclass
class Span:
    """What a node did for a while.

    Attributes:
        state: ``training``: member of a round whose workers make new steps, from the first one on. ``redone``: the
            same, but an earlier round had made these steps. ``starting``: member of a round without a step yet.
            ``regrouping``: was a member, from the last step of the round that broke until the next round. ``waiting``:
            joined, and not in the last round. ``unknown``: there, but what it did was before the oldest event kept; or
            its workers run, and no worker of the run has reported a step.
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
        gone: when it was lost or left, and why; None if, as far as is known, it still exists.
    """

    id: str
    spans: list[Span] = field(default_factory=list)
    gone: Event | None = None

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
        because: why it was completed then: see :class:`~redelastic.monitoring.events.Completed`.
        members: rank by node, by rank; None for a rank that is not known.
        started_at: when the last of its members reported that its workers run; None if none did.
        broken_at: when it was known to be broken; None if it stands, or stood until the run ended.
        fault_at: when the fault began: a node that lost its lease was silent for 6 s before.
        last_progress_at: when its workers last made progress; None if that is not known after its end.
        broken_by: what broke it.
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
    last_progress_at: float | None = None
    broken_by: Event | None = None
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
        outages: when the server was away: from, until.
        closed: when and why the run was closed; None while it is open.
        reports_steps: whether workers are known to have reported a step: else nobody knows when they trained.
    """

    start: float
    end: float
    complete: bool
    nodes: Sequence[NodeHistory]
    rounds: Sequence[RoundHistory]
    events: Sequence[Event]
    outages: Sequence[tuple[float, float]]
    closed: Event | None
    reports_steps: bool

    @property
    def seconds(self) -> dict[State, float]:
        """Total time of all nodes in each state."""
        seconds = dict.fromkeys(STATES, 0.0)
        for span in self._spans():
            seconds[span.state] += span.end - span.start
        return seconds

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio: the share of the nodes' time spent training, 0 to 1; None if unknown.

        A node's time counts from its join until it is gone, except while it is a spare beside a round that stands.
        Training begins with a round's first step. In a round that broke it ends with the last one. Steps that an
        earlier round had made do not count.
        """
        return self._share("training")

    @property
    def redone(self) -> float | None:
        """The share of the same time in which the nodes made steps again, 0 to 1; None if unknown."""
        return self._share("redone")

    def _share(self, state: State) -> float | None:
        seconds = self.seconds
        counted = sum(seconds.values()) - seconds["unknown"] - self._spare_seconds()
        return seconds[state] / counted if self.reports_steps and counted > 0 else None

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
            if node.gone is not None or not node.spans or node.spans[-1].end < self.end:
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

    Args:
        events: at least one, oldest first; the beginning may be missing.
        now: until when the remaining nodes live on, on the server's clock; None for the last event.
    """
    story = _Replay(events)
    for event in events:
        story.apply(event)
    return story.history(max(events[-1].time, now or 0))


class _Replay:
    """The state of a run after the events applied so far."""

    def __init__(self, events: Sequence[Event]) -> None:
        first = events[0]
        self._start = first.time
        self._complete = first.epoch == 0
        self._agents = {one.node for event in events if isinstance(event, kinds.Started) for one in event.each()}
        self._reports_steps = any(isinstance(event, kinds.Progressed) for event in events)
        self._nodes: dict[str, NodeHistory] = {}
        self._open: dict[str, Span] = {}
        self._members: set[str] = set()  # nodes that hold the last round
        self._rounds: list[RoundHistory] = []
        if first.epoch > 0 and not isinstance(first, kinds.Completed):
            self._rounds.append(RoundHistory(first.epoch, first.size))
        self._events: list[Event] = []
        self._seen: dict[tuple[Any, ...], float] = {}
        self._outages: list[tuple[float, float]] = []
        self._closed: Event | None = None

    def apply(self, event: Event) -> None:
        """Advance by one event."""
        if not isinstance(event, kinds.BY_SCRIPTS):
            same = (event.event, event.epoch, event.node, event.nodes, *event.pairs())
            if event.time - self._seen.get(same, -_RESENT_WITHIN) < _RESENT_WITHIN:
                return
            self._seen[same] = event.time
        self._events.append(event)
        for one in event.each():
            self._apply_to_node(one)

    def _apply_to_node(self, event: Event) -> None:
        """Apply an event of one node, or of none."""
        if event.node and not isinstance(event, kinds.Readmitted):  # its node is a host
            self._nodes.setdefault(event.node, NodeHistory(event.node))
        elif isinstance(event, kinds.Joined | kinds.Regrouped | kinds.Started | kinds.Lost | kinds.Left):
            return  # such an event without a node: redelastic did not write it
        match event:
            case kinds.Joined():
                self._nodes[event.node].gone = None
                if event.node not in self._open:
                    self._enter(event.node, "waiting", event.time)
            case kinds.Completed():
                self._complete_round(event)
            case kinds.Started():
                self._start_workers(event)
            case kinds.Progressed():
                self._progress(event)
            case kinds.Outage():
                self._outages.append((max(self._start, event.time - (event.away_ms or 0) / 1000), event.time))
            case kinds.Closed() if not self._closed:
                self._closed = event
        self._apply_to_round(event)

    def _apply_to_round(self, event: Event) -> None:
        """Apply an event to the last round."""
        if isinstance(event, kinds.Failed) and event.idle_before_ms is not None:
            _note_progress(self._rounds[-1:], event.time - kinds.fault_age(event) - event.idle_before_ms / 1000)
        if event.breaks or (isinstance(event, kinds.Failed | kinds.Hung) and event.node in self._members):
            self._break(event)
        if isinstance(event, kinds.Regrouped):
            self._regroup(event)
        elif isinstance(event, kinds.Lost | kinds.Left):
            self._remove(event)

    def _complete_round(self, event: kinds.Completed) -> None:
        members: dict[str, int | None] = {node: rank for rank, node in enumerate(event.members)}
        this = RoundHistory(event.epoch, event.size, event.time, event.because, members)
        self._rounds.append(this)
        self._members = set(members)
        for node in members:
            self._nodes.setdefault(node, NodeHistory(node))
            is_known = self._reports_steps or node in self._agents
            self._enter(node, "starting" if is_known else "unknown", event.time, this)

    def _start_workers(self, event: kinds.Started) -> None:
        node, this = event.node, self._rounds[-1] if self._rounds else None
        if this is None or this.epoch != event.epoch or self._nodes[node].gone is not None:
            return
        if node not in this.members:
            if this.completed_at is not None:
                return  # of a round that Redis has forgotten
            self._admit(node, this)
        if event.rank is not None:
            this.members[node] = event.rank
            for span in self._nodes[node].spans:
                span.rank = event.rank if span.epoch == this.epoch else span.rank
        this.started_at = event.time
        if event.since_progress_ms is not None:
            _note_progress(self._rounds[-2:-1], event.time - event.since_progress_ms / 1000)
        if not self._reports_steps and self._open[node].state == "starting":
            self._enter(node, "unknown", event.time, this)

    def _progress(self, event: kinds.Progressed) -> None:
        this = self._rounds[-1] if self._rounds else None
        if this is None or this.epoch != event.epoch or this.broken_at is not None:
            return
        at = event.time - (event.since_progress_ms or 0) / 1000
        if at < (this.completed_at or self._start):
            return  # of the round before: its node heard of this one later
        for node in self._members:
            self._enter(node, "redone" if event.redone else "training", at, this)

    def _regroup(self, event: kinds.Regrouped) -> None:
        node, this = event.node, self._rounds[-1] if self._rounds else None
        if this and node not in this.members and this.completed_at is None:
            self._admit(node, this)
        self._members.discard(node)
        if node not in self._open or self._open[node].state != "regrouping":
            self._enter(node, "regrouping", (this and this.fault_at) or event.time, this)

    def _remove(self, event: Event) -> None:
        node = event.node
        if node not in self._open and not self._complete and not self._nodes[node].spans:
            self._enter(node, "unknown", self._start)
        self._end(node, event.time)
        self._members.discard(node)
        self._nodes[node].gone = event

    def _admit(self, node: str, this: RoundHistory) -> None:
        """Count a node as a member of the last round, whose completion is missing from the events."""
        self._members.add(node)
        this.members[node] = None
        self._enter(node, "unknown", this.completed_at or self._start, this)

    def _break(self, event: Event) -> None:
        """Break the last round, unless it is broken already: its members must regroup."""
        this = self._rounds[-1] if self._rounds else None
        if this is None or this.broken_at is not None or self._closed:
            return
        this.broken_at, this.broken_by = event.time, event
        this.fault_at = max(this.completed_at or self._start, event.time - kinds.fault_age(event))
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
        """The run's history until ``end``."""
        for node in list(self._open):
            self._end(node, end)
        over = self._closed.time if self._closed else end
        for this, later in zip_longest(self._rounds, self._rounds[1:]):
            this.members = dict(sorted(this.members.items(), key=lambda item: _last_if_none(item[1])))
            if this.fault_at is not None:
                this.down = max(0.0, ((later and later.completed_at) or over) - this.fault_at)
                this.restart = later.started_at - this.fault_at if later and later.started_at else None
        last = {this.epoch: this.last_progress_at for this in self._rounds if this.last_progress_at is not None}
        nodes = list(self._nodes.values())
        for each in nodes:
            each.spans = _put_back(each.spans, last)
        start = min([self._start, *(node.spans[0].start for node in nodes if node.spans)])
        of_run = self._complete, nodes, self._rounds, self._events, self._outages, self._closed
        return History(start, end, *of_run, self._reports_steps)


def _note_progress(rounds: Sequence[RoundHistory], at: float) -> None:
    """Note when workers last made progress in a round, if it was in that one."""
    for this in rounds:
        if at >= (this.completed_at or 0):
            this.last_progress_at = max(at, this.last_progress_at or at)


def _put_back(spans: Sequence[Span], last_progress: Mapping[int, float]) -> list[Span]:
    """A node's spans, in which a round's steps end with its last progress, by the round's epoch; then it regroups."""
    put_back: list[Span] = []
    for span in spans:
        rest, at = span, last_progress.get(span.epoch, span.end)
        if span.state in {"training", "redone"} and at < span.end:
            if at > span.start:
                put_back.append(replace(span, end=at))
            rest = replace(span, state="regrouping", start=max(at, span.start))
        before = put_back[-1] if put_back else None
        if before and (before.state, before.epoch) == ("regrouping", rest.epoch) and rest.state == "regrouping":
            before.end = rest.end
        else:
            put_back.append(rest)
    return put_back


def _last_if_none(rank: int | None) -> float:
    return float("inf") if rank is None else rank
