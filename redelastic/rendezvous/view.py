"""What a node knows of its run: a value, and what it becomes with each thing that the node hears or does."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from redelastic.monitoring.events import Event, Lost, decode_cause
from redelastic.monitoring.sentences import cause
from redelastic.redis.connection import STREAM_START, place_of, sanitize, text

from .replies import Beat, RollCall

UNKNOWN: Final = Event(event="unknown")  # a cause that the run's record does not name


@dataclass(frozen=True)
class Drain:
    """A request to a node to let its workers save, and to leave.

    Attributes:
        node: its id.
        reason: the name of the asker, or what caused the request.
        timeout: how long the workers have to save, in seconds.
        place: of its wake-up in the run's stream, the same for every node; STREAM_START if there was none.
    """

    node: str
    reason: str
    timeout: float
    place: tuple[int, int] = STREAM_START


@dataclass(frozen=True)
class Save:
    """A request to the workers of all members of a round to save.

    Attributes:
        place: of its wake-up in the run's stream, which orders it among the drains.
        node: that waits to be let in until they have; "" if none does.
        reason: the name of the asker; "" if only a node asked.
        timeout: how long they have, in seconds; infinite: they are not asked, but save by themselves some time.
    """

    place: tuple[int, int]
    node: str
    reason: str
    timeout: float


@dataclass(frozen=True)
class Round:
    """A completed round, as one of its members sees it.

    Attributes:
        epoch: fencing token of the round.
        rank: of this node.
        size: number of nodes.
        host, port: where rank 0 would serve the round's bootstrap store.
        completed_at: when it was completed, in ms on the server's clock; distinguishes it from a round with the same
            epoch that was completed after a failover.
        lost: how many nodes of the previous round did not come back.
        again: whether this node was in a round before.
        incarnation: of the run: the id of the node that created it.
    """

    epoch: int
    rank: int
    size: int
    host: str
    port: int
    completed_at: int
    lost: int
    again: bool
    incarnation: str = ""


class Break(NamedTuple):
    """Why the members of a round have to regroup.

    Attributes:
        epoch: of the round.
        why: the cause.
        waiting: how many nodes wait for the next round, as far as known.
        member_lost: whether the cause is a member that died or left.
    """

    epoch: int
    why: Event
    waiting: int
    member_lost: bool


class View(NamedTuple):
    """A run as one of its nodes sees it.

    Each transition returns the next view. Nothing here waits, logs or asks Redis. A named tuple: replacing fields of a
    dataclass takes several times as long, and a node does so with each thing that it hears.

    Attributes:
        node: id of this node.
        round: the round that this node is in; None while it is in none.
        previous: the round before that one.
        epoch_held: epoch of the last round that this node was in, or 0.
        incarnation: of the run that this node was last in, or "".
        joining: whether this node has asked to join the next round.
        standing: of this node in Redis's last reply: "candidate", "member", "fenced" or "unknown".
        fenced: whether this node lost its lease.
        broken: the last news that this node's round is broken; None while it is not.
        member_lost: whether a member of this node's round is lost.
        last_break: the last break that a wake-up announced, perhaps before this node has entered that round.
        closing: why the run is closed; None while it is open.
        is_stopped: whether running workers have to end, too.
        record_of_closing: why the run is closed according to its record, as JSON, and 1 if workers have to end too. A
            wake-up alone proves nothing.
        drain: the request to this node to drain; None if there was none. It outlives this node's id.
        drains_heard: the requests to drain that wake-ups announced, by node, each with the epoch that it was made in.
        saves_heard: the last request to save for a node that waits (True), and of anybody else (False), with its epoch.
        roll_call: the last roll call that this node has heard of, or 0.
        failed_at: when the workers failed for which this node called the roll, in the server's ms.
        answered: when the last roll call that every node answered was opened, in the server's ms.
    """

    node: str
    round: Round | None = None
    previous: Round | None = None
    epoch_held: int = 0
    incarnation: str = ""
    joining: bool = False
    standing: str = ""
    fenced: bool = False
    broken: Break | None = None
    member_lost: bool = False
    last_break: Break | None = None
    closing: Event | None = None
    is_stopped: bool = False
    record_of_closing: tuple[str, int] = ("", 0)
    drain: Drain | None = None
    drains_heard: Mapping[str, tuple[int, Drain]] = MappingProxyType({})
    saves_heard: Mapping[bool, tuple[int, Save]] = MappingProxyType({})
    roll_call: int = 0
    failed_at: int | None = None
    answered: int = 0

    # -- what it means

    @property
    def nodes_waiting(self) -> int:
        """How many nodes wait for this one to regroup; 0 while its round is unbroken."""
        return max(1, self.broken.waiting) if self.round and self.broken else 0

    @property
    def nodes_lost(self) -> int:
        """How many nodes of the previous round did not come back for this one."""
        return self.round.lost if self.round else 0

    @property
    def knows_who_lives(self) -> bool:
        """Whether a member is known to be lost, or all are known to live: they have answered this node's roll call."""
        return self.member_lost or (self.failed_at is not None and self.answered >= self.failed_at)

    @property
    def closed(self) -> str:
        """Why the run was closed, as far as known; empty while it is open."""
        return sanitize(cause(self.closing))

    @property
    def drains(self) -> list[Drain]:
        """Which nodes were asked to drain since this node entered its round, as far as known."""
        epoch = self.round.epoch if self.round else 0
        drains = {node: drain for node, (asked_in, drain) in self.drains_heard.items() if asked_in == epoch}
        own = drains.pop(self.node, None)
        if self.drain:
            drains[self.node] = replace(self.drain, node=self.node, place=own.place if own else STREAM_START)
        return list(drains.values())

    @property
    def saves(self) -> list[Save]:
        """The last requests to save since this node entered its round, for new nodes and for anybody else."""
        epoch = self.round.epoch if self.round else 0
        return [save for asked_in, save in self.saves_heard.values() if asked_in == epoch]

    # -- what the node does

    def become(self, node: str) -> View:
        """Come back as another node, which is in no round."""
        return self._replace(node=node, round=None)

    def ask(self) -> View:
        """Ask to join the next round."""
        return self if self.joining else self._replace(joining=True)

    def wait(self) -> View:
        """Wait for the next round as a candidate."""
        return self if self.standing == "candidate" else self._replace(standing="candidate")

    def enter(self, entered: Round) -> View:
        """Enter a round."""
        known = self.last_break if self.last_break and self.last_break.epoch == entered.epoch else None
        return self._replace(
            round=entered,
            previous=self.round,
            epoch_held=entered.epoch,
            incarnation=entered.incarnation,
            joining=False,
            fenced=False,
            broken=known,
            member_lost=known is not None and known.member_lost,
            drains_heard={node: heard for node, heard in self.drains_heard.items() if heard[0] == entered.epoch},
            failed_at=None,
            answered=0,
        )

    def leave(self) -> View:
        """Leave the run."""
        return self._replace(round=None, joining=False)

    def begin_drain(self, drain: Drain) -> View:
        """Drain, unless this node already does."""
        return self if self.drain else self._replace(drain=drain)

    def regroup(self, news: Break) -> View:
        """Regroup: this node's round is broken."""
        if self.round and self.round.epoch != news.epoch:
            return self
        return self._replace(broken=news, member_lost=self.member_lost or news.member_lost)

    # -- what the node hears

    def apply_closing(self, why: bytes | str, *, stop: bool = False) -> View:
        """The run's record says that it is closed, and why, as JSON; ``stop``: workers have to end too, irrevocably."""
        closing, is_stopped = decode_cause(text(why)) or UNKNOWN, self.is_stopped or stop
        record = closing.as_cause(), int(is_stopped)
        return self._replace(closing=closing, is_stopped=is_stopped, record_of_closing=record)

    def hear_roll_call(self, called_at: int) -> View:
        """A roll call was opened, by the server's clock in ms; 0 is none."""
        return self._replace(roll_call=called_at) if called_at else self

    def apply_roll_call(self, reply: RollCall) -> View:
        """The reply of ``lua/roll_call.lua``."""
        answered = max(self.answered, reply.failed_at if reply.answered else 0)
        return self._replace(failed_at=reply.failed_at, answered=answered)

    def apply_wake_up(self, place: str, change: dict[str, str]) -> View:
        """A wake-up of the run: its id in the stream, and its fields."""
        view, epoch = self, _number(change.get("epoch"))
        match change.get("event"):
            case "closed" | "stopped" as event:
                view = self._replace(closing=_cause(change), is_stopped=self.is_stopped or event == "stopped")
            case "broken":
                view = self._hear_break(epoch, change)
            case "drain":
                view = self._hear_drain(place, epoch, change)
            case "save":
                view = self._hear_save(place, epoch, change)
            case "roll_call":
                view = self.hear_roll_call(_number(change.get("called_at")))
            case "answered" if self.round and epoch == self.round.epoch:
                view = self._replace(answered=max(self.answered, _number(change.get("called_at"))))
        return view

    def _hear_break(self, epoch: int, change: dict[str, str]) -> View:
        news = Break(epoch, _cause(change), _number(change.get("waiting")), change.get("lost") == "1")
        view = self.regroup(news) if self.round and self.round.epoch == epoch else self
        return view._replace(last_break=news)

    def _hear_drain(self, place: str, epoch: int, change: dict[str, str]) -> View:
        reason, timeout = sanitize(change.get("reason", "")), _number(change.get("timeout")) / 1000
        drain = Drain(change.get("node", ""), reason, timeout, place_of(place))
        view = self.begin_drain(replace(drain, place=STREAM_START)) if drain.node == self.node else self
        # Its epoch may belong to a round that this node is about to enter.
        if epoch <= self.drains_heard.get(drain.node, (-1,))[0]:
            return view
        return view._replace(drains_heard={**self.drains_heard, drain.node: (epoch, drain)})

    def _hear_save(self, place: str, epoch: int, change: dict[str, str]) -> View:
        ms = change.get("timeout")
        timeout = math.inf if ms == "-1" else _number(ms) / 1000
        save = Save(place_of(place), change.get("node", ""), sanitize(change.get("reason", "")), timeout)
        return self._replace(saves_heard={**self.saves_heard, bool(save.node): (epoch, save)})

    def apply_beat(self, asked_as: str, asked_in: Round | None, reply: Beat) -> View:
        """The reply of ``lua/beat.lua`` to the node ``asked_as``, which held the round ``asked_in``."""
        view = self.apply_closing(reply.closed, stop=bool(reply.stop)) if reply.closed else self
        if asked_as != self.node:
            return view
        if reply.standing != view.standing:
            view = view._replace(standing=reply.standing)
        timeout, _, reason = reply.drain.partition(" ")
        if timeout:
            view = view.begin_drain(Drain(self.node, sanitize(reason), _number(timeout) / 1000))
        if asked_in is None or self.round is not asked_in or self.joining:
            return view
        if reply.standing == "member" and reply.epoch == asked_in.epoch:
            why = decode_cause(reply.broken)
            return view.regroup(Break(asked_in.epoch, why, reply.candidates, member_lost=False)) if why else view
        if reply.standing == "unknown" or self.fenced:  # "unknown": the server lost its data, and judges no node
            return view
        fenced = Break(asked_in.epoch, Lost(node=self.node, cause="lease"), reply.candidates, member_lost=True)
        return view._replace(fenced=True).regroup(fenced)


def _cause(change: dict[str, str]) -> Event:
    return decode_cause(change.get("cause", "")) or UNKNOWN


def _number(field: str | None) -> int:
    return int(field) if field and field.isascii() and field.isdecimal() and len(field) < 16 else 0
