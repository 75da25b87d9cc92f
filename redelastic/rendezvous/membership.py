"""A node's membership of a run: how it joins and leaves, and the loop that keeps its lease and its view fresh."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final, Literal, NoReturn

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from redelastic.redis import scripts
from redelastic.redis.connection import (
    Connection,
    RefusesWritesError,
    UnreachableError,
    require_keys_of_types,
    text,
    words,
)
from redelastic.redis.keys import RunKeys, check_key_part

from .settings import Settings
from .view import Round, View

log = logging.getLogger(__name__)

LONG_WAIT: Final = 10.0  # for a round, after which it is said what is waited for, in seconds
RETRY_PAUSE: Final = 0.2  # between attempts of the loop while Redis is away, in seconds
COARSE: Final = 0.11  # Redis ends a blocking read up to 100 ms late: it looks at its clients ten times a second
SPREAD: Final = 0.05  # nodes that wait for the same lease to run out look at it within this time, in seconds
LOOKERS: Final = 16  # about so many of a group do; its others are woken by them
NO_ROUND: Final = (0, 0, 0, "", 0)  # what a node tells of its round while it holds none

RunThen = Literal["goes on", "closes", "stops"]


class RunStoppedError(RendezvousClosedError):
    """The run was stopped: no round follows, and workers that still run have to end."""


class DrainedError(RendezvousError):
    """This node was asked to drain, and does not take part any more.

    Attributes:
        reason: by whom or what.
    """

    def __init__(self, node: str, run_id: str, reason: str) -> None:
        super().__init__(f"Node {node} of run {run_id!r} was drained: {reason}.")
        self.reason = reason


class Membership(View):
    """One node of one run: how it joins, renews its lease, and leaves.

    The node's identity ends when it leaves or is fenced: it comes back as a new node, so that nothing of the old one
    that is still under way can count for it (I4).

    Args:
        connection: to Redis.
        keys: of the run.
        settings: of the run.
        host: address of this node for its peers.
    """

    def __init__(self, connection: Connection, keys: RunKeys, settings: Settings, host: str) -> None:
        super().__init__(keys.run_id)
        self._connection = connection
        self._keys = keys
        self._settings = settings
        self._host = check_key_part("address of this node", host)
        self._wake_key = keys.wake.encode()
        self._heard = "0-0"  # id of the last wake-up that this node knew of when it last asked to join
        self.describe: Callable[[dict[str, Any]], str] = json.dumps  # writes the status that heartbeats carry
        self._next_beat, self._beat_is_urgent = math.inf, False
        self._keeper: threading.Thread | None = None
        self._stopped = threading.Event()
        self._epoch_held = 0  # that of the last round this node was in
        self._complain_of_wait_at = math.inf
        self._renew_identity()

    def _renew_identity(self) -> None:
        with self._lock:
            self._round = None  # that was another node's
        self.node = f"{self._settings.node_name}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._run_keys = [*self._keys.types, self._keys.status(self.node)]

    def status(self) -> dict[str, Any]:
        """What this node says of itself, for people and tools."""
        mine, name = self._round, self._settings.node_name
        status: dict[str, Any] = {"name": name, "host": self._host, "pid": os.getpid()}
        status["state"] = "running" if mine and not self._joining else "waiting"
        return status | {"epoch": mine.epoch, "rank": mine.rank, "size": mine.size} if mine else status

    # -- transitions

    def join(self, port: int, deadline: float) -> Round:
        """Join the next round, and block until it is complete.

        Args:
            port: on which this node would serve the bootstrap store.
            deadline: on the monotonic clock, in seconds; put off while the node waits as a spare.

        Raises:
            RendezvousClosedError, RendezvousGracefulExitError: the run is closed; the latter for a spare.
            DrainedError: this node was asked to drain.
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
        self._complain_of_wait_at = time.monotonic() + LONG_WAIT
        # Leases of nodes that died with their whole job may be alive for so long; until then another size is refused.
        others_may_be_dead_until = time.monotonic() + self._settings.lease + 1
        give_up_at = time.monotonic() + self._settings.read_timeout  # on a Redis that is away, at the earliest
        while True:
            self._require_that_it_may_join()
            outcome, *told = self._ask_to_join(port, max(deadline, give_up_at))
            match text(outcome):
                case "complete":
                    entered = self._round_from(*told)
                    if self._is_replicated(entered, deadline):
                        return self._enter(entered)
                case "closed":
                    self._refuse_closed(*told)
                case "away":
                    self._stopped.wait(random.uniform(0.5, 1) * RETRY_PAUSE)
                case "left":
                    self._renew_identity()
                case "mismatch":
                    self._wait_while_refused(*told, until=min(others_may_be_dead_until, deadline))
                case _:
                    deadline = self._wait_as_candidate(*told, deadline=deadline)

    def _require_that_it_may_join(self) -> None:
        if self._stopped.is_set():
            raise RendezvousClosedError(f"Node {self.node} of run {self.run_id!r} was shut down; make a new one.")
        if self._drain:
            node, reason = self.node, self._drain.reason
            self._try_to_leave(f"drained: {reason}")
            raise DrainedError(node, self.run_id, reason)

    def _wait_while_refused(self, min_nodes: int, max_nodes: int, *, until: float) -> None:
        left = until - time.monotonic()
        if left <= 0:
            raise RendezvousError(
                f"Node {self.node} wants {self._settings.min_nodes} to {self._settings.max_nodes} nodes, but run "
                f"{self.run_id!r} has {min_nodes} to {max_nodes}; start all with the same --nnodes."
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
                f"Run {self.run_id!r} had no new round after epoch {epoch} within the join_timeout of "
                f"{self._settings.join_timeout:g} s: fewer than {self._settings.min_nodes} nodes joined, or a member "
                "of the last round neither came back nor left. All nodes need the same --rdzv-id and the same Redis."
            )
        self._heard, self._standing = text(wake_id), "candidate"
        until = min(deadline, now + completes_in / 1000) if completes_in >= 0 else deadline
        while (left := until - time.monotonic()) > 0:
            before, self._heard = self._heard, self.pump(self._heard, left)
            if not spare and time.monotonic() >= self._complain_of_wait_at:
                self._complain_of_wait_at = math.inf
                log.warning(
                    "Node %s waits for a round of run %r, of %d to %d nodes; `redelastic status %s` says who is there.",
                    *(self.node, self.run_id, self._settings.min_nodes, self._settings.max_nodes, self.run_id),
                )
            if self._heard != before or self._standing != "candidate" or self._drain:
                break
        return time.monotonic() + self._settings.join_timeout if spare else deadline

    def _ask_to_join(self, port: int, give_up_at: float) -> Any:
        store = self._keys.store(self._epoch_held)
        keys = [*self._run_keys, store.data, store.waits, store.once]
        args = [*self._known(), self._epoch_held, f"{self._host} {port}", self._settings.topology]
        try:
            reply = self._run(scripts.JOIN, keys, args, 0)
        except RendezvousConnectionError as e:
            if time.monotonic() >= give_up_at or not self._may_pass(e):
                raise
            self._take_in_outage(e)
            return ["away"]
        self._take_in_return()
        # A beat that is due before stays due: it may be the one that looks after the lease of another silent node.
        if self._next_beat > time.monotonic() + self._settings.keep_alive_interval:
            self._beat_is_due_in(self._settings.keep_alive_interval)
        return reply

    def _is_replicated(self, completed: Round, deadline: float) -> bool:
        """Whether as many replicas as wanted hold a round; waits for a while.

        Raises:
            RendezvousTimeoutError: they do not, and the deadline has passed.
        """
        s = self._settings
        if not s.min_replicas:
            return True
        try:
            replicas = self._connection.replicas_with(
                self._keys.run,
                "completed_at",
                completed.completed_at,
                wanted=s.min_replicas,
                block=s.keep_alive_interval,
                ttl=s.ttl,
            )
        except UnreachableError as e:
            self._take_in_outage(e)
            return False
        if replicas < s.min_replicas and time.monotonic() >= deadline:
            self._try_to_leave("gave up waiting for replicas")
            raise RendezvousTimeoutError(
                f"Round {completed.epoch} of run {self.run_id!r} is complete, but only {replicas} of "
                f"min_replicas={s.min_replicas} replicas of Redis at {self._connection.name} confirmed it within the "
                f"join_timeout of {s.join_timeout:g} s. See why they do not follow, or lower min_replicas."
            )
        return replicas >= s.min_replicas

    def _known(self) -> list[Any]:
        """What a server that has forgotten the run has to be told: the arguments of ``lua/restore.lua``."""
        s, mine = self._settings, self._round
        times = (s.last_call_timeout, s.replacement_timeout, s.lease, s.keep_alive_interval, s.ttl)
        settings = [s.min_nodes, s.max_nodes, *(round(1000 * t) for t in times)]
        held = [mine.epoch, mine.rank, mine.size, f"{mine.host} {mine.port}", mine.completed_at] if mine else NO_ROUND
        return [self.node, self.describe(self.status()), *settings, *held, *self._record_of_closing]

    def _round_from(self, *told: Any) -> Round:
        epoch, rank, size, master, completed_at, lost = told
        host, _, port = text(master).rpartition(" ")
        if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 2**16:
            raise RendezvousStateError(
                f"The key {self._keys.run!r} in Redis at {self._connection.name} is corrupt: its field master is "
                f"{text(master)!r}, not a host and a port. Remove that key."
            )
        return Round(epoch, rank, size, host, int(port), completed_at, lost, again=self._epoch_held > 0)

    def _enter(self, entered: Round) -> Round:
        self._epoch_held = entered.epoch
        self._take_in_round(entered)
        if self._keeper is None:
            args = (weakref.ref(self), self._stopped, self._heard, self._settings.keep_alive_interval)
            self._keeper = threading.Thread(target=_keep, args=args, daemon=True)
            self._keeper.name = f"redelastic-keepalive-{self.node}"
            self._keeper.start()
        return entered

    def _try_to_leave(self, reason: str) -> None:
        """Leave before an error is raised; if that fails for as long as a lease, it has run out."""
        with contextlib.suppress(RendezvousError):
            self.leave(reason, timeout=self._settings.lease)

    def _refuse_closed(self, why: bytes | str, spare: int, stop: int) -> NoReturn:
        self._closed, self._stop = words(why), bool(stop)
        self._try_to_leave("the run is closed")
        if stop:
            raise RunStoppedError(f"Run {self.run_id!r} was stopped: {self._closed}.")
        message = f"Run {self.run_id!r} is closed ({self._closed}); use another run id for a new run."
        raise RendezvousGracefulExitError(message) if spare else RendezvousClosedError(message)

    def leave(self, reason: str, *, run_then: RunThen = "goes on", timeout: float | None = None) -> None:
        """Leave the run for good; the identity ends with it.

        Args:
            reason: for the others.
            run_then: what becomes of the run, if this node is a member of a round that stands (I5).
            timeout: as in :meth:`Connection.call`.
        """
        try:
            self._run(scripts.LEAVE, self._run_keys, [*self._known(), reason, run_then], timeout)
        finally:
            with self._lock:
                self._round, self._joining = None, False
            if not self._stopped.is_set():  # who is shut down stays the one that has left
                self._renew_identity()

    def close(self, timeout: float) -> None:
        """Close the run: no round is completed any more (I5)."""
        args = [f"by {self.node}", round(1000 * self._settings.ttl), 0]
        self._closed = words(self._run(scripts.CLOSE, self._run_keys, args, timeout))

    def drain(self, reason: str, timeout: float) -> None:
        """Have this node drain, as if somebody had asked it to; it does so even if Redis cannot be told.

        Args:
            reason: for the others.
            timeout: how long workers have to save, in seconds.
        """
        self.begin_drain(reason, timeout)
        with self._lock:
            self._tell()
        self._run(scripts.DRAIN, self._run_keys, [self.node, reason, round(1000 * timeout)], None)

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait outside of the run while a condition holds; it is looked at again when the run's nodes are woken.

        Raises:
            DrainedError: this node was asked to drain meanwhile.
            RendezvousClosedError: the run was closed.
            RendezvousConnectionError: Redis could not be reached.
        """
        while condition():
            if drain := self._drain:
                raise DrainedError(self.node, self.run_id, drain.reason)
            if self.ask_whether_closed():
                self._refuse_closed(self._closed, 0, self._stop)
            s = self._settings
            self._connection.read({self._wake_key: "$"}, s.keep_alive_interval, s.read_timeout)

    def charge(
        self, failed_at: float, step: int, reason: str, limits: tuple[int, int, int], *, final: bool
    ) -> tuple[int, int, str]:
        """Count a failure of this node's workers in its round.

        Args:
            failed_at: when the first of them failed, on the monotonic clock in seconds.
            step: the last one that they reported, or -1.
            reason: for people.
            limits: restarts of the job; of those in a row, how many may bring no progress; rounds in a row in which
                a worker of this host may fail first. -1 is no limit.
            final: whether the run is stopped if nothing is left of a limit; else that is only told.

        Returns:
            Restarts of the job; rounds in a row in which this host failed first; why the run has to be stopped, or "".
        """
        who = (self.node, self._settings.node_name, self._epoch_held)

        def args() -> list[Any]:  # another host may have failed while this one could not reach Redis
            return [*who, round(1000 * (time.monotonic() - failed_at)), step, reason, *limits, int(final)]

        restarts, failures, verdict = self._run(scripts.CHARGE, self._run_keys, args, None)
        return restarts, failures, words(verdict)

    def ask_whether_closed(self) -> bool:
        """Ask Redis whether the run is closed."""
        try:
            by, stop = self._connection.call(lambda client: client.hmget(self._keys.run, "closed", "stop"))
        except RendezvousStateError as e:
            require_keys_of_types(self._connection, self._keys.types, e)
        self._closed, self._stop = words(by) if by else self._closed, bool(stop) or self._stop
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
                self._take_in_return()  # not after a mere read: it may be writes that Redis refuses
            until_beat = self._next_beat - early - time.monotonic()
            if until_beat <= 0:  # urgent, and too soon for a blocking read
                self._stopped.wait(max(0.0, until_beat + early))
                return since
            woken = self._connection.read({self._wake_key: since}, min(longest, until_beat))
        except RendezvousConnectionError as e:
            if self._round is None and not self._may_pass(e):
                raise  # who is in no round can be told that it is refused, and why
            if not self._stopped.is_set():
                self._take_in_outage(e)
            self._stopped.wait(min(longest, random.uniform(0.5, 1) * RETRY_PAUSE))
            return since
        entries = woken.get(self._wake_key, [])
        self._take_in_wake_ups(entries)
        return entries[-1][0] if entries else since

    def _may_pass(self, error: RendezvousConnectionError) -> bool:
        if isinstance(error, RefusesWritesError):
            return self._connection.served
        return isinstance(error, UnreachableError)

    def _beat(self) -> None:
        s = self._settings
        asked_as, asked_in = self.node, self._round
        self._beat_is_due_in(s.keep_alive_interval)  # also when it fails: the loop pauses, and must not beat twice
        store = self._keys.store(asked_in.epoch if asked_in else 0)
        keys = [*self._run_keys, store.data, store.waits, store.once]
        told = self._run(scripts.BEAT, keys, self._known(), 0)
        self._take_in_beat(asked_as, asked_in, told)
        if told[5] >= 0:
            self._look_after_lease_that_ends_in(told[5] / 1000, asked_in.size if asked_in else 1)

    def _look_after_lease_that_ends_in(self, seconds: float, nodes: int) -> None:
        """Beat when the lease of a silent node has run out; the lease of a node that renews it lasts for longer."""
        looks = random.random() < LOOKERS / nodes
        # Who does not look listens meanwhile, and beats if nothing was heard.
        due_in = seconds + random.uniform(0.002, SPREAD) + (0 if looks else SPREAD + COARSE)
        if due_in < self._settings.keep_alive_interval:
            self._beat_is_due_in(due_in, urgent=looks)

    def _beat_is_due_in(self, seconds: float, *, urgent: bool = False) -> None:
        self._next_beat, self._beat_is_urgent = time.monotonic() + seconds, urgent

    def _run(
        self,
        script: scripts.Script,
        keys: list[str],
        args: list[Any] | Callable[[], list[Any]],
        timeout: float | None,
    ) -> Any:
        try:
            return script(self._connection, keys, args, timeout)
        except RendezvousStateError as e:
            types = {**self._keys.types, self._keys.status(self.node): "string"}
            require_keys_of_types(self._connection, types, e)


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
