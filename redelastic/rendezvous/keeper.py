"""The keeper of a node: when it beats, when it answers a roll call, and the thread that does so."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import weakref
from typing import Final

from redelastic.redis.connection import Entries
from redelastic.redis.errors import UnavailableError

from .node import Node
from .view import View
from .watch import COMPLAINT_INTERVAL

log = logging.getLogger(__name__)

RETRY_PAUSE: Final = 0.2  # between attempts of the loop while Redis is away, in seconds
COARSE: Final = 0.11  # in seconds: Redis checks its clients ten times a second, so blocking reads end 0.1 s late
SPREAD: Final = 0.05  # nodes that wait for the same lease to run out check it within this time, in seconds
MAX_LEASE_CHECKERS: Final = 16  # about this many nodes of a group check a lease; they wake the others
LARGEST_ID: Final = f"{2**64 - 1}-{2**64 - 1}"  # of a stream's entry: no server has given it by itself
PER_ANSWER: Final = 5e-5  # in seconds, which Redis needs per answer to a roll call: large groups spread theirs


class Keeper:
    """Keeps a node in its run: renews the lease when that is due, and applies the run's wake-ups to its view.

    Args:
        node: to keep.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self._interval = node.settings.keep_alive_interval
        self._next_beat, self._beat_is_urgent = math.inf, False
        self._answered = 0  # the last roll call that this node has answered
        self._answer_at = math.inf  # when to answer the last one that it has heard of, unless that is answered
        self._thread: threading.Thread | None = None

    def start(self, since: str) -> None:
        """Start the keeper's thread, unless it runs: an earlier start may have been interrupted.

        Args:
            since: id of the last wake-up that this node has seen.
        """
        if self._thread is None or not self._thread.is_alive():
            args = (weakref.ref(self), self.node.stopped, since, self._interval)
            thread = threading.Thread(target=_keep, args=args, daemon=True)
            thread.name = f"redelastic-keepalive-{self.node.id}"
            thread.start()
            self._thread = thread

    def pump(self, since: str, longest: float) -> str:
        """Beat if due, then block until something that matters has happened.

        Called by any thread that waits for a round and by the keeper's, each with its own place in the stream.

        Args:
            since: id of the last wake-up that the caller has seen.
            longest: how long to block, in seconds.

        Returns:
            The id of the last wake-up; ``since`` if there was none, and the first possible one if Redis was away.
        """
        node, watch = self.node, self.node.watch
        try:
            early = min(COARSE, self._interval / 2)
            due, urgent = self.due()
            if time.monotonic() >= due - (0 if urgent else early):
                self.beat()
                watch.apply_return()  # not after a read alone: Redis may refuse writes
                if since == LARGEST_ID:  # the next change begins the stream anew, with lower ids
                    since = "0-0"
            until_beat = self.due()[0] - early - time.monotonic()
            if until_beat <= 0:  # urgent, and too soon for a blocking read
                node.stopped.wait(max(0.0, until_beat + early))
                return since
            wake_ups = node.connection.read({node.wake_key: since}, min(longest, until_beat))
        except UnavailableError as e:
            if node.view.round is None and not node.may_pass(e):
                raise  # a node that is in no round can report the refusal
            if not node.stopped.is_set():
                watch.apply_outage(e)
            # Soon, and not after an interval: a short outage restarts no lease, and this one may be about to run out.
            self._next_beat = min(self._next_beat, time.monotonic() + 2 * RETRY_PAUSE)
            node.stopped.wait(min(longest, random.uniform(0.5, 1) * RETRY_PAUSE))
            return "0-0"  # a server that comes back empty may give lower ids, if its clock is behind
        entries = wake_ups.get(node.wake_key, [])
        self.hear(entries)
        return entries[-1][0] if entries else since

    def hear(self, entries: Entries) -> None:
        """Apply wake-ups of the run, in their order, and answer a roll call among them."""
        before = self.node.view.roll_call
        for place, change in entries:
            self.node.watch.update(View.apply_wake_up, place, change)
        if self.node.view.roll_call != before:  # several threads may hear of the same one
            self._schedule_answer()

    def answer(self, roll_call: int) -> None:
        """Answer a roll call, which a reply of Redis asks for, with a beat; 0 is none."""
        if roll_call:
            self.node.watch.update(View.hear_roll_call, roll_call)
            self._answered = min(self._answered, roll_call - 1)
            self._schedule_answer()

    def _schedule_answer(self) -> None:
        # After the view names the call: a beat that another thread begins just now puts this off only if it answers it.
        held = self.node.view.round
        self._answer_at = time.monotonic() + random.uniform(0, PER_ANSWER * held.size if held else 0)

    def beat(self) -> None:
        """Renew the lease, and schedule the next beat."""
        view = self.node.view
        # Even if it fails: the loop pauses, must not beat twice, and reads between its attempts to answer.
        self.schedule(self._interval)
        self._answer_at = time.monotonic() + RETRY_PAUSE + COARSE
        reply = self.node.beat(view)
        if view.node == self.node.id:
            self._answered = view.roll_call
        if reply.expires_in_ms >= 0:
            self._schedule_lease_check(reply.expires_in_ms / 1000, view.round.size if view.round else 1)
        self.answer(reply.roll_call)

    def _schedule_lease_check(self, seconds: float, nodes: int) -> None:
        """Beat when the lease of another node will have run out, unless that node renews it."""
        checks = random.random() < MAX_LEASE_CHECKERS / nodes
        # The other nodes wait for a wake-up, and beat if none comes.
        due_in = seconds + random.uniform(0.002, SPREAD) + (0 if checks else SPREAD + COARSE)
        if due_in < self._interval:
            self.schedule(due_in, urgent=checks)

    def apply_join(self, answered: int) -> None:
        """A request to join has renewed the lease, and answered a roll call.

        An earlier beat stays due: it may be the one that checks the lease of another, silent node.
        """
        self._answered = answered
        if self._next_beat > time.monotonic() + self._interval:
            self.schedule(self._interval)

    def schedule(self, seconds: float, *, urgent: bool = False) -> None:
        """Schedule the next beat in that many seconds; an urgent one must not come a moment earlier."""
        self._next_beat, self._beat_is_urgent = time.monotonic() + seconds, urgent

    def due(self) -> tuple[float, bool]:
        """When the next beat is due, in seconds on the monotonic clock, and whether it is urgent."""
        if self._answered != self.node.view.roll_call and self._answer_at < self._next_beat:
            return self._answer_at, True
        return self._next_beat, self._beat_is_urgent


def _keep(reference: weakref.ref[Keeper], stopped: threading.Event, since: str, interval: float) -> None:
    """Run the keeper's thread, until its node is given up or the keeper garbage-collected."""
    failure, logged_at = "", -math.inf
    while not stopped.is_set():
        keeper = reference()
        if keeper is None:
            return
        try:
            since = keeper.pump(since, interval)
        except Exception as e:  # without its keeper the node would be lost
            now = time.monotonic()
            if not stopped.is_set() and (repr(e) != failure or now - logged_at >= COMPLAINT_INTERVAL):
                log.exception("The keep-alive of node %s failed; it keeps retrying.", keeper.node.id)
                failure, logged_at = repr(e), now
            stopped.wait(RETRY_PAUSE)
        del keeper
