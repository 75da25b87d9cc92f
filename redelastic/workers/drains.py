"""Drains and other saves: all workers of the job save or pause, then a node leaves or is let in; and the drain file."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Final

from redelastic.agent.background import BackgroundReporter, repeat
from redelastic.monitoring.control import RESAVE_INTERVAL
from redelastic.monitoring.events import Event, Saved
from redelastic.redis.connection import STREAM_START, place_of
from redelastic.redis.keys import PAUSED, SAVED
from redelastic.rendezvous.node import DrainedError, Node
from redelastic.rendezvous.view import Drain, Save
from redelastic.store import RedisStore, RoundBrokenError

from .channels import WorkerChannels
from .group import Workers

log = logging.getLogger(__name__)

SHORTEST_PAUSE: Final = 0.01  # in seconds
MAX_LOGGED_DRAINS: Final = 8  # how many draining nodes the log names in one round


class Stage:
    """What each node of a round has to do for a request, such as to have its workers save.

    A node that has done it records the request's place in the run's stream in the round's store.

    Args:
        key: of what is recorded, with a place for the rank.
        store: of the round.
        rank: of this node.
        size: number of nodes in the round.
        reporter: queries the store in the background: it takes long while Redis is away.
    """

    def __init__(self, key: str, store: RedisStore, rank: int, size: int, reporter: BackgroundReporter) -> None:
        self._key, self._store, self._rank, self._reporter = key, store, rank, reporter
        self._announced = STREAM_START  # the last request for which this node has recorded that it is done
        self._done = dict.fromkeys(range(size), STREAM_START)  # the last one that each other node has done, as known
        self._done.pop(rank)
        self._is_looking = False

    def announce(self, place: tuple[int, int]) -> None:
        """Record that this node has done what a request asks for."""
        if place > self._announced:
            self._announced = place
            self._reporter.send(partial(self._record, place))

    def _record(self, place: tuple[int, int]) -> None:
        try:
            self._store.set(self._key.format(self._rank), "{}-{}".format(*place))
        except RoundBrokenError:
            pass  # the members regroup, and no node waits for this
        except Exception:
            self._announced = STREAM_START  # the next look sends it again
            raise

    def is_done_by_others(self, place: tuple[int, int]) -> bool:
        """Whether all other nodes are known to have done it; if not, the reporter looks."""
        if not self._done:
            return True
        if place == STREAM_START:  # this node has not heard of the request
            return False
        missing = [rank for rank, done in self._done.items() if done < place]
        if missing and not self._is_looking:
            self._is_looking = True
            self._reporter.send(partial(self._look, missing))
        return not missing

    def _look(self, ranks: list[int]) -> None:
        try:
            places = self._store.peek([self._key.format(rank) for rank in ranks])
            self._done |= {rank: place_of(done or b"") for rank, done in zip(ranks, places, strict=True)}
        finally:
            self._is_looking = False


class Drains:
    """The drains and other saves of one round, as seen by one of its nodes.

    A drain makes all workers of the round save, unless they were asked to moments ago: one save serves all nodes that
    drain together. So does a node that waits to be let in, or somebody who asks for a checkpoint. These requests are
    ordered by the wake-ups that announce them. A draining node leaves when all have saved for its own, its time is up,
    or the round is broken anyway; rank 0 lets new nodes in when all have. If many nodes drain together, wake-ups
    announce only a few; the first of these that leaves ends the round for the others too.

    Workers that can pause keep their state in memory: they save only for a drain, and all leave the round after a
    common step before the node leaves or is let in.

    Args:
        node: this one.
        workers: of this node.
        store: of the round.
        rank: of this node.
        size: number of nodes in the round.
        reporter: queries the store in the background.
        note: records an event of this node.
    """

    def __init__(
        self,
        node: Node,
        workers: Workers,
        *,
        store: RedisStore,
        rank: int,
        size: int,
        reporter: BackgroundReporter,
        note: Callable[[Event], None],
    ) -> None:
        self._node, self._workers, self._rank, self._reporter = node, workers, rank, reporter
        self._note, self._channels = note, workers.channels
        self._epoch = node.view.epoch_held  # of the round
        self._saved, self._paused = (Stage(key, store, rank, size, reporter) for key in (SAVED, PAUSED))
        self._paused_at = math.inf  # when the workers had paused, on the monotonic clock
        self._awaits_save = False  # whether the workers were asked to save, or do so by themselves
        self._until: dict[str, float] = {}  # node -> when its drain's time is up, on the monotonic clock
        self._by_signal = False  # whether they were also asked by signal
        self._heard_at = -math.inf  # when this node last heard of a request, on the same clock
        self._asked_at = -math.inf  # when the workers were last asked to save,
        self._asked_for: list[str] = []  # for which draining nodes,
        self._late_at = math.inf  # until when,
        self._asked = 0  # how many got the request,
        self._has_noted = True  # and whether the outcome has been noted
        self._heard_of = STREAM_START  # the last request to save that is no drain
        self._admitted = STREAM_START  # the last one for which new nodes were let in

    @property
    def admits(self) -> bool:
        """Whether workers were asked to save, and new nodes are then let in: an end now means a save for that."""
        if self._channels:  # these never end for that
            return False
        asked = any(save.node and save.timeout < math.inf for save in self._node.view.saves)
        return asked and time.monotonic() < self._late_at

    @property
    def end(self) -> float:
        """When the time of all drains is up, on the monotonic clock in seconds; long ago if there is none."""
        return max(self._until.values(), default=-math.inf)

    @property
    def pause(self) -> float:
        """After how many seconds to advance again: at first as soon as workers may have saved, then less often."""
        return max(SHORTEST_PAUSE, (time.monotonic() - self._heard_at) / 10)

    def advance(self) -> None:
        """Take each request a step further; call it at each check of the workers, and as often as :attr:`pause` says.

        Raises:
            DrainedError: this node has drained.
        """
        drains, saves = self._node.view.drains, self._node.view.saves
        self._hear_of_all(drains, saves)
        if not drains and not saves:
            return
        last = max([drain.place for drain in drains] + [save.place for save in saves])
        have_saved = not self._awaits_save or self._workers.have_saved()
        self._note_outcome(have_saved)
        if self._channels and (drains or any(save.node for save in saves)):
            is_done, stage = self._advance_pause(self._channels, last, have_saved), self._paused
        else:
            is_done, stage = have_saved, self._saved
        if is_done:
            stage.announce(last)
        for drain in drains:
            if drain.node == self._node.id:
                self._leave_if_done(drain, is_done and stage.is_done_by_others(drain.place))
        if self._rank == 0 and is_done:
            for save in saves:
                if save.node and save.place > self._admitted and stage.is_done_by_others(save.place):
                    self._admitted = save.place
                    self._reporter.send(partial(self._admit, save))

    def _advance_pause(self, channels: WorkerChannels, last: tuple[int, int], have_saved: bool) -> bool:
        """Have the workers pause once all nodes' workers have saved; returns whether this node's have paused."""
        if have_saved and channels.arm(self._epoch):
            self._saved.announce(last)
            if self._rank == 0 and self._saved.is_done_by_others(last):
                channels.settle(self._epoch)
        if not channels.are_parked:
            return False
        now = time.monotonic()
        self._paused_at = min(self._paused_at, now)
        if now > max(self._paused_at, self.end) + self._node.settings.lease:  # the node that was to leave has not
            self._node.regroup(self._epoch)
        return True

    def _hear_of_all(self, drains: list[Drain], saves: list[Save]) -> None:
        for drain in drains:
            if drain.node not in self._until:
                self._hear_of(drain)
        for save in sorted(saves, key=lambda save: save.place):
            if save.place > self._heard_of:
                self._hear_of_save(save)

    def _hear_of(self, drain: Drain) -> None:
        if len(self._until) < MAX_LOGGED_DRAINS or drain.node == self._node.id:
            log.warning(
                "Node %s is draining (%s): workers have %g s to save.", *(drain.node, drain.reason, drain.timeout)
            )
        elif len(self._until) == MAX_LOGGED_DRAINS:
            log.warning("More nodes are draining; `redelastic events %s` names them.", self._node.run_id)
        self._heard_at = now = time.monotonic()
        self._until[drain.node] = now + drain.timeout
        self._ask(drain.timeout, by_signal=True)
        self._asked_for.append(drain.node)

    def _hear_of_save(self, save: Save) -> None:
        why = f"{save.node} waits to join" if save.node else save.reason
        self._heard_of, self._heard_at = save.place, time.monotonic()
        if self._channels and save.node and save.timeout < math.inf:
            log.info("All workers pause after a common step: %s.", why)
        elif save.timeout < math.inf:
            log.info("Workers are asked to save (%s): they have %g s.", why, save.timeout)
            self._ask(save.timeout, by_signal=False)
        elif self._heard_at - self._asked_at > RESAVE_INTERVAL:
            log.info("The workers' own next checkpoint is awaited: %s.", why)
            self._awaits_save = True
            self._workers.await_own_save(leads=self._rank == 0)

    def _ask(self, timeout: float, *, by_signal: bool) -> None:
        """Ask the workers to save, unless they were asked to moments ago, and by no weaker means."""
        now = time.monotonic()
        if now - self._asked_at > RESAVE_INTERVAL or (by_signal and not self._by_signal):
            self._asked_at, self._asked_for, self._has_noted, self._late_at = now, [], False, math.inf
            self._by_signal, self._awaits_save = by_signal, True
            self._asked = self._workers.ask_to_save(by_signal=by_signal)
        self._late_at = min(self._late_at, now + timeout)

    def _note_outcome(self, have_saved: bool) -> None:
        is_late = time.monotonic() >= self._late_at
        if not self._has_noted and (have_saved or is_late):
            self._has_noted = True
            self._note(Saved(drains=tuple(self._asked_for[:MAX_LOGGED_DRAINS]), asked=self._asked, late=is_late))

    def _leave_if_done(self, own: Drain, all_have_saved: bool) -> None:
        over = time.monotonic() >= self._until[own.node]
        if over or all_have_saved or self._node.view.nodes_waiting > 0:
            raise DrainedError(own.node, self._node.run_id, own.reason)

    def _admit(self, save: Save) -> None:
        try:
            self._node.admit(save)
        except Exception:
            self._admitted = STREAM_START  # the next look sends it again
            raise
        if self._channels:
            self._node.regroup(self._epoch)  # the new node may have gone meanwhile


class DrainFile:
    """A file whose appearance drains this node, for schedulers that cannot send a signal.

    Args:
        path: of the file; it may hold the Unix time by which this node must be gone.
        timeout: how long workers may take to save, in seconds.
        drain: called with a reason and a timeout in seconds each time a look finds the file.
    """

    def __init__(self, path: Path, timeout: float, drain: Callable[[str, float], None]) -> None:
        self._path, self._timeout, self._drain = path, timeout, drain
        self._complaint = ""  # why the last look failed

    def look(self) -> None:
        """Look once. A failure is logged unless the last look failed the same way; the next call tries again."""
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self._complaint = ""
            return
        except OSError as e:
            if str(e) != self._complaint:
                self._complaint = str(e)
                log.warning("The drain file cannot be checked: %s. Retrying every second.", e)
            return
        timeout = self._timeout
        with contextlib.suppress(ValueError, OSError):
            timeout = min(timeout, max(0.0, float(self._path.read_text()) - time.time()))
        self._drain(f"the file {self._path} exists", timeout)


def watch_drain_file(
    path: Path | None, timeout: float, drain: Callable[[str, float], None], interval: float
) -> AbstractContextManager[None]:
    """Look for the drain file, if there is to be one, every ``interval`` seconds until the block ends."""
    look = None if path is None else DrainFile(path, timeout, drain).look
    return contextlib.nullcontext() if look is None else repeat(look, interval, "drain-file")
