"""A history as a story: which nodes asked, were in which round, and were silent; and when Redis was away.

Nothing here depends on how redelastic works; only on what nodes do, in the terms of PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from .history import Event

NEVER: Final = float("inf")
WINDOW: Final = 0.35  # a node that is silent for so long in a roll call may be lost, in seconds
OPEN: Final = 1.5  # how long after it was asked for a roll call may be open, or opened again, in seconds
Span = tuple[float, float]


@dataclass
class Stay:
    """A node in a round: from when it knew until it asked for the next one or was gone."""

    node: str
    asked: float
    entered: float
    epoch: int
    rank: int
    size: int
    master: str
    identity: str
    broken: float = NEVER  # when it saw that the round is broken
    why: str = ""
    until: float = NEVER
    peers: list[str] | None = None


@dataclass
class Ask:
    """A node that asks for a round, until it is in one, or is refused, or is gone."""

    node: str
    since: float
    until: float = NEVER
    epoch: int = 0  # of the round that it is in then


@dataclass
class Add:
    """A node that adds one to a round's counter."""

    node: str
    epoch: int
    number: int  # distinguishes it from others of its node in flight
    asked: float
    answered: float = NEVER
    outcome: str = "unsure"
    value: int = 0


@dataclass
class Call:
    """A roll call that a node asked for."""

    node: str
    number: int  # distinguishes it from others of its node
    epoch: int
    asked: float
    answered: float = NEVER  # when the node learned that all had answered


@dataclass
class Node:
    """Everything about one process."""

    name: str
    gone: float = NEVER  # killed, leaving or refused
    killed: bool = False
    heard: float = NEVER  # that the run is closed
    asks: list[Ask] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    frozen: list[Span] = field(default_factory=list)
    stalled: list[Span] = field(default_factory=list)

    def is_frozen(self, since: float, until: float) -> bool:
        return any(a < until and b > since for a, b in (*self.frozen, *self.stalled))

    def end(self, at: float) -> None:
        """End the ask and the stay that the node is in."""
        if self.asks:
            self.asks[-1].until = min(self.asks[-1].until, at)
        if self.stays:
            self.stays[-1].until = min(self.stays[-1].until, at)


class Story:
    """What happened in one episode."""

    def __init__(self, history: Iterable[Event]) -> None:
        self.nodes: dict[str, Node] = {}
        self.away: list[Span] = []  # Redis
        self.lost: list[Span] = []  # when Redis forgot everything
        self.slow: list[Span] = []  # Redis or the machine
        self.actions: list[float] = []
        self.closing = self.closed = self.calm = self.ends = NEVER
        self.records: list[Event] = []
        self.errors: list[Event] = []
        self._away_since = NEVER
        for event in history:
            self._take(event)
        for node in self.nodes.values():
            node.end(node.gone)

    @property
    def stays(self) -> list[Stay]:
        return sorted((s for node in self.nodes.values() for s in node.stays), key=lambda stay: stay.entered)

    @property
    def rounds(self) -> dict[int, list[Stay]]:
        """By epoch, in the order of epochs; stays in the order in which they began."""
        found: dict[int, list[Stay]] = {}
        for stay in self.stays:
            found.setdefault(stay.epoch, []).append(stay)
        return dict(sorted(found.items()))

    @property
    def stood_still(self) -> bool:
        """Whether the machine did: a node did not run, or Redis did not answer, though nothing was done to it then."""
        silences = [(self.slow, self.away), *((node.stalled, node.frozen) for node in self.nodes.values())]
        return any(
            not any(a < until and b > since for a, b in done) for found, done in silences for since, until in found
        )

    def lost_between(self, since: float, until: float) -> bool:
        return any(a <= until and b >= since for a, b in self.lost)

    def disturbed(self, since: float, until: float) -> float:
        """For how long, in that time, Redis was away or the machine stood still."""
        spans = self.away + self.slow + [span for node in self.nodes.values() for span in node.stalled]
        return sum(
            b - a for a, b in joined((max(a, since), min(b, until)) for a, b in spans if a < until and b > since)
        )

    def may_be_lost(self, name: str, since: float, until: float) -> bool:
        """Whether a node may have lost its lease in that time: it could send no heartbeat for as long as a lease.

        Its last one may have been an interval before it was frozen. Two silences with no full interval between them are
        one: nothing says that a heartbeat was sent. Redis being away alone is no reason.
        """
        node = self.nodes[name]
        own = [*node.frozen, *node.stalled]
        for a, b in joined([*own, *self.away, *self.slow], self.interval):
            end = min(b, until)
            mine = sum(max(0.0, min(y, end) - max(x, a)) for x, y in own)
            if end > since and end - a >= self.lease - 1.5 * self.interval and mine > 0.1:
                return True
            if mine > 0.1 and any(self._was_silent_in(call, (a, end)) and end > since for call in self.calls):
                return True
        return False

    def _was_silent_in(self, call: Call, silence: Span) -> bool:
        return silence[0] < call.asked + OPEN and silence[1] - max(silence[0], call.asked) >= WINDOW

    @cached_property
    def calls(self) -> list[Call]:
        """All roll calls that were asked for."""
        return [call for node in self.nodes.values() for call in node.calls]

    # -- reading

    def _take(self, event: Event) -> None:
        t, what = event["t"], event["what"]
        if event["by"] != "chaos":
            node = self.nodes.setdefault(event["by"], Node(event["by"]))
            take = self._take_step if what in _STEPS else self._take_call if what in _CALLS else self._take_other
            take(node, event)
        elif what in _OF_EPISODE:
            self._take_episode(event)
        else:
            self.actions.append(t)
            if "node" in event:
                self._take_deed(self.nodes.setdefault(event["node"], Node(event["node"])), t, what)
            else:
                self._take_fault(t, event["action"] + " done" if what == "done" else what)

    def _take_episode(self, event: Event) -> None:
        """What chaos says of the episode."""
        match event["what"]:
            case "episode":
                self.name, self.min, self.max = event["name"], event["min_nodes"], event["max_nodes"]
                self.interval, self.lease, self.patience = event["interval"], event["lease"], event["patience"]
                self.limit = event["last_call"] + event["replacement"] + 2 * self.lease + self.patience
            case "slow":
                self.slow.append((event["since"], event["until"]))
            case "record":
                self.records.append(event)
            case moment:
                self._take_moment(moment, event["t"])

    def _take_moment(self, what: str, t: float) -> None:
        """Moments that may be noted more than once: the first counts."""
        match what:
            case "closing":
                self.closing = min(self.closing, t)
            case "closed":
                self.closed = min(self.closed, t)
            case "calm":
                self.calm = min(self.calm, t)
            case "ends":
                self.ends = min(self.ends, t)
            case _:
                raise AssertionError(what)

    def _take_deed(self, node: Node, t: float, what: str) -> None:
        """What chaos does to a node."""
        match what:
            case "kill":
                node.gone, node.killed = min(node.gone, t), True
            case "freeze":
                node.frozen.append((t, NEVER))
            case "thaw":
                node.frozen[-1] = (node.frozen[-1][0], t)

    def _take_fault(self, t: float, what: str) -> None:
        """What chaos does to Redis: noted before it is done, and when it is done."""
        match what:
            case "down" | "stop":
                self._away_since = t
            case "up done" | "cont":
                self.away.append((self._away_since, t))
                self.lost = [(a, min(b, t)) for a, b in self.lost]
            case "forget":
                self.lost.append((self._away_since, NEVER))
            case "flush":
                self.lost.append((t, NEVER))
            case "flush done":
                self.lost[-1] = (self.lost[-1][0], t)

    def _take_step(self, node: Node, event: Event) -> None:
        """A node's way through the rounds."""
        t = event["t"]
        match event["what"]:
            case "asks":
                node.end(t)
                node.asks.append(Ask(node.name, t))
            case "entered":
                ask = node.asks[-1]
                ask.until, ask.epoch = t, event["epoch"]
                place = [event[name] for name in ("epoch", "rank", "size", "master", "node")]
                node.stays.append(Stay(node.name, ask.since, t, *place))
            case "broken":
                node.stays[-1].broken, node.stays[-1].why = t, event.get("why", "")
            case "leaving":
                node.gone = min(node.gone, t)
                if event["why"] == "finished":
                    self.closing = min(self.closing, t)
            case "refused":
                node.gone, node.heard = min(node.gone, t), min(node.heard, t)
            case "heard":
                node.heard = min(node.heard, t)

    def _take_call(self, node: Node, event: Event) -> None:
        """A node's roll call."""
        if event["what"] == "calls":
            node.calls.append(Call(node.name, event["call"], event["epoch"], event["t"]))
        else:
            next(call for call in node.calls if call.number == event["call"]).answered = event["t"]

    def _take_other(self, node: Node, event: Event) -> None:
        """A node's other events."""
        t, what = event["t"], event["what"]
        match what:
            case "closing" | "closed":
                self._take_moment(what, t)
            case "met":
                for stay in node.stays:
                    if stay.epoch == event["epoch"]:
                        stay.peers = event["peers"]
            case "adds":
                node.adds.append(Add(node.name, event["epoch"], event["add"], t))
            case "added" | "fenced" | "unsure":
                add = next(add for add in reversed(node.adds) if add.number == event["add"])
                add.answered, add.outcome, add.value = t, what, event.get("value", 0)
            case "stalled":
                node.stalled.append((event["since"], event["until"]))
            case "error":
                node.gone = min(node.gone, t)
                self.errors.append(event)


_OF_EPISODE: Final = {"episode", "slow", "record", "calm", "closing", "closed", "ends"}
_CALLS: Final = {"calls", "answered"}
_STEPS: Final = {"asks", "entered", "broken", "leaving", "refused", "heard"}


def joined(spans: Iterable[Span], gap: float = 0.0) -> Iterator[Span]:
    """Spans that touch, or have less than ``gap`` between them, as one."""
    last: Span | None = None
    for a, b in sorted(spans):
        if last and a <= last[1] + gap:
            last = (last[0], max(last[1], b))
        else:
            if last:
                yield last
            last = (a, b)
    if last:
        yield last
