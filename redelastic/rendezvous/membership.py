"""A node's membership of a run: how it joins, leaves, drains and ends it."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import re
import time
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousTimeoutError,
)

from redelastic.monitoring.events import Failed, Left, decode_cause
from redelastic.monitoring.sentences import cause
from redelastic.redis import scripts
from redelastic.redis.connection import Connection, require_keys_of_types, sanitize
from redelastic.redis.errors import CorruptStateError, RedelasticError, UnavailableError, UnreachableError
from redelastic.redis.keys import RunKeys

from . import replies
from .heartbeat import HEARD, RETRY_PAUSE, Heartbeat
from .settings import Settings
from .view import Round, Save

log = logging.getLogger(__name__)

LONG_WAIT: Final = 10.0  # in seconds: after it the log says what the node waits for

RunThen = Literal["goes on", "closes", "stops"]


class RunStoppedError(RendezvousClosedError):
    """The run was stopped: no round follows, and running workers have to end."""


class DrainedError(RendezvousError):
    """This node was asked to drain, and no longer takes part.

    Attributes:
        reason: who or what asked.
    """

    def __init__(self, node: str, run_id: str, reason: str) -> None:
        super().__init__(f"Node {node} of run {run_id!r} was drained: {reason}.")
        self.reason = reason


class Membership:
    """One node of one run: how it joins, renews its lease, and leaves.

    The node's identity ends when it leaves or is fenced: it comes back as a new node, so that no request of the old one
    that is still in flight can count for it (I4).

    Args:
        connection: to Redis.
        keys: of the run.
        settings: of the run.
        host: address of this node for its peers.

    Attributes:
        view: this node's view of the run.
        heartbeat: keeps the node in the run.
    """

    def __init__(self, connection: Connection, keys: RunKeys, settings: Settings, host: str) -> None:
        self.heartbeat = Heartbeat(connection, keys, settings, host)
        self.view = self.heartbeat.view
        self.run_id = keys.run_id
        self._keys = keys
        self._settings = settings
        self._heard = "0-0"  # id of the last wake-up that this node knew of when it last asked to join
        self._epoch_held = 0  # epoch of the last round this node was in
        self._is_spare = self._is_held = False  # whether it has logged that since then
        self._complain_of_wait_at = math.inf

    @property
    def node(self) -> str:
        """Id of this node; it changes when the node has left or was fenced."""
        return self.view.node

    def join(self, port: int, deadline: float) -> Round:
        """Join the next round, and block until it is complete.

        Args:
            port: on which this node would serve the bootstrap store.
            deadline: on the monotonic clock, in seconds; extended while the node waits as a spare.

        Raises:
            RendezvousClosedError, RendezvousGracefulExitError: the run is closed; the latter for a spare.
            DrainedError: this node was asked to drain.
            RendezvousTimeoutError: the round was not complete in time.
            UnavailableError: Redis could not be reached until the deadline, or it refuses the call.
            CorruptStateError: the run's keys in Redis are corrupt.
            RendezvousError: other nodes of the run have another ``min_nodes`` or ``max_nodes``.
        """
        if self.view.joining:  # an error ended the last attempt, whose requests must not count for this one
            self._try_to_leave(Left(cause="anew"))
        elif self.view.fenced:
            self.heartbeat.renew_identity()
        self.view.joining = True
        self._complain_of_wait_at = time.monotonic() + LONG_WAIT
        started = time.monotonic()
        give_up_at = time.monotonic() + self._settings.read_timeout  # at the earliest, while Redis is away
        while True:
            self._raise_if_stopped_or_draining()
            match reply := self._ask_to_join(port, max(deadline, give_up_at)):
                case replies.Complete():
                    entered = self._round_from(reply)
                    if self._is_replicated(entered, deadline):
                        return self._enter(entered)
                case replies.Waiting():
                    deadline = self._wait_as_candidate(reply, deadline)
                case replies.Closed():
                    self._raise_closed(reply.why, reply.stop, spare=reply.spare)
                case replies.Mismatch():
                    self._wait_while_refused(reply, started, deadline)
                case replies.Left():
                    self.heartbeat.renew_identity()
                case _:  # Redis is away
                    self.heartbeat.stopped.wait(random.uniform(0.5, 1) * RETRY_PAUSE)

    def _raise_if_stopped_or_draining(self) -> None:
        if self.heartbeat.stopped.is_set():
            raise RendezvousClosedError(f"Node {self.node} of run {self.run_id!r} was shut down; create a new one.")
        if drain := self.view.drain:
            node, reason = self.node, drain.reason
            self._try_to_leave(Left(cause="drained", reason=reason))
            raise DrainedError(node, self.run_id, reason)

    def _wait_while_refused(self, run: replies.Mismatch, started: float, deadline: float) -> None:
        """Wait a while if the run has other sizes: its nodes may be dead, and their leases about to run out.

        This node asks as often as they would beat: a longer silence would look like an outage, and renew the leases.
        """
        s = self._settings
        left = min(started + max(s.lease, run.lease_ms / 1000) + 1, deadline) - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"Node {self.node} wants {self._settings.min_nodes} to {self._settings.max_nodes} nodes, but run "
                f"{self.run_id!r} has {run.min_nodes} to {run.max_nodes}; start all nodes with the same --nnodes."
            )
        self.heartbeat.stopped.wait(min(s.keep_alive_interval, run.interval_ms / 1000 or math.inf, left))

    def _wait_as_candidate(self, reply: replies.Waiting, deadline: float) -> float:
        """Block until another request to join may succeed; returns the time until which this node keeps asking."""
        now = time.monotonic()
        if reply.spare:
            if not self._is_spare:
                self._is_spare = True
                log.warning(
                    "Node %s is a spare: all %d places of run %r are taken, so it trains only once a member is gone. "
                    "If this was meant to be a run of its own, give it another run id.",
                    *(self.node, self._settings.max_nodes, self.run_id),
                )
            deadline = now + self._settings.join_timeout  # it can wait forever, until it is needed
        elif reply.held:
            if not self._is_held:
                self._is_held = True
                log.info("Node %s waits to be let into run %r until its workers have saved.", self.node, self.run_id)
            deadline = now + self._settings.join_timeout
        elif now >= deadline:
            self._try_to_leave(Left(cause="timeout"))
            raise RendezvousTimeoutError(
                f"Run {self.run_id!r} had no new round after epoch {reply.epoch} within the join_timeout of "
                f"{self._settings.join_timeout:g} s: fewer than {self._settings.min_nodes} nodes joined, or a member "
                "of the last round neither rejoined nor left. All nodes need the same --rdzv-id and the same Redis."
            )
        self._heard, self.view.standing = reply.last_wake_id, "candidate"
        self.heartbeat.answer(reply.roll_call)
        until = min(deadline, now + reply.wait_ms / 1000) if reply.wait_ms >= 0 else deadline
        while (left := until - time.monotonic()) > 0:
            before, self._heard = self._heard, self.heartbeat.pump(self._heard, left)
            if not (reply.spare or reply.held) and time.monotonic() >= self._complain_of_wait_at:
                self._complain_of_wait_at = math.inf
                log.warning(
                    "Node %s waits for a round of run %r, of %d to %d nodes; `redelastic status %s` lists the nodes.",
                    *(self.node, self.run_id, self._settings.min_nodes, self._settings.max_nodes, self.run_id),
                )
            to_leave = self.view.drain or self.heartbeat.stopped.is_set()
            if to_leave or self._heard != before or self.view.standing != "candidate":
                break
        return time.monotonic() + self._settings.join_timeout if reply.spare or reply.held else deadline

    def _ask_to_join(self, port: int, give_up_at: float) -> replies.Join | None:
        """Send one request to join; None while Redis is away, until ``give_up_at``."""
        keys, known = self.heartbeat.keys_with_store(self._epoch_held), self.heartbeat.known()
        s = self._settings
        admission = -1 if s.admit_timeout == math.inf else round(1000 * s.admit_timeout), round(1000 * s.admit_interval)
        args = [*known, self._epoch_held, f"{self.heartbeat.host} {port}", s.topology, *admission]
        try:
            reply = self.heartbeat.call(scripts.JOIN, keys, args, 0)
        except UnavailableError as e:
            if time.monotonic() >= give_up_at or not self.heartbeat.may_pass(e):
                raise
            self.view.apply_outage(e)
            return None
        self.view.apply_return()
        self.heartbeat.has_been_renewed(answered=known[HEARD])
        return replies.decode_join(reply)

    def _is_replicated(self, completed: Round, deadline: float) -> bool:
        """Whether ``min_replicas`` replicas hold a round; waits a heartbeat interval for them.

        Raises:
            RendezvousTimeoutError: too few do, and the deadline has passed.
        """
        s = self._settings
        if not s.min_replicas:
            return True
        try:
            replicas = self.heartbeat.connection.replicas_with(
                self._keys.run,
                "completed_at",
                completed.completed_at,
                wanted=s.min_replicas,
                block=s.keep_alive_interval,
                ttl=s.ttl,
            )
        except UnreachableError as e:
            self.view.apply_outage(e)
            return False
        if replicas < s.min_replicas and time.monotonic() >= deadline:
            self._try_to_leave(Left(cause="replicas"))
            raise RendezvousTimeoutError(
                f"Round {completed.epoch} of run {self.run_id!r} is complete, but only {replicas} of "
                f"min_replicas={s.min_replicas} replicas of Redis at {self.heartbeat.connection.name} "
                f"confirmed it within the join_timeout of {s.join_timeout:g} s. Check why they lag, or lower "
                "min_replicas."
            )
        return replicas >= s.min_replicas

    def _round_from(self, reply: replies.Complete) -> Round:
        epoch, rank, size, master, completed_at, lost, incarnation = reply
        host, _, port = master.rpartition(" ")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
            raise CorruptStateError(
                f"The key {self._keys.run!r} in Redis at {self.heartbeat.connection.name} is corrupt: its field master "
                f"is {master!r}, not a host and a port. Remove that key."
            )
        again = self._epoch_held > 0
        return Round(epoch, rank, size, host, int(port), completed_at, lost, again, incarnation)

    def _enter(self, entered: Round) -> Round:
        self._epoch_held, self._is_spare, self._is_held = entered.epoch, False, False
        self.heartbeat.incarnation = entered.incarnation
        self.view.apply_round(entered)
        self.heartbeat.start(self._heard)
        return entered

    def _try_to_leave(self, why: Left) -> None:
        """Leave before an error is raised; if Redis is away, try until the lease has run out."""
        with contextlib.suppress(RedelasticError):
            self.leave(why, timeout=self._settings.lease)

    def _raise_closed(self, why: bytes | str, stop: int, *, spare: int) -> NoReturn:
        self.view.apply_closing(why, stop=bool(stop))
        self._try_to_leave(Left(cause="closed"))
        if stop:
            raise RunStoppedError(f"Run {self.run_id!r} was stopped: {self.view.closed}.")
        message = f"Run {self.run_id!r} is closed ({self.view.closed}); use a new run id."
        if spare and not self._epoch_held:
            log.warning(
                "Node %s has trained nothing: it was a spare until the run ended (%s).", self.node, self.view.closed
            )
        raise RendezvousGracefulExitError(message) if spare else RendezvousClosedError(message)

    def leave(self, why: Left, *, run_then: RunThen = "goes on", timeout: float | None = None) -> None:
        """Leave the run for good; the identity ends with it.

        Args:
            why: the reason, for people and the other nodes.
            run_then: what becomes of the run, if this node is a member of an unbroken round (I5).
            timeout: as in :meth:`Connection.call`.
        """
        if self.view.nodes_waiting:  # a server that has forgotten the run would take the round for an unbroken one
            run_then = "goes on"
        try:
            self.heartbeat.call(
                scripts.LEAVE, self.heartbeat.keys, [*self.heartbeat.known(), run_then, *why.pairs()], timeout
            )
        finally:
            self.view.forget_round()
            if not self.heartbeat.stopped.is_set():  # a node that is shut down keeps the identity that left
                self.heartbeat.renew_identity()

    def close(self, timeout: float) -> None:
        """Close the run: no further round completes (I5)."""
        args = [round(1000 * self._settings.ttl), 0, self.node, "cause", "asked"]
        self.view.apply_closing(self.heartbeat.call(scripts.CLOSE, self.heartbeat.keys, args, timeout))

    def drain(self, reason: str, timeout: float) -> None:
        """Drain this node, as on a request to it; it drains even if Redis cannot be reached.

        Args:
            reason: for people and the other nodes.
            timeout: how long workers have to save, in seconds.
        """
        self.view.begin_drain(reason, timeout)
        self.view.notify()
        self.heartbeat.call(scripts.DRAIN, self.heartbeat.keys, [self.node, reason, round(1000 * timeout)], None)

    def admit(self, save: Save) -> None:
        """Let the nodes into the round that wait until all its workers have saved: they have."""
        args = [self._epoch_held, "{}-{}".format(*save.place)]
        self.heartbeat.call(scripts.ADMIT, self.heartbeat.keys, args, None)

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait outside the run while a condition holds; it is checked at each wake-up of the run.

        Raises:
            DrainedError: this node was asked to drain meanwhile.
            RendezvousClosedError: the run was closed.
            UnavailableError: Redis could not be reached.
        """
        while condition():
            if drain := self.view.drain:
                raise DrainedError(self.node, self.run_id, drain.reason)
            if self.ask_whether_closed():
                self._raise_closed(*self.view.record_of_closing, spare=0)
            s = self._settings
            self.heartbeat.connection.read({self._keys.wake.encode(): "$"}, s.keep_alive_interval, s.read_timeout)

    def charge(
        self, failed_at: float, step: int, failure: Failed, limits: tuple[int, int, int], *, final: bool
    ) -> replies.Charge:
        """Count a failure of this node's workers in its round.

        Args:
            failed_at: when the first of them failed, on the monotonic clock in seconds.
            step: the last step that they reported, or -1.
            failure: which worker failed first, and how.
            limits: restarts of the job; restarts in a row without progress; rounds in a row in which a worker of this
                host may fail first. -1 is no limit.
            final: whether to stop the run if a limit is used up; else the reply only says so.

        Returns:
            Restarts of the job; rounds in a row in which this host failed first; why the run has to be stopped, or "".
        """
        caller = (self.node, self._settings.node_name, self._epoch_held)

        def args() -> list[Any]:  # another host may have failed while this one could not reach Redis
            age_ms = round(1000 * max(0.0, time.monotonic() - failed_at))
            return [*caller, age_ms, step, *limits, int(final), *failure.pairs()]

        reply = replies.Charge(*replies.decoded(self.heartbeat.call(scripts.CHARGE, self.heartbeat.keys, args, None)))
        return reply._replace(verdict=sanitize(cause(decode_cause(reply.verdict))))

    def call_roll(self, failed_at: float) -> None:
        """Call the roll, since workers of this node failed and a lost peer may be the cause; never fails.

        Nodes that do not answer within ``roll_call_timeout`` are out; the outcome ends :meth:`View.wait_for_loss`.
        A node that has just found Redis again calls no roll: other nodes may still be looking for Redis.

        Args:
            failed_at: when the first of its workers failed, on the monotonic clock in seconds.
        """
        s, held = self._settings, self.view.round
        lost = self.view.member_lost or not held or held.size == 1
        if lost or not s.roll_call_timeout or not self.view.has_reached_redis_for(s.lease):
            return
        caller = (self.node, self._epoch_held)

        def args() -> list[Any]:
            return [*caller, round(1000 * max(0.0, time.monotonic() - failed_at)), round(1000 * s.roll_call_timeout)]

        try:  # an idle connection may be dead: that is no outage; after an outage the leases decide
            reply = self.heartbeat.call(scripts.ROLL_CALL, self.heartbeat.keys, args, min(1.0, s.roll_call_timeout))
        except RedelasticError as e:
            log.warning("No roll call of run %r: %s", self.run_id, e)
            return
        if reply:
            self.view.apply_roll_call(replies.RollCall(*reply))

    def ask_whether_closed(self) -> bool:
        """Ask Redis whether the run is closed."""
        try:
            why, stop = self.heartbeat.connection.call(lambda client: client.hmget(self._keys.run, "closed", "stop"))
        except CorruptStateError as e:
            require_keys_of_types(self.heartbeat.connection, self._keys.types, e)
        if why:
            self.view.apply_closing(why, stop=bool(stop))
        return bool(self.view.closed)

    def stop(self) -> None:
        """End the keeper's loop; the node stays in the run until its lease runs out."""
        self.heartbeat.stopped.set()
