"""Reads Redis for the dashboard: one reader for all browsers, idle while none watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from redelastic.monitoring.control import RunControl, UnknownRunError, list_runs
from redelastic.monitoring.curves import Curves
from redelastic.monitoring.event_log import EventLog
from redelastic.monitoring.events import number_in
from redelastic.monitoring.live_logs import LiveLogs
from redelastic.monitoring.records import Run
from redelastic.monitoring.report import describe, summary, unread
from redelastic.monitoring.wording import clean
from redelastic.redis.connection import Connection
from redelastic.redis.errors import CorruptStateError, RedelasticError, UnreachableError
from redelastic.redis.keys import RunKeys

from . import view
from .feed import Document, Topic

log = logging.getLogger(__name__)

PACE: Final = 1.0  # between two reads of a watched run, if nothing happens there, in seconds
SLOW_PACE: Final = 3.0  # the same for a run that is only watched in the list
LIST_PACE: Final = 3.0  # between two searches for new runs, in seconds
REST: Final = 4.0  # a long read is followed by a rest this many times as long: at most a fifth of a core
RETRY: Final = 1.0  # while Redis is away, in seconds
KEEP_TIMEOUT: Final = 60.0  # how long a run is kept after the last request for it, in seconds
LISTED: Final = 1_000  # runs at most; others have their pages
ROWS_TIME: Final = 0.5  # for reading runs of the list, before the watched runs have their turn again, in seconds


class Watch:
    """One run, and what has been read of it.

    Args:
        connection: to Redis.
        keys: of the run.
    """

    def __init__(self, connection: Connection, keys: RunKeys) -> None:
        self.keys = keys
        self._control = RunControl(connection, keys)
        self.event_log = EventLog(self._control)
        self.run: Run  # as it was read, once it has been
        self.now = 0.0  # on the server's clock, as it was read
        self._speed = view.Speed()
        self._curves = Curves()
        self._origin = 0.0
        self.summary: Document = {}  # as `redelastic list --json` has it
        self.report: Document = {}  # as `redelastic status --json` has it
        self.row: Document = {}
        self.page: Document = {}  # empty unless somebody looks at it
        # Why the last read failed, unless Redis was away: there is no such run, its keys are corrupt or denied to this
        # user, or the dashboard has a bug.
        self.trouble: UnknownRunError | RedelasticError | None = None
        self.read_at = float("-inf")  # on the monotonic clock
        self.cost = 0.0  # of the last read, in seconds
        self.stirred = False  # whether something has happened since

    def read(self, *, has_page: bool) -> None:
        """Read the run; blocks. If that fails, ``trouble`` says why, and what its page shows stays as it was.

        Args:
            has_page: whether somebody looks at its page.

        Raises:
            UnreachableError: Redis is away.
        """
        began = time.monotonic()
        self.stirred = False
        trouble: UnknownRunError | RedelasticError | None = None
        try:
            self._read(has_page=has_page)
        except UnreachableError:
            raise
        except (UnknownRunError, RedelasticError) as e:
            trouble = e
        except Exception as e:
            what = (
                f"Run {self.keys.run_id!r} cannot be shown because of a bug in the dashboard: {type(e).__name__}: {e}."
            )
            if str(self.trouble) != what:
                log.exception("Run %r cannot be shown.", self.keys.run_id)
            trouble = RedelasticError(what)
        self.trouble = trouble
        self.read_at = time.monotonic()
        self.cost = self.read_at - began
        if trouble:
            phase = "corrupt" if isinstance(trouble, CorruptStateError) else "unreadable"
            self.summary = unread(self.keys.run_id, phase)
            self.row = {"run": self.keys.run_id, "phase": phase, "why": str(trouble)}

    def _read(self, *, has_page: bool) -> None:
        run = self._control.state()
        self.event_log.read()
        history = self.event_log.history(run)
        report = describe(run, self.event_log.events, time.time(), history)
        speed = self._speed.update(run, report["step"])
        if not self._origin and history:
            self._origin = history.start
        self.row = view.overview(run, report, history, speed)
        self.page = {}
        if has_page:
            self._control.read_curves(self._curves, run.time)
            curves = {"curves": view.curves(self._curves)}
            self.page = self.row | view.details(run, report, history, self._origin) | curves
        self.summary, self.report = summary(run), report
        self.run, self.now = run, run.time

    @property
    def was_read(self) -> bool:
        """Whether it has been read at all."""
        return self.read_at > float("-inf")

    def is_due(self, pace: float) -> bool:
        """Whether it is time for another read."""
        since = time.monotonic() - self.read_at
        return since >= REST * self.cost and (self.stirred or since >= pace)


class Reader:
    """Reads the watched runs, and publishes them; for one event loop.

    Args:
        connection: to Redis, with short timeouts: while a call waits, the page cannot say that Redis is away.
        prefix: of the runs' keys.
        extras: what each document has besides.
    """

    def __init__(self, connection: Connection, prefix: str, extras: Mapping[str, Any] = MappingProxyType({})) -> None:
        self._connection = connection
        self._prefix = prefix
        self._extras = extras
        self._watches: dict[str, Watch] = {}
        self._listed_at = float("-inf")
        self._away = ""
        self._unlisted = 0  # how many runs the list leaves out
        self._turn = asyncio.Lock()  # for reading one run
        self._has_followers = asyncio.Event()
        self.overview = Topic()
        self.runs: defaultdict[str, Topic] = defaultdict(Topic)

    # -- for browsers

    def follow(self, run_id: str | None) -> AsyncIterator[str]:
        """The server-sent events for a browser that follows a run, or with None the list of all.

        Raises:
            UnknownRunError: no run can have that id.
        """
        if run_id is not None:
            self._keys(run_id)
        return self._follow(run_id)

    async def _follow(self, run_id: str | None) -> AsyncIterator[str]:
        topic = self.overview if run_id is None else self.runs[run_id]
        topic.followers += 1
        self._has_followers.set()
        try:
            async for event in topic.follow():
                yield event
        finally:
            topic.followers -= 1

    async def summaries(self) -> tuple[list[Document], int]:
        """The runs, as ``redelastic list --json`` has them, and how many more there are.

        Raises:
            RedelasticError: Redis is away, or this user may only see one run's keys.
        """
        self._forget()
        await self._list()
        await self._read_rows(PACE)
        return [watch.summary for _, watch in sorted(self._watches.items()) if watch.summary], self._unlisted

    async def watch(self, run_id: str) -> Watch:
        """A run as it was at most a second ago, or as long ago as reading such a large one takes.

        Raises:
            UnknownRunError: there is none, or none can have that id.
            RedelasticError: Redis is away, or the run cannot be read.
        """
        self._forget()
        watch = await self._read(run_id, PACE)
        if watch.trouble:
            raise watch.trouble
        return watch

    async def tail(self, watch: Watch, node: str, local_rank: str) -> Document | None:
        """The end of a worker's log, as its node last reported it; None if that shares no logs.

        Raises:
            RedelasticError: Redis is away.
        """
        known, rank = node_of(watch, node), number_in(local_rank)
        if known is None or not known["shares_logs"] or rank is None:
            return None
        log = await asyncio.to_thread(LiveLogs(self._connection, watch.keys).ask, node, rank)
        return {"path": clean(log.path), "lines": log.lines} if log else {"path": "", "lines": None}

    # -- reading

    async def run(self) -> None:
        """Keep reading the watched runs."""
        while True:
            await self._has_followers.wait()
            topics = self._followed()
            if not topics:
                self._watches.clear()
                self._has_followers.clear()
                continue
            try:
                pause = await self._round()
                self._away = ""
                await self._wait(pause)
            except UnreachableError as e:
                self._away = self._away or f"Redis is away: {e}"
                await self._rest(topics, self._away)
            except Exception as e:  # a bug must not end the loop unnoticed
                log.exception("The dashboard cannot read its runs.")
                await self._rest(topics, f"The dashboard cannot read its runs because of a bug: {e!r}.")

    async def _rest(self, topics: Sequence[Topic], trouble: str) -> None:
        for topic in topics:
            self._publish_trouble(topic, trouble)
        await asyncio.sleep(RETRY)

    def _followed(self) -> list[Topic]:
        for run_id in [run_id for run_id, topic in self.runs.items() if not topic.followers]:
            del self.runs[run_id]  # its document is out of date
        if not self.overview.followers:
            self.overview.document = None
        return [topic for topic in (self.overview, *self.runs.values()) if topic.followers]

    async def _round(self) -> float:
        """Read what is due; returns for how many seconds nothing will be."""
        self._forget()
        for run_id, topic in list(self.runs.items()):
            await self._read_page(run_id, topic)
        if self.overview.followers:
            await self._read_overview()
        watches = self._followed_watches()
        return PACE / 4 if any(watch.stirred or not watch.was_read for watch in watches) else PACE

    async def _read_page(self, run_id: str, topic: Topic) -> None:
        watch = self._watch(run_id)
        is_current = topic.document is not None and (watch.trouble or not topic.document["trouble"])
        if is_current and not watch.is_due(PACE):
            return
        watch = await self._read(run_id, has_page=True)
        match watch.trouble:
            case None:
                topic.publish(self._frame() | {"now": watch.now} | watch.page)
            case UnknownRunError() | CorruptStateError():
                topic.publish((topic.document or {}) | self._frame() | {"gone": str(watch.trouble)})
            case _:
                self._publish_trouble(topic, str(watch.trouble))

    async def _read_overview(self) -> None:
        try:
            await self._list()
            await self._read_rows(SLOW_PACE, ROWS_TIME)
        except UnreachableError:
            raise
        except RedelasticError as e:  # a job's own user may see its run, but no list
            self._publish_trouble(self.overview, f"{e} Here a run's page is /runs/RUN.")
        else:
            now = max((watch.now for watch in self._watches.values()), default=time.time())
            rows = {run_id: watch.row for run_id, watch in self._watches.items() if watch.row}
            self.overview.publish(self._frame() | {"now": now, "runs": rows, "unlisted": self._unlisted})

    def _frame(self) -> Document:
        return {"server": self._connection.name, "prefix": self._prefix, "trouble": "", **self._extras}

    def _publish_trouble(self, topic: Topic, trouble: str) -> None:
        topic.publish((topic.document or self._frame()) | {"trouble": trouble})

    # -- what it reads

    def _watch(self, run_id: str) -> Watch:
        return self._watches.get(run_id) or Watch(self._connection, self._keys(run_id))

    def _keys(self, run_id: str) -> RunKeys:
        try:
            return RunKeys(run_id, self._prefix)
        except ValueError as e:
            raise UnknownRunError(str(e)) from e

    async def _read(self, run_id: str, pace: float | None = None, *, has_page: bool = False) -> Watch:
        """Read a run, and keep it if it exists; its ``trouble`` says why it cannot be read.

        Args:
            run_id: its id.
            pace: as for :meth:`Watch.is_due`, if another task's last read will do; None to read in any case.
            has_page: whether somebody looks at its page.
        """
        async with self._turn:  # for each run anew: of many runs, none keeps the others waiting
            watch = self._watch(run_id)
            if pace is not None and not watch.is_due(pace):
                return watch
            try:
                await asyncio.to_thread(watch.read, has_page=has_page)
            finally:  # even if Redis is away
                self._watches[run_id] = watch
            if isinstance(watch.trouble, UnknownRunError):
                del self._watches[run_id]
            return watch

    async def _list(self) -> None:
        if time.monotonic() - self._listed_at < LIST_PACE:
            return
        found = await asyncio.to_thread(list_runs, self._connection, self._prefix)
        self._listed_at = time.monotonic()
        listed = sorted(found, key=lambda run_id: run_id not in self._watches)[:LISTED]  # new ones displace no other
        self._unlisted = len(found) - len(listed)
        for run_id in self._watches.keys() - set(listed) - self.runs.keys():
            del self._watches[run_id]
        for run_id in listed:
            with contextlib.suppress(UnknownRunError):  # no run can have that name
                self._watches[run_id] = self._watch(run_id)

    async def _read_rows(self, pace: float, longest: float = float("inf")) -> None:
        """Read the runs that are due, the longest unread first, for at most ``longest`` seconds."""
        ends_at = time.monotonic() + longest
        due = [(watch.read_at, run_id) for run_id, watch in self._watches.items() if watch.is_due(pace)]
        for _, run_id in sorted(due):
            if time.monotonic() >= ends_at:
                return
            await self._read(run_id, pace)

    def _forget(self) -> None:
        """Drop the runs that no browser has asked for lately."""
        for run_id, watch in list(self._watches.items()):
            if run_id not in self.runs and watch.was_read and time.monotonic() - watch.read_at > KEEP_TIMEOUT:
                del self._watches[run_id]

    # -- until something happens

    def _followed_watches(self) -> list[Watch]:
        of_all = self.overview.followers > 0
        return [watch for run_id, watch in self._watches.items() if of_all or run_id in self.runs]

    async def _wait(self, seconds: float) -> None:
        """Wait until something happens in a watched run, or the time is up."""
        watches = [watch for watch in self._followed_watches() if watch.was_read and watch.trouble is None]
        if any(watch.stirred for watch in watches) or not watches:
            await asyncio.sleep(seconds)
            return
        streams = {watch.keys.events.encode(): watch.event_log.last_id for watch in watches}
        try:
            stirred = await asyncio.to_thread(self._block, streams, seconds)
        except UnreachableError:
            raise
        except RedelasticError:  # the next read says for which run
            await asyncio.sleep(seconds)
            return
        for watch in watches:
            watch.stirred = watch.keys.events.encode() in stirred

    def _block(self, streams: Mapping[bytes, str], seconds: float) -> set[bytes]:
        if not self._connection.is_cluster:
            return set(self._connection.read(streams, seconds))
        share = seconds / len(streams)  # one read covers one slot
        return {key for key, last in streams.items() if self._connection.read({key: last}, share)}


def node_of(watch: Watch, node_id: str) -> dict[str, Any] | None:
    """A node of the run by its id, as ``redelastic status --json`` has it."""
    return next((node for node in watch.report["nodes"] if node["id"] == node_id), None)
