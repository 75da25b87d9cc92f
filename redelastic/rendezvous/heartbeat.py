"""A node's heartbeat: its identity in the run, the arguments of its calls, the loop that renews lease and view."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final

from redelastic.redis import scripts
from redelastic.redis.connection import Connection, require_keys_of_types
from redelastic.redis.errors import CorruptStateError, RefusesWritesError, UnavailableError, UnreachableError
from redelastic.redis.keys import RunKeys, check_key_part

from .replies import Beat, decoded
from .settings import Settings
from .view import COMPLAINT_INTERVAL, View

log = logging.getLogger(__name__)

RETRY_PAUSE: Final = 0.2  # between attempts of the loop while Redis is away, in seconds
COARSE: Final = 0.11  # in seconds: Redis checks its clients ten times a second, so blocking reads end 0.1 s late
SPREAD: Final = 0.05  # nodes that wait for the same lease to run out check it within this time, in seconds
MAX_LEASE_CHECKERS: Final = 16  # about this many nodes of a group check a lease; they wake the others
PER_ANSWER: Final = 5e-5  # in seconds, which Redis needs per answer to a roll call: large groups spread theirs
HEARD: Final = 17  # index in `Heartbeat.known` of the last roll call that the node has heard of
NO_ROUND: Final = (0, 0, 0, "", 0)  # what a node reports of its round while it holds none


class Heartbeat:
    """Keeps a node in its run: renews the lease, and applies the run's wake-ups to the view.

    Attributes:
        view: what this node knows of the run; its ``node`` is this node's identity.
        connection: to Redis.
        keys: of the run, with the key of this node's status.
        host: address of this node for its peers.
        describe: serializes the status that heartbeats carry.
        incarnation: of the run that this node was last in: the id of the node that created it; empty at first.
    """

    def __init__(self, connection: Connection, keys: RunKeys, settings: Settings, host: str) -> None:
        self.view = View(keys.run_id)
        self.connection = connection
        self.describe: Callable[[dict[str, Any]], str] = json.dumps
        self.incarnation = ""
        self.stopped = threading.Event()
        self._run_keys = keys
        self._settings = settings
        self.host = check_key_part("address of this node", host)
        self._wake_key = keys.wake.encode()
        self._next_beat, self._beat_is_urgent = math.inf, False
        self._roll_call = self._answered = 0  # the last roll call that this node has heard of; has answered
        self._answer_at = math.inf  # when to answer the former, unless it is answered
        self._keeper: threading.Thread | None = None
        self.renew_identity()

    # -- its identity, and what it sends

    def renew_identity(self) -> None:
        """Become another node, so that no request of the old one that is still in flight can count for it (I4)."""
        node = f"{self._settings.node_name}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self.view.become(node)
        self.keys = [*self._run_keys.types, self._run_keys.status(node)]

    def status(self) -> dict[str, Any]:
        """This node's status, for people and tools."""
        held, name = self.view.round, self._settings.node_name
        status: dict[str, Any] = {"name": name, "host": self.host, "pid": os.getpid()}
        status["state"] = "running" if held and not self.view.joining else "waiting"
        return status | {"epoch": held.epoch, "rank": held.rank, "size": held.size} if held else status

    def known(self) -> list[Any]:
        """This node's knowledge, for a server that has forgotten the run: the arguments of ``lua/restore.lua``."""
        s, held = self._settings, self.view.round
        times = (s.last_call_timeout, s.replacement_timeout, s.lease, s.keep_alive_interval, s.ttl)
        settings = [s.min_nodes, s.max_nodes, *(round(1000 * t) for t in times)]
        place = [held.epoch, held.rank, held.size, f"{held.host} {held.port}", held.completed_at] if held else NO_ROUND
        status = self.describe(self.status())
        steady = int(self.view.has_reached_redis_for(s.lease))
        closing = self.view.record_of_closing
        return [self.view.node, status, *settings, *place, *closing, steady, self._roll_call, self.incarnation]

    def keys_with_store(self, epoch: int) -> list[str]:
        """The keys of a script that may complete a round, which ends the store of the round ``epoch``."""
        return [*self.keys, self._run_keys.store(epoch).data]

    def call(
        self, script: scripts.Script, keys: list[str], args: list[Any] | Callable[[], list[Any]], timeout: float | None
    ) -> Any:
        """Run a script for this node; as :meth:`Script.__call__`, but errors name a key of the wrong type."""
        try:
            return script(self.connection, keys, args, timeout)
        except CorruptStateError as e:
            types = {**self._run_keys.types, self._run_keys.status(self.view.node): "string"}
            require_keys_of_types(self.connection, types, e)

    # -- the loop

    def start(self, since: str) -> None:
        """Start the keeper's thread, unless it runs: an earlier start may have been interrupted.

        Args:
            since: id of the last wake-up that this node has seen.
        """
        if self._keeper is None or not self._keeper.is_alive():
            args = (weakref.ref(self), self.stopped, since, self._settings.keep_alive_interval)
            keeper = threading.Thread(target=_keep, args=args, daemon=True)
            keeper.name = f"redelastic-keepalive-{self.view.node}"
            keeper.start()
            self._keeper = keeper

    def pump(self, since: str, longest: float) -> str:
        """Beat if due, then block until something that matters has happened.

        Called by any thread that waits for a round and by the keeper's, each with its own place in the stream.

        Args:
            since: id of the last wake-up that the caller has seen.
            longest: how long to block, in seconds.

        Returns:
            The id of the last wake-up; ``since`` if there was none, and the first possible one if Redis was away.
        """
        try:
            early = min(COARSE, self._settings.keep_alive_interval / 2)
            due, urgent = self.due()
            if time.monotonic() >= due - (0 if urgent else early):
                self.beat()
                self.view.apply_return()  # not after a read alone: Redis may refuse writes
            until_beat = self.due()[0] - early - time.monotonic()
            if until_beat <= 0:  # urgent, and too soon for a blocking read
                self.stopped.wait(max(0.0, until_beat + early))
                return since
            wake_ups = self.connection.read({self._wake_key: since}, min(longest, until_beat))
        except UnavailableError as e:
            if self.view.round is None and not self.may_pass(e):
                raise  # a node that is in no round can report the refusal
            if not self.stopped.is_set():
                self.view.apply_outage(e)
            # Soon, and not after an interval: a short outage restarts no lease, and this one may be about to run out.
            self._next_beat = min(self._next_beat, time.monotonic() + 2 * RETRY_PAUSE)
            self.stopped.wait(min(longest, random.uniform(0.5, 1) * RETRY_PAUSE))
            return "0-0"  # a server that comes back empty may give lower ids, if its clock is behind
        entries = wake_ups.get(self._wake_key, [])
        for call in self.view.apply_wake_ups(entries):
            if call != self._roll_call:  # several threads may hear of the same one
                self.answer(call)
        return entries[-1][0] if entries else since

    def answer(self, roll_call: int) -> None:
        """Answer a roll call with a beat, which is due now; 0 is none."""
        if roll_call:
            held = self.view.round
            self._roll_call, self._answered = roll_call, min(self._answered, roll_call - 1)
            # Last: a beat that another thread begins just now puts this off only if it names the call itself.
            self._answer_at = time.monotonic() + random.uniform(0, PER_ANSWER * held.size if held else 0)

    def may_pass(self, error: UnavailableError) -> bool:
        """Whether an error is an outage, which a node sits out, rather than a refusal."""
        if isinstance(error, RefusesWritesError):
            return self.connection.served
        return isinstance(error, UnreachableError)

    def beat(self) -> None:
        """Renew the lease, and apply Redis's reply to the view."""
        asked_as, asked_in = self.view.node, self.view.round
        # Even if it fails: the loop pauses, must not beat twice, and reads between its attempts to answer.
        self.is_due_in(self._settings.keep_alive_interval)
        self._answer_at = time.monotonic() + RETRY_PAUSE + COARSE
        keys, known = self.keys_with_store(asked_in.epoch if asked_in else 0), self.known()
        reply = Beat(*decoded(self.call(scripts.BEAT, keys, known, 0)))
        if asked_as == self.view.node:
            self._answered = known[HEARD]
        self.view.apply_beat(asked_as, asked_in, reply)
        if reply.expires_in_ms >= 0:
            self._schedule_lease_check(reply.expires_in_ms / 1000, asked_in.size if asked_in else 1)
        self.answer(reply.roll_call)

    def _schedule_lease_check(self, seconds: float, nodes: int) -> None:
        """Beat when the lease of another node will have run out, unless that node renews it."""
        checks = random.random() < MAX_LEASE_CHECKERS / nodes
        # The other nodes wait for a wake-up, and beat if none comes.
        due_in = seconds + random.uniform(0.002, SPREAD) + (0 if checks else SPREAD + COARSE)
        if due_in < self._settings.keep_alive_interval:
            self.is_due_in(due_in, urgent=checks)

    def has_been_renewed(self, answered: int) -> None:
        """Record that a request to join has renewed the lease and answered a roll call.

        An earlier beat stays due: it may be the one that checks the lease of another, silent node.
        """
        self._answered = answered
        if self._next_beat > time.monotonic() + self._settings.keep_alive_interval:
            self.is_due_in(self._settings.keep_alive_interval)

    def is_due_in(self, seconds: float, *, urgent: bool = False) -> None:
        """Schedule the next beat in that many seconds; an urgent one must not come a moment earlier."""
        self._next_beat, self._beat_is_urgent = time.monotonic() + seconds, urgent

    def due(self) -> tuple[float, bool]:
        """When the next beat is due, in seconds on the monotonic clock, and whether it is urgent."""
        if self._answered != self._roll_call and self._answer_at < self._next_beat:
            return self._answer_at, True
        return self._next_beat, self._beat_is_urgent


def _keep(reference: weakref.ref[Heartbeat], stopped: threading.Event, since: str, interval: float) -> None:
    """Run the keeper's thread, until its heartbeat is stopped or garbage-collected."""
    failure, logged_at = "", -math.inf
    while not stopped.is_set():
        heartbeat = reference()
        if heartbeat is None:
            return
        try:
            since = heartbeat.pump(since, interval)
        except Exception as e:  # without its keeper the node would be lost
            now = time.monotonic()
            if not stopped.is_set() and (repr(e) != failure or now - logged_at >= COMPLAINT_INTERVAL):
                log.exception("The keep-alive of node %s failed; it keeps retrying.", heartbeat.view.node)
                failure, logged_at = repr(e), now
            stopped.wait(RETRY_PAUSE)
        del heartbeat
