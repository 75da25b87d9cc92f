"""A node of a run: its identity, what it tells Redis about itself, and the requests that it makes."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, Literal, NamedTuple, NoReturn

from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
)

from redelastic.monitoring.events import Event, Failed, Left, Regrouped, Stopped, is_fault
from redelastic.monitoring.sentences import cause
from redelastic.redis import scripts
from redelastic.redis.connection import Connection, require_keys_of_types, sanitize
from redelastic.redis.errors import (
    CorruptStateError,
    RedelasticError,
    RefusesWritesError,
    UnavailableError,
    UnreachableError,
)
from redelastic.redis.keys import RunKeys, check_key_part

from . import replies
from .settings import Settings
from .view import Break, Round, Save, View
from .watch import Watch

log = logging.getLogger(__name__)

RunThen = Literal["goes on", "closes", "stops"]


class News(IntEnum):
    """What workers have reported of their progress when they fail, besides the number of their last step."""

    NEVER_ANY = -1  # as ever: their script tells nothing, or these ranks do not
    NONE = 0  # though they did in an earlier round
    STEP = 1
    PROGRESS = 2  # something that counts as progress whatever the number of the step


class RunStoppedError(RendezvousClosedError):
    """The run was stopped: no round follows, and running workers have to end.

    Attributes:
        without_progress: whether it was, because the job made no progress.
    """

    def __init__(self, run_id: str, why: Event | None) -> None:
        super().__init__(f"Run {run_id!r} was stopped: {sanitize(cause(why))}.")
        self.without_progress = isinstance(why, Stopped) and why.cause == "progress"


class DrainedError(RendezvousError):
    """This node was asked to drain, and no longer takes part.

    Attributes:
        reason: the name of the asker, or what caused the request.
    """

    def __init__(self, node: str, run_id: str, reason: str) -> None:
        super().__init__(f"Node {node} of run {run_id!r} was drained: {reason}.")
        self.reason = reason


class Known(NamedTuple):
    """What a node knows, for a server that has forgotten the run: the arguments of ``lua/restore.lua``."""

    node: str
    status: str
    min_nodes: int
    max_nodes: int
    last_call_ms: int
    replacement_ms: int
    lease_ms: int
    interval_ms: int
    ttl_ms: int
    epoch: int
    rank: int
    size: int
    master: str
    completed_at: int
    closed: str
    stop: int
    is_steady: int
    roll_call: int
    incarnation: str


class Node:
    """One node of one run.

    Its identity ends when it leaves or is fenced. It comes back as a new node, so that no request of the old one that
    is still in flight can count for it (I4).

    Args:
        connection: to Redis.
        keys: of the run.
        settings: of the run.
        host: address of this node for its peers.

    Attributes:
        watch: what this node knows.
        run_id: the run's id.
        connection, settings, host: as given.
        describe: serializes the status that heartbeats carry.
        have_parked: whether its workers have left their round, and wait for the next one.
        stopped: whether this process gives the node up: nothing renews its lease.
    """

    def __init__(self, connection: Connection, keys: RunKeys, settings: Settings, host: str) -> None:
        self.connection = connection
        self.settings = settings
        self.host = check_key_part("address of this node", host)
        self.run_id = keys.run_id
        self.forget_workers()
        self.stopped = threading.Event()
        self.wake_key = keys.wake.encode()
        self._run_keys = keys
        self.watch = Watch(keys.run_id, self._new_id())

    # -- its identity, and what it tells

    def forget_workers(self) -> None:
        """Tell nothing of workers until :attr:`describe` and :attr:`have_parked` are set."""
        self.describe: Callable[[dict[str, Any]], str] = json.dumps
        self.have_parked: Callable[[], bool] = lambda: False

    def _new_id(self) -> str:
        return f"{self.settings.node_name}-{os.getpid()}-{uuid.uuid4().hex[:12]}"

    @property
    def id(self) -> str:
        """Id of this node; it changes when the node has left or was fenced."""
        return self.watch.view.node

    @property
    def view(self) -> View:
        """What this node knows now."""
        return self.watch.view

    @property
    def keys(self) -> list[str]:
        """The run's keys, and the key of this node's status."""
        return self._keys_of(self.id)

    def _keys_of(self, node: str) -> list[str]:
        return [*self._run_keys.types, self._run_keys.status(node)]

    def renew_identity(self) -> None:
        """Become another node, which is in no round."""
        self.watch.update(View.become, self._new_id())

    def status(self) -> dict[str, Any]:
        """This node's status, for people and tools."""
        view, name = self.view, self.settings.node_name
        status: dict[str, Any] = {"name": name, "host": self.host, "pid": os.getpid()}
        held = view.round
        waiting = "parked" if held and self.have_parked() else "waiting"
        status["state"] = "running" if held and not view.joining else waiting
        return status | {"epoch": held.epoch, "rank": held.rank, "size": held.size} if held else status

    def known(self, view: View) -> Known:
        """What this node knows and tells with each request, as of a view."""
        s, held = self.settings, view.round
        return Known(
            node=view.node,
            status=self.describe(self.status()),
            min_nodes=s.min_nodes,
            max_nodes=s.max_nodes,
            last_call_ms=round(1000 * s.last_call_timeout),
            replacement_ms=round(1000 * s.replacement_timeout),
            lease_ms=round(1000 * s.lease),
            interval_ms=round(1000 * s.keep_alive_interval),
            ttl_ms=round(1000 * s.ttl),
            epoch=held.epoch if held else 0,
            rank=held.rank if held else 0,
            size=held.size if held else 0,
            master=f"{held.host} {held.port}" if held else "",
            completed_at=held.completed_at if held else 0,
            closed=view.record_of_closing[0],
            stop=view.record_of_closing[1],
            is_steady=int(self.watch.has_reached_redis_for(s.lease)),
            roll_call=view.roll_call,
            incarnation=view.incarnation,
        )

    def call(
        self,
        script: scripts.Script,
        keys: list[str],
        args: Sequence[Any] | Callable[[], list[Any]],
        timeout: float | None,
    ) -> Any:
        """Run a script for this node; as :meth:`Script.__call__`, but errors name a key of the wrong type."""
        try:
            return script(self.connection, keys, args, timeout)
        except CorruptStateError as e:
            types = {**self._run_keys.types, self._run_keys.status(self.id): "string"}
            require_keys_of_types(self.connection, types, e)

    def may_pass(self, error: UnavailableError) -> bool:
        """Whether an error is an outage, which a node sits out, rather than a refusal."""
        if isinstance(error, RefusesWritesError):
            return self.connection.served
        return isinstance(error, UnreachableError)

    def must_leave(self) -> bool:
        """Whether this node has to leave the run: it is to drain, or the run was stopped."""
        return self.view.drain is not None or self.view.is_stopped

    # -- its requests

    def ask_to_join(self, view: View, port: int) -> replies.Join:
        """Ask once to be a member of the next round.

        Args:
            view: of this node.
            port: on which this node would serve the bootstrap store.
        """
        s = self.settings
        admission = -1 if s.admit_timeout == math.inf else round(1000 * s.admit_timeout), round(1000 * s.admit_interval)
        parked = int(self.have_parked())
        args = [*self.known(view), view.epoch_held, f"{self.host} {port}", s.topology, *admission, parked]
        keys = [*self._keys_of(view.node), self._run_keys.store(view.epoch_held).data]
        return replies.decode_join(self.call(scripts.JOIN, keys, args, 0))

    def beat(self, view: View) -> replies.Beat:
        """Renew the lease, as of a view, and apply Redis's reply."""
        held = view.round
        keys = [*self._keys_of(view.node), self._run_keys.store(held.epoch if held else 0).data]
        reply = replies.Beat(*replies.decoded(self.call(scripts.BEAT, keys, self.known(view), 0)))
        self.watch.update(View.apply_beat, view.node, held, reply)
        return reply

    def leave(self, why: Left, *, run_then: RunThen = "goes on", timeout: float | None = None) -> None:
        """Leave the run for good; the identity ends with it.

        Args:
            why: the reason, for people and the other nodes.
            run_then: what becomes of the run, if this node is a member of an unbroken round (I5).
            timeout: as in :meth:`Connection.call`.
        """
        view = self.view
        if view.nodes_waiting:  # a server that has forgotten the run would take the round for an unbroken one
            run_then = "goes on"
        try:
            self.call(scripts.LEAVE, self._keys_of(view.node), [*self.known(view), run_then, *why.pairs()], timeout)
        finally:
            self.watch.update(View.leave)
            if not self.stopped.is_set():  # a node that is given up keeps the identity that left
                self.renew_identity()

    def expel(self, node: str, why: Left) -> None:
        """Have another node leave the run; this ends that node's identity."""
        stranger = self.known(View(node))  # nothing that the server would restore
        self.call(scripts.LEAVE, self._keys_of(node), [*stranger, "goes on", *why.pairs()], None)

    def try_to_leave(self, why: Left) -> None:
        """Leave before an error is raised; if Redis is away, try until the lease has run out."""
        with contextlib.suppress(RedelasticError):
            self.leave(why, timeout=self.settings.lease)

    def stop(self) -> None:
        """Give this node up: it stays in the run until its lease runs out."""
        self.stopped.set()

    def close(self, timeout: float) -> None:
        """Close the run: no further round completes (I5)."""
        args = [round(1000 * self.settings.ttl), 0, self.id, "cause", "asked"]
        self.watch.update(View.apply_closing, self.call(scripts.CLOSE, self.keys, args, timeout))

    def is_run_closed(self) -> bool:
        """Ask Redis whether the run is closed."""
        try:
            why, stop = self.connection.call(lambda client: client.hmget(self._run_keys.run, "closed", "stop"))
        except CorruptStateError as e:
            require_keys_of_types(self.connection, self._run_keys.types, e)
        if why:
            self.watch.update(View.apply_closing, why, stop=bool(stop))
        return bool(self.view.closed)

    def raise_closed(self, *, spare: bool = False) -> NoReturn:
        """Leave the run, which is closed, and say why.

        Args:
            spare: whether this node waited for a place in it.

        Raises:
            RunStoppedError: the run was stopped.
            RendezvousGracefulExitError: for a spare of a run that has not failed.
            RendezvousClosedError: else.
        """
        view = self.view
        self.try_to_leave(Left(cause="closed"))
        if view.is_stopped:
            raise RunStoppedError(self.run_id, view.closing)
        message = f"Run {self.run_id!r} is closed ({view.closed}); use a new run id."
        if not spare or is_fault(view.closing):
            raise RendezvousClosedError(message)
        if not view.epoch_held:
            log.warning("Node %s has trained nothing: it was a spare until the run ended (%s).", self.id, view.closed)
        raise RendezvousGracefulExitError(message)

    def wait_while(self, condition: Callable[[], bool]) -> None:
        """Wait outside the run while a condition holds; it is checked at each wake-up of the run.

        Raises:
            DrainedError: this node was asked to drain meanwhile.
            RendezvousClosedError: the run was closed.
            UnavailableError: Redis could not be reached.
        """
        while condition():
            if drain := self.view.drain:
                raise DrainedError(self.id, self.run_id, drain.reason)
            if self.is_run_closed():
                self.raise_closed()
            s = self.settings
            self.connection.read({self.wake_key: "$"}, s.keep_alive_interval, s.read_timeout)

    def replicas_with(self, completed: Round) -> int:
        """How many replicas hold a round; waits a heartbeat interval for ``min_replicas`` of them.

        Raises:
            UnreachableError: Redis could not be reached.
        """
        s, wanted = self.settings, self.settings.min_replicas
        key, block = self._run_keys.run, self.settings.keep_alive_interval
        return self.connection.replicas_with(
            key, "completed_at", completed.completed_at, wanted=wanted, block=block, ttl=s.ttl
        )

    def regroup(self, epoch: int) -> None:
        """Have this node's agent, and all members, join the next round, unless it has left the round of ``epoch``."""
        view = self.view
        if view.round and view.round.epoch == epoch and not view.broken:
            self.watch.update(View.regroup, Break(epoch, Regrouped(node=view.node), 0, member_lost=False))

    def drain(self, reason: str, timeout: float) -> None:
        """Drain this node, as on a request to it; it drains even if Redis cannot be reached.

        Args:
            reason: the name of the asker, or what caused the request.
            timeout: how long its workers have to save, in seconds.
        """
        self.watch.begin_drain(reason, timeout)
        self.watch.notify()
        self.call(scripts.DRAIN, self.keys, [self.id, reason, round(1000 * timeout)], None)

    def admit(self, save: Save) -> None:
        """Let the nodes into the round that wait until all its workers have saved: they have."""
        self.call(scripts.ADMIT, self.keys, [self.view.epoch_held, "{}-{}".format(*save.place)], None)

    def charge(
        self, failed_at: float, step: int, news: News, failure: Failed, limits: tuple[int, int, int], *, final: bool
    ) -> replies.Charge:
        """Count a failure of this node's workers in its round.

        Args:
            failed_at: when the first of them failed, on the monotonic clock in seconds.
            step: the last step that they reported, or -1.
            news: what they reported in this round.
            failure: which worker failed first, and how.
            limits: restarts of the job; restarts in a row without progress; rounds in a row in which a worker of this
                host may fail first. -1 is no limit.
            final: whether to stop the run if a limit is used up; else the reply only says so.

        Returns:
            Restarts of the job; rounds in a row in which this host failed first; why the run has to be stopped, if so.
        """
        held = self.view.round
        elsewhere = failure.follows and held is not None and held.size > 1
        caller = (self.id, "" if elsewhere else self.settings.node_name, self.view.epoch_held)

        def args() -> list[Any]:  # another host may have failed while this one could not reach Redis
            return [*caller, _ms_since(failed_at), step, int(news), *limits, int(final), *failure.pairs()]

        return replies.decode_charge(self.call(scripts.CHARGE, self.keys, args, None))

    def call_roll(self, failed_at: float) -> None:
        """Call the roll, since workers of this node failed and a lost peer may be the cause; never fails.

        Nodes that do not answer within ``roll_call_timeout`` are out; the outcome ends :meth:`Watch.wait_for_loss`.
        A node that has just found Redis again calls no roll: other nodes may still be looking for Redis.

        Args:
            failed_at: when the first of its workers failed, on the monotonic clock in seconds.
        """
        s, view = self.settings, self.view
        lost = view.member_lost or not view.round or view.round.size == 1
        if lost or not s.roll_call_timeout or not self.watch.has_reached_redis_for(s.lease):
            return

        def args() -> list[Any]:
            return [view.node, view.epoch_held, _ms_since(failed_at), round(1000 * s.roll_call_timeout)]

        try:  # an idle connection may be dead: that is no outage; after an outage the leases decide
            reply = self.call(scripts.ROLL_CALL, self.keys, args, min(1.0, s.roll_call_timeout))
        except RedelasticError as e:
            log.warning("No roll call of run %r: %s", self.run_id, e)
            return
        if reply:
            self.watch.update(View.apply_roll_call, replies.RollCall(*reply))


def _ms_since(moment: float) -> int:
    return round(1000 * max(0.0, time.monotonic() - moment))
