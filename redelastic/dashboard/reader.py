"""Reads Redis for the dashboard: one reader, however many look, and none while nobody does."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final

from redis import RedisCluster
from torch.distributed.elastic.rendezvous.api import RendezvousError, RendezvousStateError

from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.run.chronicle import Chronicle
from redelastic.run.control import RunControl, UnknownRunError, list_runs
from redelastic.run.records import Event, Node
from redelastic.run.report import corrupt, describe, summary

from . import view
from .feed import Document, Topic

log = logging.getLogger(__name__)

PACE: Final = 1.0  # between two looks at a run that somebody watches, if nothing happens there, in seconds
SLOW_PACE: Final = 3.0  # the same for a run of which only the list is looked at
LIST_PACE: Final = 3.0  # between two searches for new runs, in seconds
REST: Final = 4.0  # a look that takes long is followed by a rest of so many times that: a fifth of a core at most
RETRY: Final = 1.0  # while Redis is away, in seconds


class Watch:
    """One run, and what has been read of it.

    Args:
        connection: to Redis.
        keys: of the run.
    """

    def __init__(self, connection: Connection, keys: RunKeys) -> None:
        self.keys = keys
        self._control = RunControl(connection, keys)
        self.chronicle = Chronicle(self._control)
        self.nodes: Sequence[Node] = ()
        self.now = 0.0  # on the server's clock, as it was read
        self._speed = view.Speed()
        self._origin: float | None = None
        self.summary: Document = {}  # as `redelastic list --json` has it
        self.report: Document = {}  # as `redelastic status --json` has it
        self.row: Document = {}
        self.page: Document = {}
        self.read_at = float("-inf")  # on the monotonic clock
        self.cost = 0.0  # of the last look, in seconds
        self.stirred = False  # whether something has happened since

    def read(self) -> None:
        """Look at the run; blocks.

        Raises:
            UnknownRunError, RendezvousConnectionError, RendezvousStateError: as for :meth:`RunControl.state`.
        """
        began = time.monotonic()
        self.stirred = False
        run = self._control.state()
        self.chronicle.read()
        history = self.chronicle.history(run)
        self.nodes = run.nodes
        self.summary = summary(run)
        self.report = describe(run, self.chronicle.events, time.time(), history)
        speed = self._speed.take_in(run, self.report["step"])
        if self._origin is None and history:
            self._origin = history.start
        self.page = view.details(run, self.report, history, speed, self._origin or 0.0)
        self.row = view.overview(run, self.report, history, speed)
        self.now = run.time
        self.read_at = time.monotonic()
        self.cost = self.read_at - began

    def is_due(self, pace: float) -> bool:
        """Whether it is time for another look."""
        since = time.monotonic() - self.read_at
        return since >= REST * self.cost and (self.stirred or since >= pace)


class Reader:
    """Reads what somebody looks at, and publishes it; for one event loop.

    Args:
        connection: to Redis, with short time-outs: while a call waits the page cannot say that Redis is away.
        prefix: of the runs' keys.
    """

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection = connection
        self._prefix = prefix
        self._watches: dict[str, Watch] = {}
        self._listed_at = float("-inf")
        self._away = ""
        self._turn = asyncio.Lock()  # of whoever reads
        self._looked_at = asyncio.Event()
        self.overview = Topic()
        self.runs: defaultdict[str, Topic] = defaultdict(Topic)

    # -- for who looks

    def follow(self, run_id: str | None) -> AsyncIterator[str]:
        """What a browser is told, as server-sent events, of a run, or with None of all.

        Raises:
            ValueError: no run can have that id.
        """
        if run_id is not None:
            RunKeys(run_id, self._prefix)
        return self._follow(run_id)

    async def _follow(self, run_id: str | None) -> AsyncIterator[str]:
        topic = self.overview if run_id is None else self.runs[run_id]
        topic.followers += 1
        self._looked_at.set()
        try:
            async for told in topic.follow():
                yield told
        finally:
            topic.followers -= 1

    async def summaries(self) -> list[Document]:
        """The runs, as ``redelastic list --json`` has them.

        Raises:
            RendezvousError: Redis is away.
        """
        async with self._turn:
            await self._list()
            await self._read_rows(PACE)
            return [watch.summary for _, watch in sorted(self._watches.items())]

    async def watch(self, run_id: str) -> Watch:
        """A run, not older than a second.

        Raises:
            UnknownRunError: there is none.
            ValueError: no run can have that id.
            RendezvousError: Redis is away, or the run's keys are corrupt.
        """
        async with self._turn:
            watch = self._watches.get(run_id) or Watch(self._connection, RunKeys(run_id, self._prefix))
            if watch.is_due(PACE):
                await asyncio.to_thread(watch.read)
            self._watches[run_id] = watch
            return watch

    # -- the one that reads

    async def run(self) -> None:
        """Read for ever what somebody looks at."""
        while True:
            await self._looked_at.wait()
            topics = self._followed()
            if not topics:
                self._looked_at.clear()
                continue
            try:
                pause = await self._round()
            except RendezvousError as e:
                self._away = self._away or str(e)
                for topic in [self.overview, *self.runs.values()]:
                    topic.publish((topic.document or {"server": self._connection.name}) | {"trouble": self._away})
                await asyncio.sleep(RETRY)
            except Exception:
                log.exception("The dashboard could not read a run.")
                await asyncio.sleep(RETRY)
            else:
                self._away = ""
                await self._wait(pause)

    def _followed(self) -> list[Topic]:
        for run_id in [run_id for run_id, topic in self.runs.items() if not topic.followers]:
            del self.runs[run_id]  # its document is of then
        if not self.overview.followers:
            self.overview.document = None
        return [topic for topic in (self.overview, *self.runs.values()) if topic.followers]

    async def _round(self) -> float:
        """Look at what is due; returns until when nothing is, in seconds."""
        async with self._turn:
            whole = self.overview.followers > 0
            if whole:
                await self._list()
            for run_id, topic in list(self.runs.items()):
                await self._read_page(run_id, topic)
            if whole:
                await self._read_rows(SLOW_PACE)
                rows = view.listed(watch.row for watch in self._watches.values())
                now = max((watch.now for watch in self._watches.values()), default=time.time())
                self.overview.publish(self._frame() | {"now": now, "runs": rows})
            return PACE / 4 if any(watch.stirred for watch in self._watches.values()) else PACE

    async def _read_page(self, run_id: str, topic: Topic) -> None:
        watch = self._watches.get(run_id) or Watch(self._connection, RunKeys(run_id, self._prefix))
        if not watch.is_due(PACE) and topic.document is not None and not topic.document.get("trouble"):
            return
        try:
            await asyncio.to_thread(watch.read)
        except (UnknownRunError, RendezvousStateError) as e:
            self._watches.pop(run_id, None)
            topic.publish((topic.document or {}) | self._frame() | {"gone": str(e)})
        else:
            self._watches[run_id] = watch
            topic.publish(self._frame(watch) | watch.page)

    def _frame(self, watch: Watch | None = None) -> Document:
        now = {"now": watch.now} if watch else {}
        return {"server": self._connection.name, "prefix": self._prefix, "trouble": "", **now}

    async def _list(self) -> None:
        if time.monotonic() - self._listed_at < LIST_PACE:
            return
        found = await asyncio.to_thread(list_runs, self._connection, self._prefix)
        self._listed_at = time.monotonic()
        for run_id in self._watches.keys() - set(found) - self.runs.keys():
            del self._watches[run_id]
        for run_id in found:
            if run_id not in self._watches:
                with contextlib.suppress(ValueError):  # no run of ours has such a name
                    self._watches[run_id] = Watch(self._connection, RunKeys(run_id, self._prefix))

    async def _read_rows(self, pace: float) -> None:
        for watch in [watch for watch in self._watches.values() if watch.is_due(pace)]:
            await self._read_row(watch)

    async def _read_row(self, watch: Watch) -> None:
        run_id = watch.keys.run_id
        try:
            await asyncio.to_thread(watch.read)
        except UnknownRunError:
            self._watches.pop(run_id, None)
        except RendezvousStateError as e:
            watch.summary, watch.row = corrupt(run_id), {"run": run_id, "phase": "corrupt", "why": str(e)}
            watch.read_at = time.monotonic()

    async def _wait(self, seconds: float) -> None:
        """Until something happens in a run, or the time is over."""
        streams = {watch.keys.events.encode(): watch.chronicle.last_id for watch in self._watches.values()}
        if any(watch.stirred for watch in self._watches.values()) or not streams:
            await asyncio.sleep(seconds)
            return
        with contextlib.suppress(RendezvousError):  # the next look says so
            stirred = await asyncio.to_thread(self._block, streams, seconds)
            for watch in self._watches.values():
                watch.stirred = watch.stirred or watch.keys.events.encode() in stirred

    def _block(self, streams: Mapping[bytes, str], seconds: float) -> set[bytes]:
        if not isinstance(self._connection.client, RedisCluster):
            return set(self._connection.read_bytes(streams, seconds))
        share = seconds / len(streams)  # a read is for one slot
        return {key for key, last in streams.items() if self._connection.read_bytes({key: last}, share)}


def event_of(watch: Watch, event_id: str) -> Event | None:
    """An event of the run by its id."""
    return next((event for event in watch.chronicle.events if event.id == event_id), None)


def node_of(watch: Watch, node_id: str) -> dict[str, Any] | None:
    """A node of the run by its id, as ``redelastic status --json`` has it."""
    return next((node for node in watch.report["nodes"] if node["id"] == node_id), None)
