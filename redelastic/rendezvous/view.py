"""A node's view of its run, from wake-ups and heartbeats, which several threads read."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from dataclasses import dataclass, replace
from typing import Final

from redelastic.monitoring.events import Event, Lost, decode_cause
from redelastic.monitoring.sentences import cause
from redelastic.redis.connection import STREAM_START, Entries, place_of, sanitize, text

from .replies import Beat, RollCall

log = logging.getLogger(__name__)

UNKNOWN: Final = Event(event="unknown")  # a cause that the run's record does not name
COMPLAINT_INTERVAL: Final = 60.0  # between two warnings about the same outage, in seconds


@dataclass(frozen=True)
class Drain:
    """A request to a node to let its workers save, and to leave.

    Attributes:
        node: its id.
        reason: who or what asked.
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
        reason: who asked; "" if only a node did.
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


class View:
    """A run as one of its nodes sees it; does no I/O.

    Attributes:
        run_id: the run's id.
        node: id of this node.
        round: the one that this node is in; None while it is in none.
        joining: whether this node has asked to join the next one.
        fenced: whether it lost its lease.
        standing: of this node in Redis's last reply: "candidate", "member", "fenced" or "unknown".
        drain: the request to this node to drain; None if there was none.
        record_of_closing: why the run is closed according to its record, as JSON, and 1 if workers have to end too.
    """

    def __init__(self, run_id: str) -> None:
        self.run_id = run_id
        self.node = ""
        # Guards what several threads change; never held during a call to Redis. Locked in C, so that no exception of a
        # signal handler comes between the locking and the block under it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self.round: Round | None = None
        self.joining = False
        self._broken: Event | None = None  # why the round is broken; None while it is not
        # Epoch, and `_break`'s arguments: the wake-up may come before this node has entered that round.
        self._last_break = (0, UNKNOWN, 0, False)
        self._left: Round | None = None  # the round before this one
        self._logged: set[tuple[int, str]] = set()  # the breaks already logged, by epoch and cause
        self._news = False  # whether something has changed that the agent has not seen yet, and may have to act on
        self._member_lost = False  # whether the round is broken because a member died or left
        self.fenced = False
        self.standing = ""
        self._waiting = 0  # nodes that wait for the next round, as far as known
        self._closed: Event | None = None  # why; None while it is not
        self._stop = False  # whether workers have to end too
        self.record_of_closing = ("", 0)  # a wake-up alone proves nothing
        self._drains: dict[str, tuple[int, Drain]] = {}  # from wake-ups, by node, with its epoch
        self.drain: Drain | None = None  # independent of this node's id; a signal handler sets it too, so not guarded
        # The last request, with its epoch, of those for nodes that wait to be let in, and of the others.
        self._saves: dict[bool, tuple[int, Save]] = {}
        self._failed_at: int | None = None  # when the workers failed that led to the roll call, in the server's ms
        self._answered = 0  # when the last roll call that every node answered was opened, in the server's ms
        self._away_since: float | None = None  # since when Redis has not answered; None while it does
        self._back_at = -math.inf  # when Redis last came back, on the monotonic clock
        self._complain_at: dict[str, float] = {}  # when to log the outage again, by kind of error

    # -- what the agent asks, several times a second

    @property
    def nodes_waiting(self) -> int:
        """How many nodes wait for this one to regroup; 0 while its round is unbroken."""
        with self._lock:
            return max(1, self._waiting) if self.round and self._broken else 0

    @property
    def nodes_lost(self) -> int:
        """How many nodes of the previous round did not come back for this one."""
        entered = self.round
        return entered.lost if entered else 0

    @property
    def member_lost(self) -> bool:
        """Whether a member of this node's round is lost."""
        return self._member_lost

    def wait_for_loss(self, timeout: float, patience: float = 0.0) -> bool:
        """Wait until a member of this node's round is lost; returns whether one is.

        It ends when every node has answered a roll call, as then none is lost; or after ``timeout`` seconds in which
        Redis was there, for which it waits at most ``patience`` seconds more.
        """
        with self._lock:
            timeout = 0.0 if self.round and self.round.size == 1 else timeout
            until = time.monotonic() + timeout
            while not (self._member_lost or self._all_answered()):
                # Leases restart when Redis comes back.
                enough = max(until, self._back_at + timeout) if self._away_since is None else math.inf
                left = min(enough, until + patience) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self._member_lost

    def _all_answered(self) -> bool:
        return self._failed_at is not None and self._answered >= self._failed_at

    def wait_for_news(self, timeout: float) -> None:
        """Wait until this node's round breaks, a node is to drain or the run is stopped; at most ``timeout`` seconds.

        News that comes while no thread waits ends the next wait at once.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._news, timeout)
            self._news = False

    def notify(self) -> None:
        """End the wait for news, for another reason that the agent may have to act on."""
        with self._lock:
            self._announce_news()

    @property
    def closed(self) -> str:
        """Why the run was closed, as far as known; empty while it is open."""
        return _sanitized(self._closed)

    @property
    def stopped(self) -> str:
        """Why the run was stopped, with its running workers; empty while it was not."""
        return self.closed if self._stop else ""

    @property
    def drains(self) -> list[Drain]:
        """Which nodes were asked to drain since this node entered its round, as far as known."""
        with self._lock:
            epoch = self.round.epoch if self.round else 0
            drains = {node: drain for node, (asked_in, drain) in self._drains.items() if asked_in == epoch}
        own = drains.pop(self.node, None)
        if self.drain:
            drains[self.node] = replace(self.drain, node=self.node, place=own.place if own else STREAM_START)
        return list(drains.values())

    @property
    def saves(self) -> list[Save]:
        """The last requests to save since this node entered its round, for new nodes and for anybody else."""
        with self._lock:
            epoch = self.round.epoch if self.round else 0
            return [save for asked_in, save in self._saves.values() if asked_in == epoch]

    @property
    def away(self) -> float:
        """How long Redis has not answered, in seconds; 0 while it does."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def has_reached_redis_for(self, seconds: float) -> bool:
        """Whether Redis has answered this node for all of the last ``seconds``, as far as known."""
        return self._away_since is None and time.monotonic() - self._back_at >= seconds

    # -- what changes it

    def become(self, node: str) -> None:
        """Come back as another node, which is in no round."""
        with self._lock:
            self.node, self.round = node, None

    def forget_round(self) -> None:
        """Record that this node has left."""
        with self._lock:
            self.round, self.joining = None, False

    def apply_closing(self, why: bytes | str, *, stop: bool = False) -> None:
        """Record that the run is closed, and why, as JSON; ``stop``: workers have to end too, irrevocably."""
        with self._lock:
            closed = self._closed = decode_cause(text(why)) or UNKNOWN
            self._stop = stop or self._stop
            self.record_of_closing = (closed.as_cause(), int(self._stop))

    def begin_drain(self, reason: str, timeout: float) -> None:
        """Record that this node is to drain; ``timeout`` is in seconds. Takes no lock: a signal handler may call it."""
        self.drain = self.drain or Drain(self.node, reason, timeout)

    def apply_round(self, entered: Round) -> None:
        """Record that this node has entered a round."""
        with self._lock:
            self._left, self.round = self.round, entered
            self._logged = {logged for logged in self._logged if self._left and logged[0] == self._left.epoch}
            self._broken, self._member_lost, self.fenced, self._waiting, self.joining = None, False, False, 0, False
            self._failed_at, self._answered = None, 0
            self._drains = {node: asked for node, asked in self._drains.items() if asked[0] == entered.epoch}
            if self._last_break[0] == entered.epoch:
                self._break(*self._last_break[1:])

    def apply_roll_call(self, reply: RollCall) -> None:
        """Apply the reply of ``lua/roll_call.lua``."""
        with self._lock:
            self._failed_at = reply.failed_at
            self._answered = max(self._answered, reply.failed_at if reply.answered else 0)

    def apply_wake_ups(self, entries: Entries) -> list[int]:
        """Apply the run's wake-ups; returns the roll calls that this node has to answer."""
        roll_calls: list[int] = []
        with self._lock:
            for place, change in entries:
                event, why = change.get("event"), decode_cause(change.get("cause", "")) or UNKNOWN
                if event in {"closed", "stopped"}:
                    self._closed, self._stop = why, self._stop or event == "stopped"
                    self._announce_news()
                elif event == "drain":
                    node, reason = change.get("node", ""), sanitize(change.get("reason", ""))
                    timeout = _number(change.get("timeout")) / 1000
                    if node == self.node:
                        self.begin_drain(reason, timeout)
                    drain = Drain(node, reason, timeout, place_of(place))
                    asked_in = _number(change.get("epoch"))  # perhaps a round that this node is about to enter
                    if node not in self._drains or asked_in > self._drains[node][0]:
                        self._drains[node] = asked_in, drain
                    self._announce_news()
                elif event == "save":
                    ms = change.get("timeout")
                    timeout = math.inf if ms == "-1" else _number(ms) / 1000
                    reason = sanitize(change.get("reason", ""))
                    save = Save(place_of(place), change.get("node", ""), reason, timeout)
                    self._saves[bool(save.node)] = _number(change.get("epoch")), save
                    self._announce_news()
                elif event == "roll_call":
                    roll_calls.append(_number(change.get("called_at")))
                elif event == "answered" and self.round and _number(change.get("epoch")) == self.round.epoch:
                    self._answered = max(self._answered, _number(change.get("called_at")))
                    self._changed.notify_all()
                elif event == "broken":
                    epoch, waiting = _number(change.get("epoch")), _number(change.get("waiting"))
                    self._apply_break(epoch, why, waiting, change.get("lost") == "1")
        return roll_calls

    def _apply_break(self, epoch: int, why: Event, waiting: int, member_lost: bool) -> None:
        self._last_break = (epoch, why, waiting, member_lost)
        if self.round and self.round.epoch == epoch:
            self._break(why, waiting, member_lost)
        elif self._left and self._left.epoch == epoch and member_lost:
            # The loss completed the round that this node is in, and the reply to its join came before the wake-up.
            self._log_break(epoch, why)

    def apply_beat(self, asked_as: str, asked_in: Round | None, reply: Beat) -> None:
        """Apply the reply of ``lua/beat.lua`` to the node ``asked_as``, which held the round ``asked_in``."""
        with self._lock:
            if reply.closed:
                self.apply_closing(reply.closed, stop=bool(reply.stop))
            if asked_as != self.node:
                return
            self.standing = reply.standing
            timeout, _, why = reply.drain.partition(" ")
            if timeout and self.drain is None:
                self.begin_drain(sanitize(why), _number(timeout) / 1000)
                self._announce_news()
            if asked_in and self.round is asked_in and not self.joining:
                self._judge(asked_in, reply.epoch, decode_cause(reply.broken), reply.candidates)

    def _judge(self, held: Round, epoch: int, broken: Event | None, candidates: int) -> None:
        if self.standing == "member" and epoch == held.epoch:
            if broken:
                self._break(broken, candidates, member_lost=False)
        elif self.standing != "unknown" and not self.fenced:  # "unknown": the server lost its data, and judges no node
            self.fenced = True
            log.warning("This node lost its lease: round %s of run %r goes on without it.", held.epoch, self.run_id)
            self._break(Lost(node=self.node, cause="lease"), candidates, member_lost=True)

    def _break(self, why: Event, waiting: int, member_lost: bool) -> None:
        if self.round and (member_lost or not self._broken):
            self._log_break(self.round.epoch, why)
        self._broken, self._waiting, self._member_lost = why, waiting, self._member_lost or member_lost
        self._announce_news()

    def _log_break(self, epoch: int, why: Event) -> None:
        by_itself = why.node == self.node  # it knows what it did
        if not by_itself and (epoch, why.as_cause()) not in self._logged:
            self._logged.add((epoch, why.as_cause()))
            log.warning("Round %s of run %r is broken: %s.", epoch, self.run_id, _sanitized(why))

    def _announce_news(self) -> None:
        self._news = True
        self._changed.notify_all()

    def apply_outage(self, error: Exception) -> None:
        """Record that Redis does not answer this node."""
        now, kind = time.monotonic(), re.sub(r"[0-9]+", "", str(error))
        if self._away_since is None:
            self._away_since = now
        if now >= self._complain_at.get(kind, now):
            self._complain_at[kind] = now + COMPLAINT_INTERVAL
            log.warning(
                "Node %s keeps its place in run %r; Redis has been away for %.0f s: %s",
                *(self.node, self.run_id, self.away, error),
            )

    def apply_return(self) -> None:
        """Record that Redis has answered this node, after an outage or not."""
        if self._away_since is not None:
            log.warning("Redis is back for node %s of run %r, after %.1f s.", self.node, self.run_id, self.away)
            with self._lock:
                self._away_since, self._back_at = None, time.monotonic()
                self._changed.notify_all()
            self._complain_at.clear()


def _sanitized(why: Event | None) -> str:
    return sanitize(cause(why))


def _number(field: str | None) -> int:
    return int(field) if field and field.isascii() and field.isdecimal() and len(field) < 16 else 0
