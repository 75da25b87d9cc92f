"""Drains: the workers of the whole job save, then the draining node leaves; and the file that asks for one."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from redelastic.agent.background import BackgroundReporter
from redelastic.monitoring.events import Event, Saved
from redelastic.rendezvous.membership import DrainedError, Membership
from redelastic.rendezvous.view import STREAM_START, Drain, place_of
from redelastic.store import RedisStore, RoundBrokenError

from .group import Workers

log = logging.getLogger(__name__)

SHORTEST_PAUSE: Final = 0.01  # in seconds
RESAVE_INTERVAL: Final = 10.0  # seconds after which another drain makes the workers save again
MAX_LOGGED_DRAINS: Final = 8  # how many draining nodes the log names in one round
SAVED_KEY: Final = "redelastic/saved/{}"  # in the round's store, by rank: the last drain it has saved for, as a place


class Drains:
    """The drains of one round, as seen by one of its nodes.

    A drain makes all workers of the round save, unless they were asked to moments ago: one save serves all nodes that
    drain together. Drains are ordered by the wake-ups that announce them. Each node records in the round's store the
    last drain its workers have saved for, and a draining node leaves when all have saved for its own, its time is up,
    or the round is broken anyway. If many nodes drain together, wake-ups announce only a few; the first of these that
    leaves ends the round for the others too.

    Args:
        membership: of this node.
        workers: of this node.
        store: of the round.
        rank: of this node.
        size: number of nodes in the round.
        reporter: queries the store in the background.
        note: records an event of this node.
    """

    def __init__(
        self,
        membership: Membership,
        workers: Workers,
        *,
        store: RedisStore,
        rank: int,
        size: int,
        reporter: BackgroundReporter,
        note: Callable[[Event], None],
    ) -> None:
        self._membership, self._workers, self._store, self._rank = membership, workers, store, rank
        self._reporter, self._note = reporter, note
        self._until: dict[str, float] = {}  # node -> when its drain's time is up, on the monotonic clock
        self._heard_at = -math.inf  # when this node last heard of a drain, on the same clock
        self._asked_at = -math.inf  # when the workers were last asked to save,
        self._asked_for: list[str] = []  # for which nodes,
        self._asked = 0  # how many got the request,
        self._has_noted = True  # and whether the outcome has been noted
        self._announced = STREAM_START  # the last drain for which the store says that this node's workers have saved
        self._awaited = [other for other in range(size) if other != rank]  # ranks not known to have saved for its drain
        self._counting = False  # whether the reporter is about to check that

    @property
    def own(self) -> bool:
        """Whether this node drains."""
        return self._membership.node in self._until

    @property
    def end(self) -> float:
        """When the time of all drains is up, on the monotonic clock in seconds; long ago if there is none."""
        return max(self._until.values(), default=-math.inf)

    @property
    def pause(self) -> float:
        """After how many seconds to advance again: at first as soon as workers may have saved, then less often."""
        return max(SHORTEST_PAUSE, (time.monotonic() - self._heard_at) / 10)

    def advance(self) -> None:
        """Take each drain a step further; call it at each check of the workers, and as often as :attr:`pause` says.

        Raises:
            DrainedError: this node has drained.
        """
        drains = self._membership.view.drains
        for drain in drains:
            if drain.node not in self._until:
                self._hear_of(drain)
        if not drains:
            return
        have_saved = self._workers.have_saved()
        self._note_outcome(have_saved)
        last = max(drain.place for drain in drains)
        if have_saved and last > self._announced:
            self._announced = last
            self._reporter.send(partial(self._announce, last))
        for drain in drains:
            if drain.node == self._membership.node:
                self._leave_if_done(drain, have_saved)

    def _hear_of(self, drain: Drain) -> None:
        if len(self._until) < MAX_LOGGED_DRAINS or drain.node == self._membership.node:
            log.warning(
                "Node %s is draining (%s): workers have %g s to save.", *(drain.node, drain.reason, drain.timeout)
            )
        elif len(self._until) == MAX_LOGGED_DRAINS:
            log.warning("More nodes are draining; `redelastic events %s` names them.", self._membership.run_id)
        self._heard_at = now = time.monotonic()
        self._until[drain.node] = now + drain.timeout
        if now - self._asked_at > RESAVE_INTERVAL:
            self._asked_at, self._asked_for, self._has_noted = now, [], False
            self._asked = self._workers.ask_to_save()
        self._asked_for.append(drain.node)

    def _note_outcome(self, have_saved: bool) -> None:
        is_late = time.monotonic() >= min(self._until[node] for node in self._asked_for)
        if not self._has_noted and (have_saved or is_late):
            self._has_noted = True
            self._note(Saved(drains=tuple(self._asked_for[:MAX_LOGGED_DRAINS]), asked=self._asked, late=is_late))

    def _leave_if_done(self, own: Drain, have_saved: bool) -> None:
        over = time.monotonic() >= self._until[own.node]
        if over or self._membership.view.nodes_waiting > 0 or (have_saved and not self._awaited):
            raise DrainedError(own.node, self._membership.run_id, own.reason)
        if own.place > STREAM_START and not self._counting:  # this takes long while Redis is away
            self._counting = True
            self._reporter.send(partial(self._count, own.place))

    def _announce(self, place: tuple[int, int]) -> None:
        try:
            self._store.set(SAVED_KEY.format(self._rank), "{}-{}".format(*place))
        except RoundBrokenError:
            pass  # the members regroup, and no node waits for this
        except Exception:
            self._announced = STREAM_START  # the next look sends it again
            raise

    def _count(self, place: tuple[int, int]) -> None:
        try:
            places = self._store.peek([SAVED_KEY.format(rank) for rank in self._awaited])
            self._awaited = [
                rank for rank, saved in zip(self._awaited, places, strict=True) if place_of(saved or b"") < place
            ]
        finally:
            self._counting = False


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
