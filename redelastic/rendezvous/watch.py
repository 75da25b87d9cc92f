"""What a node knows now: its view, which several threads change and wait for, and whether Redis answers."""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Concatenate, Final, ParamSpec

from redelastic.monitoring.sentences import cause
from redelastic.redis.connection import sanitize

from .view import Break, Drain, View

log = logging.getLogger(__name__)

P = ParamSpec("P")
COMPLAINT_INTERVAL: Final = 60.0  # between two warnings about the same outage, in seconds
_ROUND: Final = attrgetter("round", "broken", "last_break")
# The agent acts on these.
_NEWS: Final = attrgetter("broken", "closing", "is_stopped", "drain", "drains_heard", "saves_heard")


class Watch:
    """The current view of one node, which its threads share; the log says what changes.

    Args:
        run_id: the run's id.
        node: the node's id.
    """

    def __init__(self, run_id: str, node: str) -> None:
        self._run_id = run_id
        # Guards what follows; never held during a call to Redis. Locked in C, so that no exception of a signal handler
        # comes between the locking and the block under it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._view = View(node)
        self._asked_to_drain: Drain | None = None  # by this process: a signal handler sets it, so not guarded
        self._has_news = False  # whether something has changed that the agent has not seen yet, and may have to act on
        self._logged: set[tuple[int, str]] = set()  # the breaks already logged, by epoch and cause
        self._away_since: float | None = None  # since when Redis has not answered; None while it does
        self._back_at = -math.inf  # when Redis last came back, on the monotonic clock
        self._complain_at: dict[str, float] = {}  # when to log the outage again, by kind of error

    @property
    def view(self) -> View:
        """What this node knows now: a value that no longer changes."""
        return self._view.begin_drain(self._asked_to_drain) if self._asked_to_drain else self._view

    # -- changes

    def update(self, transition: Callable[Concatenate[View, P], View], *args: P.args, **kwargs: P.kwargs) -> View:
        """Replace the view by the one that a transition makes of it, and return that."""
        with self._lock:
            before = self.view
            after = self._view = transition(before, *args, **kwargs)
            if after is before:
                return after
            now, then = _NEWS(after), _NEWS(before)
            if now != then and any(new and new is not old for new, old in zip(now, then, strict=True)):
                self._has_news = True
            self._changed.notify_all()
            breaks = self._breaks_to_log(before, after)
        if after.fenced and not before.fenced and after.round:
            epoch = after.round.epoch
            log.warning("This node lost its lease: round %s of run %r goes on without it.", epoch, self._run_id)
        for epoch, why in breaks:
            log.warning("Round %s of run %r is broken: %s.", epoch, self._run_id, why)
        return after

    def begin_drain(self, reason: str, timeout: float) -> None:
        """Record that this node is to drain, in ``timeout`` seconds. Takes no lock: a signal handler may call it."""
        self._asked_to_drain = self._asked_to_drain or Drain(self._view.node, reason, timeout)

    def notify(self) -> None:
        """End the wait for news, for another reason that the agent may have to act on."""
        with self._lock:
            self._has_news = True
            self._changed.notify_all()

    def _breaks_to_log(self, before: View, after: View) -> list[tuple[int, str]]:
        if _ROUND(after) == _ROUND(before):
            return []
        breaks: list[Break] = []
        if after.broken is not before.broken and after.broken:
            is_first = before.broken is None or before.broken.epoch != after.broken.epoch
            if is_first or after.broken.member_lost:
                breaks.append(after.broken)
        missed, previous = after.last_break, after.previous
        if missed is not before.last_break and missed and missed.member_lost and missed is not after.broken:
            # The loss completed the round that this node is in, and the reply to its join came before the wake-up.
            breaks += [missed] if previous and missed.epoch == previous.epoch else []
        if after.round is not before.round and previous:
            self._logged = {logged for logged in self._logged if logged[0] == previous.epoch}
        by_others = {(each.epoch, sanitize(cause(each.why))): None for each in breaks if each.why.node != after.node}
        fresh = [each for each in by_others if each not in self._logged]
        self._logged.update(fresh)
        return fresh

    # -- waits

    def wait_for_news(self, timeout: float) -> None:
        """Wait until this node's round breaks, a node is to drain or the run is stopped; at most ``timeout`` seconds.

        News that comes while no thread waits ends the next wait at once.
        """
        with self._lock:
            self._changed.wait_for(lambda: self._has_news, timeout)
            self._has_news = False

    def wait_for_loss(self, timeout: float, patience: float = 0.0) -> bool:
        """Wait until a member of this node's round is lost; returns whether one is.

        It ends when every node has answered a roll call, as then none is lost; or after ``timeout`` seconds in which
        Redis was there, for which it waits at most ``patience`` seconds more.
        """
        with self._lock:
            held = self.view.round
            timeout = 0.0 if held and held.size == 1 else timeout
            until = time.monotonic() + timeout
            while not self.view.knows_who_lives:
                # Leases restart when Redis comes back.
                enough = max(until, self._back_at + timeout) if self._away_since is None else math.inf
                left = min(enough, until + patience) - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            return self.view.member_lost

    # -- outages

    @property
    def away(self) -> float:
        """How long Redis has not answered, in seconds; 0 while it does."""
        since = self._away_since
        return 0.0 if since is None else time.monotonic() - since

    def has_reached_redis_for(self, seconds: float) -> bool:
        """Whether Redis has answered this node for all of the last ``seconds``, as far as known."""
        return self._away_since is None and time.monotonic() - self._back_at >= seconds

    def apply_outage(self, error: Exception) -> None:
        """Record that Redis does not answer this node."""
        now, kind = time.monotonic(), re.sub(r"[0-9]+", "", str(error))
        if self._away_since is None:
            self._away_since = now
        if now >= self._complain_at.get(kind, now):
            self._complain_at[kind] = now + COMPLAINT_INTERVAL
            log.warning(
                "Node %s keeps its place in run %r; Redis has been away for %.0f s: %s",
                *(self._view.node, self._run_id, self.away, error),
            )

    def apply_return(self) -> None:
        """Record that Redis has answered this node, after an outage or not."""
        if self._away_since is not None:
            node, seconds = self._view.node, self.away
            log.warning("Redis is back for node %s of run %r, after %.1f s.", node, self._run_id, seconds)
            with self._lock:
                self._away_since, self._back_at = None, time.monotonic()
                self._changed.notify_all()
            self._complain_at.clear()
