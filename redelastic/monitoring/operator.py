"""One run, for programs that operate it; the commands are made from this."""

from __future__ import annotations

import getpass
import math
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import Endpoint, parse_endpoint
from redelastic.redis.keys import DEFAULT_PREFIX, RunKeys

from . import logs
from .control import RESAVE_INTERVAL, RunControl, UnknownNodeError
from .event_log import EventLog
from .events import DRAIN_GRACE, MAX_REASON, SAVE_TIMEOUT, Closed, Event, Left, Lost, Saved, Stopped
from .history import History
from .records import Node
from .report import describe
from .sentences import sentence
from .wording import clean

if TYPE_CHECKING:
    from typing_extensions import Self

    from .documents import Logs, Status

TIMEOUT: Final = 5.0  # for a call with all its retries, in seconds: a person waits for it
CONNECT_TIMEOUT: Final = 0.7  # to find that no Redis is there, in seconds; the last attempt may end later
MERGE_DELAY: Final = 1.0  # how long an event may wait to be merged with others of its kind, in seconds
PAUSE: Final = 0.05  # between two looks at first, in seconds; later a tenth of the time that has passed
AGENT: Final = "redelastic"  # in the status of a node with our agent
OVER: Final = frozenset({"closed", "stopped", "dead"})  # phases of a run that ends


class Saves(NamedTuple):
    """What became of a request to save.

    Attributes:
        saved: number of nodes whose workers have saved.
        unsaved: ranks of the nodes whose workers have not, or not in time.
        unasked: number of nodes with no worker that could be asked.
        seconds: that it took.
    """

    saved: int
    unsaved: list[int]
    unasked: int
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether all workers have saved."""
        return self.saved > 0 and not self.unsaved and not self.unasked


class Closing(NamedTuple):
    """What became of a request to close a run.

    Attributes:
        why: why it was first closed.
        before: whether it had been closed before.
        stopped: whether its nodes end their workers.
        saves: what became of the request to save before; None if there was none.
    """

    why: Event
    before: bool
    stopped: bool
    saves: Saves | None


class Readmission(NamedTuple):
    """What was readmitted.

    Attributes:
        failures: consecutive failed rounds of the host, now cleared.
        barred: whether it was excluded for them.
    """

    failures: int
    barred: bool


@dataclass(frozen=True)
class Drain:
    """A request to a node to save and leave.

    Attributes:
        node: as it was before.
        can_drain: whether it has redelastic's agent; one under plain torchrun cannot.
        asked: whether it was asked: it may have left before.
        timeout: how long its workers have to save, in seconds.
    """

    node: Node
    can_drain: bool
    asked: bool
    timeout: float
    _control: RunControl
    _after: str
    _until: float

    def wait(self) -> str:
        """Wait until the node has left, for as long as its workers may save, and 30 s.

        Returns:
            What happened instead; empty if it has left.
        """
        why, gone_since = "has not left in time: see `redelastic status` and `redelastic events`", math.inf
        for seen in self._control.follow(self._after):
            now = time.monotonic()
            if isinstance(seen, Exception):
                why = f"may or may not have left: {seen}"
            else:
                for event in (one for several in seen for one in several.each()):
                    if event.node == self.node.id and isinstance(event, Left | Lost):
                        return f"did not leave, it died: it {sentence(event)}" if isinstance(event, Lost) else ""
                if not seen:
                    run = self._control.state()
                    is_here = any(other.id == self.node.id for other in run.nodes)
                    gone_since = math.inf if is_here else min(gone_since, now)
                    if now - gone_since > MERGE_DELAY + run.lease:
                        return ""  # a heartbeat has come since: an event would be there
            if now > self._until and (gone_since == math.inf or isinstance(seen, Exception)):
                return why
        raise AssertionError("a run is followed for ever")


class Run:
    """One run on a Redis. It needs no torch, and is not thread-safe.

    Use it as a context manager, or call :meth:`disconnect`.

    Args:
        endpoint: URL or host:port of Redis, as ``--rdzv-endpoint``; empty for ``$REDELASTIC_REDIS_URL``, or localhost.
        run_id: as given to ``--rdzv-id``.
        key_prefix: as in ``--rdzv-conf``.
        by: who acts, as the events and logs say it; empty for this user on this host.
        tls: ``ca_cert``, ``ssl_cert`` and ``ssl_cert_key``: files for TLS.

    Raises:
        ValueError: an argument is malformed.
        UnavailableError: no Redis answers there, or it refuses the login.

    Attributes:
        id: the run's.
        control: what this is made from.

    All methods raise UnavailableError when Redis cannot be reached within 5 s, UnknownRunError (a LookupError) if it
    knows nothing of the run, and CorruptStateError if a key of the run holds something that redelastic did not write.
    """

    def __init__(
        self,
        endpoint: str | Endpoint,
        run_id: str,
        *,
        key_prefix: str = DEFAULT_PREFIX,
        by: str = "",
        **tls: str | None,
    ) -> None:
        keys = RunKeys(run_id, key_prefix)
        where = parse_endpoint(endpoint, **tls) if isinstance(endpoint, str) else endpoint
        self.id = run_id
        self._by = by or local_user()
        self._connection = open_connection(where)
        self.control = RunControl(self._connection, keys)
        self._log = EventLog(self.control)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disconnect()

    def disconnect(self) -> None:
        """Close the connections to Redis; the run goes on."""
        self._connection.close()

    # -- reading

    def status(self) -> Status:
        """The run as it is now: what ``redelastic status --json`` prints, without the version."""
        state = self.control.state()
        self._log.read()
        return cast("Status", describe(state, self._log.events, time.time(), self._log.history(state)))

    def events(self, count: int | None = None) -> list[Event]:
        """What has happened, oldest first: objects of the classes of ``redelastic.monitoring.events``.

        ``event_document(event)`` of ``redelastic.monitoring.sentences`` is what ``redelastic events --json`` prints.

        Args:
            count: how many at most, the newest ones; None for all that Redis still has.
        """
        found = self.control.events(count=count)
        if not found:
            self.control.state()  # raises an error if there is no such run
        return found

    def follow(self, after: str = "") -> Iterator[Event]:
        """What happens from this call on, as it comes, for ever; an outage of Redis is sat out.

        Args:
            after: id of the last event that the caller has seen; "0" for all; empty for those to come.
        """
        following = self.control.follow(after or self.last_event_id())  # at once, not when the first event is asked for
        return (event for seen in following if not isinstance(seen, Exception) for event in seen)

    def last_event_id(self) -> str:
        """The id to follow from if only new events matter."""
        last = self.control.events(count=1)
        return last[-1].id if last else "0"

    @property
    def last_read(self) -> str:
        """The id of the newest event that :meth:`status` has counted in; "0" if there is none."""
        return self._log.last_id

    def history(self) -> History | None:
        """What each node has spent its time on; None if there are no events."""
        state = self.control.state()
        self._log.read()
        return self._log.history(state)

    def logs(self, rank: int | None = None) -> Logs:
        """Where workers write, and how the log of the first one that failed ends: ``redelastic logs --json``.

        Args:
            rank: of the only worker that matters; None for all.
        """
        events = self.control.events()
        return logs.document(self.control.state(), events, rank)

    def wait(self, timeout: float = math.inf) -> Status:
        """Wait until the run is closed or stopped, or no node of it is alive; an outage of Redis is sat out.

        Args:
            timeout: in seconds.

        Returns:
            The run's status then, or at the end of the timeout.
        """
        until = time.monotonic() + timeout
        status = self.status()
        seen = self.control.follow(self.last_read)
        while status["phase"] not in OVER and time.monotonic() < until:
            if not isinstance(next(seen), Exception):
                status = self.status()
        return status

    # -- acting

    def drain(self, node: str, *, reason: str = "", timeout: float = SAVE_TIMEOUT) -> Drain:
        """Ask a node to have the workers save, and then to leave; the others go on.

        Args:
            node: its id, name, or rank in the round.
            reason: to be recorded in the events and the nodes' logs.
            timeout: how long the workers have to save, in seconds.

        Raises:
            UnknownNodeError: there is no such node, or several.
        """
        found, after = self.control.find(node), self.last_event_id()
        can = found.status.get("agent") == AGENT
        asked = can and self.control.drain(found.id, self._attributed(reason), timeout)
        return Drain(found, can, asked, timeout, self.control, after, time.monotonic() + timeout + DRAIN_GRACE)

    def checkpoint(self, *, reason: str = "", timeout: float = SAVE_TIMEOUT) -> Saves:
        """Ask all workers to save, and wait until they have; they go on training.

        Args:
            reason: to be recorded in the events and the nodes' logs.
            timeout: how long they have, in seconds.
        """
        return self._save(self._attributed(reason), timeout)

    def _save(self, reason: str, timeout: float) -> Saves:
        before = self.control.state()
        reached = {n.rank for n in before.nodes if n.rank is not None and n.status.get("agent") == AGENT}
        asked = self.control.save(reason, timeout) if reached else None
        if asked is None:
            return Saves(0, [], 0, 0.0)
        started, unsaved = time.monotonic(), sorted(reached)
        while (passed := time.monotonic() - started) <= timeout and unsaved:
            unsaved = sorted(reached.intersection(self.control.unsaved(asked)))
            if unsaved:
                time.sleep(max(PAUSE, passed / 10))
        # Workers that were asked moments before are not asked again: what became of that request counts for this one.
        lately = self.control.events(f"{max(0, round(1000 * (before.time - RESAVE_INTERVAL)))}-0")
        each = (one for event in lately for one in event.each())
        outcomes = {one.node: one.asked for one in each if isinstance(one, Saved)}
        unasked = sum(outcomes.get(node.id) == 0 for node in before.nodes if node.rank in reached)
        return Saves(len(reached) - len(unsaved) - unasked, unsaved, unasked, time.monotonic() - started)

    def close(self, *, stop: bool = False, reason: str = "", timeout: float = SAVE_TIMEOUT) -> Closing:
        """Have no new round form; a closed run cannot be opened again.

        Args:
            stop: whether the workers are to save and are then ended; else they may finish.
            reason: to be recorded in the events and the nodes' logs.
            timeout: how long they have to save, in seconds; with 0 they are not asked to.
        """
        earlier, reason = self.control.state(), self._attributed(reason)
        saves = None
        if stop and timeout > 0 and not earlier.stopped:
            saves = self._save(f"the run is about to be stopped {reason}", timeout)
        why = self.control.close(reason, stop=stop)
        asked = (Stopped if stop else Closed)(cause="asked", reason=reason)
        return Closing(why, earlier.closed is not None or why != asked, stop or earlier.stopped, saves)

    def readmit(self, host: str, *, reason: str = "") -> Readmission:
        """Let a host that was excluded for its failures join again.

        Args:
            host: its name.
            reason: to be recorded in the events.

        Raises:
            UnknownNodeError: the host has no failures.
        """
        before = self.control.state()
        if not self.control.readmit(host, self._attributed(reason)):
            others = ", ".join(f"{n} ({failures})" for n, failures in sorted(before.failures.items())[:8])
            raise UnknownNodeError(
                f"Run {self.id!r} has no failures of a host {host!r}; "
                + (f"hosts with failures: {others}." if others else "no host has any.")
            )
        return Readmission(before.failures.get(host, 0), host in before.barred)

    def _attributed(self, reason: str) -> str:
        """A reason as it is recorded in the run: with who gave it."""
        return clean(f"by {self._by}" + (f": {reason}" if reason else ""))[:MAX_REASON]


def open_connection(endpoint: Endpoint) -> Connection:
    """Connect for a person, who does not wait long."""
    return Connection.open(endpoint, TIMEOUT, TIMEOUT, CONNECT_TIMEOUT)


def local_user() -> str:
    """This user on this host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
