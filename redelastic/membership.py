"""A node's membership of a run: its lease, what it knows of the run, and the loop that keeps both fresh."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import threading
import time
import uuid
import weakref
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from . import scripts
from .connection import Connection, Entries, UnreachableError, require_keys_of_types, text
from .keys import RunKeys, check_key_part
from .settings import Settings

log = logging.getLogger(__name__)

RETRY_PAUSE: Final = 0.2  # between attempts of the loop while Redis is away, in seconds
COMPLAINT_INTERVAL: Final = 60.0  # between two warnings about the same outage, in seconds
COARSE: Final = 0.11  # Redis ends a blocking read up to 100 ms late: it looks at its clients ten times a second
SPREAD: Final = 0.05  # nodes that wait for the same lease to run out look at it within this time, in seconds


@dataclass(frozen=True)
class Round:
    """A completed round, as one of its members sees it.

    Attributes:
        epoch: fencing token of the round.
        rank: of this node.
        size: number of nodes.
        host, port: where rank 0 would serve the round's bootstrap store.
        lost: how many nodes of the round before did not come back.
        again: whether this node was in a round before.
    """

    epoch: int
    rank: int
    size: int
    host: str
    port: int
    lost: int
    again: bool


class Membership:
    """One node of one run.

    The node's identity ends when it leaves or is fenced: it comes back as a new node, so that nothing of the old one
    that is still under way can count for it (I4).

    Args:
        connection: to Redis.
        keys: of the run.
        settings: of the run.
        host: address of this node for its peers.
    """

    def __init__(self, connection: Connection, keys: RunKeys, settings: Settings, host: str) -> None:
        self._connection = connection
        self._keys = keys
        self._settings = settings
        self._host = check_key_part("address of this node", host)
        self._wake_key = keys.wake.encode()
        self._lock = threading.Condition()  # guards what follows; never held while Redis is asked
        self._heard = "0-0"  # id of the last wake-up when this node last asked to join
        self._round: Round | None = None
        self._broken = ""  # why the round is broken; "" while it is not
        self._last_break = (0, "", 0, False)  # epoch, and what `_break` takes: it may be heard of before that round
        self._joining = False
        self._member_lost = False  # whether it is broken because a member died or left
        self._fenced = False  # whether this node lost its lease
        self._standing = ""  # what Redis last said of this node: "candidate", "member", "fenced" or "unknown"
        self._waiting = 0  # nodes that wait for the next round, as far as known
        self._closed = ""  # by whom; "" while it is not
        self._next_beat, self._beat_is_urgent = 0.0, False
        self._away_since: float | None = None  # since when Redis does not answer; None while it does
        self._next_complaint = 0.0
        self._keeper: threading.Thread | None = None
        self._stopped = threading.Event()
        self._epoch_held = 0  # that of the last round this node was in
        self._renew_identity()

    def _renew_identity(self) -> None:
        self.node = f"{self._host}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._run_keys = [*self._keys.types, self._keys.status(self.node)]

    # -- what the agent asks, several times a second: answered from memory

    @property
    def nodes_waiting(self) -> int:
        """How many nodes wait for this one to regroup; 0 while its round stands."""
        with self._lock:
            return max(1, self._waiting) if self._round and self._broken else 0

    @property
    def nodes_lost(self) -> int:
        """How many nodes of the round before did not come back for this one."""
        entered = self._round
        return entered.lost if entered else 0

    def wait_for_loss(self, timeout: float) -> bool:
        """Wait until a member of this node's round is lost, for ``timeout`` seconds; returns whether one is."""
        with self._lock:
            return self._lock.wait_for(lambda: self._member_lost, timeout)

    @property
    def closed(self) -> str:
        """By whom the run was closed, as far as is known; empty while it is open."""
        return self._closed

    # -- transitions

    def join(self, port: int, deadline: float) -> Round:
        """Join the next round, and block until it is complete.

        Args:
            port: on which this node would serve the bootstrap store.
            deadline: on the monotonic clock, in seconds; put off while the node waits as a spare.

        Raises:
            RendezvousClosedError, RendezvousGracefulExitError: the run is closed; the latter for a spare.
            RendezvousTimeoutError: the round was not complete in time.
            RendezvousConnectionError: Redis was not to be reached up to the deadline, or it refuses us.
            RendezvousStateError: the run's keys in Redis are not as they should be.
            RendezvousError: other nodes of the run have another ``min_nodes`` or ``max_nodes``.
        """
        if self._joining:  # an error ended the last attempt: what of it is still under way must not count for this one
            self._try_to_leave("starts anew")
        elif self._fenced:
            self._renew_identity()
        self._joining = True
        # Leases of nodes that died with their whole job may be alive for so long; until then another size is refused.
        others_may_be_dead_until = time.monotonic() + self._settings.lease + 1
        while True:
            if self._stopped.is_set():
                raise RendezvousClosedError(
                    f"Node {self.node} of run {self._keys.run_id!r} was shut down; make a new one."
                )
            outcome, *told = self._ask_to_join(port, max(self._settings.read_timeout, deadline - time.monotonic()))
            match text(outcome):
                case "complete":
                    return self._enter(*told)
                case "closed":
                    self._refuse_closed(*told)
                case "left":
                    self._renew_identity()
                case "mismatch":
                    self._wait_while_refused(*told, until=min(others_may_be_dead_until, deadline))
                case _:
                    deadline = self._wait_as_candidate(*told, deadline=deadline)

    def _wait_while_refused(self, min_nodes: int, max_nodes: int, *, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"Node {self.node} wants {self._settings.min_nodes} to {self._settings.max_nodes} nodes, but run "
                f"{self._keys.run_id!r} has {min_nodes} to {max_nodes}; start all with the same --nnodes."
            )
        self._stopped.wait(min(self._settings.keep_alive_interval, left))

    def _wait_as_candidate(
        self, epoch: int, wake_id: bytes, completes_in: int, spare: int, *, deadline: float
    ) -> float:
        """Block until it is worth asking to join again; returns until when this node goes on asking."""
        now = time.monotonic()
        if spare:
            deadline = now + self._settings.join_timeout  # it has all the time in the world, until it is needed
        elif now >= deadline:
            self._try_to_leave("gave up waiting")
            raise RendezvousTimeoutError(
                f"Run {self._keys.run_id!r} had no new round after epoch {epoch} within the join_timeout of "
                f"{self._settings.join_timeout:g} s: fewer than {self._settings.min_nodes} nodes joined, or a member "
                "of the last round neither came back nor left."
            )
        self._heard, self._standing = text(wake_id), "candidate"
        until = min(deadline, now + completes_in / 1000) if completes_in >= 0 else deadline
        while (left := until - time.monotonic()) > 0:
            if self.pump(self._heard, left) != self._heard or self._standing != "candidate":
                break
        return time.monotonic() + self._settings.join_timeout if spare else deadline

    def _ask_to_join(self, port: int, timeout: float) -> Any:
        s = self._settings
        times = (s.last_call_timeout, s.replacement_timeout, s.lease, s.keep_alive_interval, s.ttl)
        args = [self.node, self._epoch_held, f"{self._host} {port}", s.topology, self._status("waiting")]
        args += [s.min_nodes, s.max_nodes, *(round(1000 * t) for t in times)]
        store = self._keys.store(self._epoch_held)
        keys = [*self._run_keys, store.data, store.waits, store.once]
        reply = self._run(scripts.JOIN, keys, args, timeout)
        self._beat_is_due_in(s.keep_alive_interval)
        return reply

    def _enter(self, epoch: int, rank: int, size: int, master: bytes, lost: int) -> Round:
        host, _, port = text(master).rpartition(" ")
        if not host or not port.isdigit():
            raise RendezvousStateError(
                f"The key {self._keys.run!r} in Redis at {self._connection.name} is corrupt: its field master is "
                f"{text(master)!r}, not a host and a port. Remove that key."
            )
        entered = Round(epoch, rank, size, host, int(port), lost, again=self._epoch_held > 0)
        with self._lock:
            self._round, self._epoch_held = entered, epoch
            self._broken, self._member_lost, self._fenced, self._waiting, self._joining = "", False, False, 0, False
            if self._last_break[0] == epoch:
                self._break(*self._last_break[1:])
        if self._keeper is None:
            args = (weakref.ref(self), self._stopped, self._heard, self._settings.keep_alive_interval)
            self._keeper = threading.Thread(target=_keep, args=args, daemon=True)
            self._keeper.name = f"redelastic-keepalive-{self.node}"
            self._keeper.start()
        return entered

    def _try_to_leave(self, reason: str) -> None:
        """Leave before an error is raised; if that fails too, the lease runs out."""
        with contextlib.suppress(RendezvousError):
            self.leave(reason)

    def _refuse_closed(self, by: bytes, spare: int) -> NoReturn:
        self._closed = text(by)
        self._try_to_leave("the run is closed")
        message = f"Run {self._keys.run_id!r} is closed (by {self._closed}); use another run id for a new run."
        raise RendezvousGracefulExitError(message) if spare else RendezvousClosedError(message)

    def leave(self, reason: str, *, finished: bool = False, timeout: float | None = None) -> None:
        """Leave the run for good; the identity ends with it.

        Args:
            reason: for the others.
            finished: a member that has finished closes the run (I5).
            timeout: as in :meth:`Connection.call`.
        """
        try:
            self._run(scripts.LEAVE, self._run_keys, [self.node, reason, int(finished)], timeout)
        finally:
            with self._lock:
                self._round, self._joining = None, False
            if not self._stopped.is_set():  # who is shut down stays the one that has left
                self._renew_identity()

    def close(self, timeout: float) -> None:
        """Close the run: no round is completed any more (I5)."""
        by = self._run(scripts.CLOSE, self._run_keys, [self.node, round(1000 * self._settings.ttl)], timeout)
        self._closed = text(by)

    def ask_whether_closed(self) -> bool:
        """Ask Redis whether the run is closed."""
        try:
            by = self._connection.call(lambda client: client.hget(self._keys.run, "closed"))
        except RendezvousStateError as e:
            require_keys_of_types(self._connection, self._keys.types, e)
        self._closed = text(by) if by else self._closed
        return bool(self._closed)

    def stop(self) -> None:
        """End the loop; does not tell anybody."""
        self._stopped.set()

    # -- the loop

    def pump(self, since: str, longest: float) -> str:
        """Beat if that is due, then block until something that matters has happened.

        Called by whoever waits for a round and by the keeper's thread, each with its own place in the stream.

        Args:
            since: id of the last wake-up that the caller has seen.
            longest: how long to block, in seconds.

        Returns:
            The id of the last wake-up; ``since`` if there was none.
        """
        try:
            early = min(COARSE, self._settings.keep_alive_interval / 2)
            if time.monotonic() >= self._next_beat - (0 if self._beat_is_urgent else early):
                self._beat()
            until_beat = self._next_beat - early - time.monotonic()
            if until_beat <= 0:  # urgent, and too soon for a blocking read
                self._stopped.wait(max(0.0, until_beat + early))
                return since
            woken = self._connection.read({self._wake_key: since}, min(longest, until_beat))
        except RendezvousConnectionError as e:
            if self._round is None and not isinstance(e, UnreachableError):
                raise  # who is in no round yet can be told that it is refused, and why
            self._remember_outage(e)
            self._stopped.wait(min(longest, random.uniform(0.5, 1) * RETRY_PAUSE))
            return since
        away_since, self._away_since = self._away_since, None
        if away_since is not None:
            away = time.monotonic() - away_since
            log.warning("Redis is back for node %s of run %r, after %.1f s.", self.node, self._keys.run_id, away)
        entries = woken.get(self._wake_key, [])
        self._take_in(entries)
        return entries[-1][0] if entries else since

    def _remember_outage(self, error: RendezvousConnectionError) -> None:
        now = time.monotonic()
        away_since = self._away_since or now
        if self._away_since is None:
            self._away_since, self._next_complaint = now, now
        if now >= self._next_complaint and not self._stopped.is_set():
            self._next_complaint = now + COMPLAINT_INTERVAL
            away = now - away_since
            log.warning(
                "Node %s keeps its place in run %r; Redis is away, for %.0f s by now: %s",
                *(self.node, self._keys.run_id, away, error),
            )

    def _take_in(self, entries: Entries) -> None:
        with self._lock:
            for _, change in entries:
                event, reason = change.get("event"), change.get("reason", "")
                if event == "closed":
                    self._closed = reason
                elif event == "broken":
                    epoch, waiting = _number(change.get("epoch")), _number(change.get("waiting"))
                    self._last_break = (epoch, reason or "nobody says why", waiting, change.get("lost") == "1")
                    if self._round and self._round.epoch == epoch:
                        self._break(*self._last_break[1:])

    def _break(self, reason: str, waiting: int, member_lost: bool) -> None:
        if not self._broken and self._round:
            log.warning("Round %s of run %r is broken: %s.", self._round.epoch, self._keys.run_id, reason)
        self._broken, self._waiting, self._member_lost = reason, waiting, self._member_lost or member_lost
        self._lock.notify_all()

    def _beat(self) -> None:
        s = self._settings
        asked_in, node = self._round, self.node
        self._beat_is_due_in(s.keep_alive_interval)  # also when it fails: the loop pauses, and must not beat twice
        store = self._keys.store(asked_in.epoch if asked_in else 0)
        keys = [*self._run_keys, store.data, store.waits, store.once]
        args = [node, round(1000 * s.lease), self._status("running" if asked_in and not self._joining else "waiting")]
        standing, epoch, broken, candidates, closed, expires_in = self._run(scripts.BEAT, keys, args, 0)
        with self._lock:
            self._closed = text(closed) or self._closed
            if node == self.node:
                self._standing = text(standing)
                if asked_in and self._round is asked_in and not self._joining:
                    self._judge(asked_in, epoch, text(broken), candidates)
        # Look again when the lease of a silent node has run out; the lease of a node that renews it lasts for longer.
        lapses_in = expires_in / 1000 + random.uniform(0.002, SPREAD)
        if expires_in >= 0 and lapses_in < s.keep_alive_interval:
            self._beat_is_due_in(lapses_in, urgent=True)

    def _judge(self, mine: Round, epoch: int, broken: str, candidates: int) -> None:
        if self._standing == "member" and epoch == mine.epoch:
            if broken:
                self._break(broken, candidates, member_lost=False)
        elif self._standing != "unknown" and not self._fenced:  # "unknown": the server lost its data, and judges nobody
            self._fenced = True
            self._break(f"{self.node}, which is this node, lost its lease", candidates, member_lost=True)

    def _beat_is_due_in(self, seconds: float, *, urgent: bool = False) -> None:
        self._next_beat, self._beat_is_urgent = time.monotonic() + seconds, urgent

    def _status(self, state: str) -> str:
        mine = self._round
        place = {"epoch": mine.epoch, "rank": mine.rank} if mine else {}
        return json.dumps({"host": self._host, "pid": os.getpid(), "state": state, **place})

    def _run(self, script: scripts.Script, keys: list[str], args: list[Any], timeout: float | None) -> Any:
        try:
            return script(self._connection, keys, args, timeout)
        except RendezvousStateError as e:
            types = {**self._keys.types, self._keys.status(self.node): "string"}
            require_keys_of_types(self._connection, types, e)


def _number(field: str | None) -> int:
    return int(field) if field and field.isascii() and field.isdecimal() else 0


def _keep(reference: weakref.ref[Membership], stopped: threading.Event, since: str, interval: float) -> None:
    """The keeper's thread: it lives until its membership is stopped or forgotten."""
    while not stopped.is_set():
        membership = reference()
        if membership is None:
            return
        try:
            since = membership.pump(since, interval)
        except Exception:  # without its keeper the node would be lost
            if not stopped.is_set():
                log.exception("The keep-alive of node %s failed; it goes on trying.", membership.node)
            stopped.wait(interval)
        del membership
