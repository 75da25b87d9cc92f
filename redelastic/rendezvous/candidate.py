"""A node that asks to be a member of the run's next round, and waits until that is complete."""

from __future__ import annotations

import logging
import math
import random
import re
import time
from typing import Final

from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousTimeoutError

from redelastic.monitoring.events import Left
from redelastic.redis.errors import CorruptStateError, UnavailableError, UnreachableError

from . import replies
from .keeper import RETRY_PAUSE, Keeper
from .node import DrainedError
from .view import Round, View

log = logging.getLogger(__name__)

NO_WAIT: Final = 0.001  # in seconds: the shortest time for which a read of the wake-ups may block
LONG_WAIT: Final = 10.0  # in seconds: after it the log says what the node waits for


class Candidate:
    """One attempt of a node to join the next round.

    Args:
        keeper: of the node.
        port: on which the node would serve the bootstrap store.
        deadline: on the monotonic clock, in seconds; extended while the node waits as a spare, or to be let in.
    """

    def __init__(self, keeper: Keeper, port: int, deadline: float) -> None:
        self._keeper, self._node, self._watch = keeper, keeper.node, keeper.node.watch
        self._settings = keeper.node.settings
        self._port, self._deadline = port, deadline
        self._started = time.monotonic()
        self._heard = "0-0"  # id of the last wake-up that the node knew of when it last asked
        self._said: set[str] = set()  # why it waits without a deadline, as far as the log says it
        self._complain_of_wait_at = self._started + LONG_WAIT

    def join(self) -> Round:
        """Join the next round, and block until it is complete.

        Raises:
            RendezvousClosedError, RendezvousGracefulExitError: the run is closed; the latter for a spare.
            DrainedError: this node was asked to drain.
            RendezvousTimeoutError: the round was not complete in time.
            UnavailableError: Redis could not be reached until the deadline, or it refuses the call.
            CorruptStateError: the run's keys in Redis are corrupt.
            RendezvousError: other nodes of the run have another ``min_nodes`` or ``max_nodes``.
        """
        node = self._node
        if node.view.joining:  # an error ended the last attempt, whose requests must not count for this one
            node.try_to_leave(Left(cause="anew"))
        elif node.view.fenced:
            self._renew_identity()
        self._watch.update(View.ask)
        while True:
            self._raise_if_stopped_or_draining()
            match reply := self.ask():
                case replies.Complete():
                    entered = self.round_from(reply)
                    if self._is_replicated(entered):
                        self.enter(entered)
                        return entered
                case replies.Waiting():
                    self._wait(reply)
                case replies.Closed():
                    self._watch.update(View.apply_closing, reply.why, stop=bool(reply.stop))
                    node.raise_closed(spare=bool(reply.spare))
                case replies.Mismatch():
                    self._wait_while_refused(reply)
                case replies.Left():
                    self._renew_identity()
                case _:  # Redis is away
                    node.stopped.wait(random.uniform(0.5, 1) * RETRY_PAUSE)

    def _raise_if_stopped_or_draining(self) -> None:
        node = self._node
        if node.stopped.is_set():
            raise RendezvousClosedError(f"Node {node.id} of run {node.run_id!r} was shut down; create a new one.")
        if drain := node.view.drain:
            drained = DrainedError(node.id, node.run_id, drain.reason)
            node.try_to_leave(Left(cause="drained", reason=drain.reason))
            raise drained

    def _renew_identity(self) -> None:
        """Become another node."""
        if self._settings.join_secret_file:  # a node without the secret is asked to drain before it is made to leave
            self._heard = self._keeper.pump(self._heard, NO_WAIT)
        self._node.renew_identity()

    def ask(self) -> replies.Join | None:
        """Ask once; None while Redis is away, for ``read_timeout`` or until the deadline."""
        view = self._node.view
        try:
            reply = self._node.ask_to_join(view, self._port)
        except UnavailableError as e:
            give_up_at = max(self._deadline, self._started + self._settings.read_timeout)
            if time.monotonic() >= give_up_at or not self._node.may_pass(e):
                raise
            self._watch.apply_outage(e)
            return None
        self._watch.apply_return()
        self._keeper.apply_join(answered=view.roll_call)
        return reply

    def hear(self, reply: replies.Waiting) -> str:
        """Become a candidate; returns the id of the last wake-up that it knows of."""
        self._heard = reply.last_wake_id
        self._watch.update(View.wait)
        self._keeper.answer(reply.roll_call)
        return self._heard

    def _wait(self, reply: replies.Waiting) -> None:
        """Block until another request to join may succeed."""
        node, s, now = self._node, self._settings, time.monotonic()
        is_patient = bool(reply.spare or reply.held)
        if is_patient:
            self._wait_patiently(reply)
        elif now >= self._deadline:
            node.try_to_leave(Left(cause="timeout"))
            raise RendezvousTimeoutError(
                f"Run {node.run_id!r} had no new round after epoch {reply.epoch} within the join_timeout of "
                f"{s.join_timeout:g} s: fewer than {s.min_nodes} nodes joined, or a member "
                "of the last round neither rejoined nor left. All nodes need the same --rdzv-id and the same Redis."
            )
        self.hear(reply)
        until = min(self._deadline, now + reply.wait_ms / 1000) if reply.wait_ms >= 0 else self._deadline
        while (left := until - time.monotonic()) > 0:
            before, self._heard = self._heard, self._keeper.pump(self._heard, left)
            if not is_patient and time.monotonic() >= self._complain_of_wait_at:
                self._complain_of_wait_at = math.inf
                log.warning(
                    "Node %s waits for a round of run %r, of %d to %d nodes; `redelastic status %s` lists the nodes.",
                    *(node.id, node.run_id, s.min_nodes, s.max_nodes, node.run_id),
                )
            given_up = node.must_leave() or node.stopped.is_set()
            if given_up or self._heard != before or node.view.standing != "candidate":
                break
        if is_patient:
            self._deadline = time.monotonic() + s.join_timeout

    def _wait_patiently(self, reply: replies.Waiting) -> None:
        """Put the deadline off: a spare waits until it is needed, a new node until the workers have saved."""
        node, s = self._node, self._settings
        self._deadline = time.monotonic() + s.join_timeout
        why = "spare" if reply.spare else "held"
        if why in self._said:
            return
        self._said.add(why)
        if reply.spare:
            log.warning(
                "Node %s is a spare: all %d places of run %r are taken, so it trains only once a member is gone. "
                "If this was meant to be a run of its own, give it another run id.",
                *(node.id, s.max_nodes, node.run_id),
            )
        else:
            log.info("Node %s waits to be let into run %r until its workers have saved.", node.id, node.run_id)

    def _wait_while_refused(self, run: replies.Mismatch) -> None:
        """Wait a while if the run has other sizes: its nodes may be dead, and their leases about to run out.

        This node asks as often as they would beat: a longer silence would look like an outage, and renew the leases.
        """
        node, s = self._node, self._settings
        left = min(self._started + max(s.lease, run.lease_ms / 1000) + 1, self._deadline) - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"Node {node.id} wants {s.min_nodes} to {s.max_nodes} nodes, but run "
                f"{node.run_id!r} has {run.min_nodes} to {run.max_nodes}; start all nodes with the same --nnodes."
            )
        node.stopped.wait(min(s.keep_alive_interval, run.interval_ms / 1000 or math.inf, left))

    def _is_replicated(self, completed: Round) -> bool:
        """Whether ``min_replicas`` replicas hold a round; waits a heartbeat interval for them.

        Raises:
            RendezvousTimeoutError: too few do, and the deadline has passed.
        """
        node, s = self._node, self._settings
        if not s.min_replicas:
            return True
        try:
            replicas = node.replicas_with(completed)
        except UnreachableError as e:
            self._watch.apply_outage(e)
            return False
        if replicas < s.min_replicas and time.monotonic() >= self._deadline:
            node.try_to_leave(Left(cause="replicas"))
            raise RendezvousTimeoutError(
                f"Round {completed.epoch} of run {node.run_id!r} is complete, but only {replicas} of "
                f"min_replicas={s.min_replicas} replicas of Redis at {node.connection.name} "
                f"confirmed it within the join_timeout of {s.join_timeout:g} s. Check why they lag, or lower "
                "min_replicas."
            )
        return replicas >= s.min_replicas

    def round_from(self, reply: replies.Complete) -> Round:
        """The round that Redis says is complete.

        Raises:
            CorruptStateError: the run's record names no host and port.
        """
        epoch, rank, size, master, completed_at, lost, incarnation = reply
        host, _, port = master.rpartition(" ")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
            raise CorruptStateError(
                f"The key {self._node.keys[0]!r} in Redis at {self._node.connection.name} is corrupt: its field master "
                f"is {master!r}, not a host and a port. Remove that key."
            )
        again = self._node.view.epoch_held > 0
        return Round(epoch, rank, size, host, int(port), completed_at, lost, again, incarnation)

    def enter(self, entered: Round) -> None:
        """Enter a round, and have the keeper keep the node in it."""
        self._watch.update(View.enter, entered)
        self._keeper.start(self._heard)
