"""A run's events, each read from Redis once, and the history that follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from .control import RunControl
from .events import LATEST, Event, Regrouped
from .history import History, replay
from .records import Run

KEPT: Final = 12_000  # events: Redis keeps about 10,000
KEPT_TEXT: Final = 8 << 20  # characters of events: Redis keeps 8 MiB
MOMENT: Final = 0.001  # in seconds: a last span of at least this length goes on in `History.extended`


class EventLog:
    """Follows one run's events; not thread-safe.

    Args:
        control: the run's control.
    """

    def __init__(self, control: RunControl) -> None:
        self._control = control
        self._history: History | None = None
        self.events: list[Event] = []
        self._sizes: list[int] = []  # of the events, in characters

    def read(self) -> list[Event]:
        """Read what has happened since the last call; returns the new events.

        Raises:
            UnavailableError, CorruptStateError: as for :meth:`RunControl.events`.
        """
        if (
            self.events and self.events[-1].time >= LATEST
        ):  # a stream that takes no later id begins anew with lower ones
            self.events, self._sizes = [], []
        new = self._control.events(self.last_id if self.events else "-")
        if new:
            events, sizes = [*self.events, *new], [*self._sizes, *map(_size, new)]
            first = _first_kept(sizes)
            self.events, self._sizes = events[first:], sizes[first:]
            self._history = None
        return new

    @property
    def last_id(self) -> str:
        """The newest event's id; "0" if there is none."""
        return self.events[-1].id if self.events else "0"

    def history(self, run: Run) -> History | None:
        """The run's history until its nodes were last heard of; None if there are no events.

        Args:
            run: as it is now.
        """
        if not self.events:
            return None
        if self._history is None:
            self._history = replay(self.events, self.events[-1].time + MOMENT)
        self._history = self._history.extended(last_heard(run))
        return self._history


def _size(event: Event) -> int:
    return sum(map(len, (event.event, event.node, *event.nodes, *event.pairs())))


def _first_kept(sizes: Sequence[int]) -> int:
    """The index of the first of the last events, up to the two limits; at least the newest is kept."""
    room, first = KEPT_TEXT, len(sizes)
    for size in reversed(sizes[-KEPT:]):
        room -= size
        if room < 0 and first < len(sizes):
            break
        first -= 1
    return first


def last_heard(run: Run) -> float:
    """When the last heartbeat of any node came, on the server's clock in seconds; 0 if there is no node."""
    return run.time - max(0.0, min(node.silence for node in run.nodes)) if run.nodes else 0.0


def without_regrouped(events: Iterable[Event]) -> list[Event]:
    """The events except ``regrouped``, of which each round has one per member."""
    return [event for event in events if not isinstance(event, Regrouped)]
