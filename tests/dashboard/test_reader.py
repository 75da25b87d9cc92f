"""The dashboard's reader: what one run's trouble does to the others, what it keeps, and what all that costs Redis."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import closing
from typing import Any

import pytest
import redis

from redelastic.dashboard import reader as reader_module
from redelastic.dashboard import view
from redelastic.dashboard.reader import Reader
from redelastic.monitoring.records import Run
from redelastic.redis.connection import Connection
from redelastic.redis.errors import CorruptStateError, RedelasticError
from redelastic.redis.keys import DEFAULT_PREFIX
from redelastic.redis.server import RedisServer
from tests.support.crowds import Crowd
from tests.support.faulty_proxy import Fault
from tests.support.job_user import as_user_of
from tests.support.peers import ReplyLoss, lossy_proxy

Story = Callable[[Reader], Awaitable[None]]


def play(connection: Connection, story: Story) -> None:
    """A story with a reader that reads."""

    async def whole() -> None:
        reader = Reader(connection, DEFAULT_PREFIX)
        reading = asyncio.create_task(reader.run())
        await story(reader)
        assert not reading.done()
        reading.cancel()

    asyncio.run(whole())


class Browser:
    """What a browser has been told so far; of a run, or with None of all."""

    def __init__(self, reader: Reader, run_id: str | None) -> None:
        self._updates: AsyncIterator[str] = reader.follow(run_id)
        self.heard: list[str] = []
        self.document: Any = {}

    async def hear(self) -> None:
        text = await anext(self._updates)
        self.heard.append(text)
        kind, _, data = text.partition("\ndata: ")
        if kind == "event: document":
            self.document = json.loads(data)
        elif kind == "event: patch":
            self.document = _patched(self.document, json.loads(data))

    async def until(self, holds: Callable[[Any], object]) -> None:
        while not holds(self.document):
            await self.hear()

    async def close(self) -> None:
        close: Any = self._updates
        await close.aclose()


def _patched(target: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        result[name] = _patched(result.get(name), value)
    return {name: value for name, value in result.items() if value is not None}


async def parked(reader: Reader) -> None:
    """Until it reads nothing any more, and waits for somebody to look."""
    while reader._has_followers.is_set():  # noqa: ASYNC110  (it is not there to be waited for)
        await asyncio.sleep(0.01)


def runs_in(through: ReplyLoss, command: bytes) -> list[str]:
    """The run of each such command that was sent."""
    found = re.compile(rb"\r\n%s\r\n\$\d+\r\n[^{}\r]*\{([^}]*)\}" % command)
    return [run.decode() for request in [*through.proxy.sent] for run in found.findall(request)]


@pytest.fixture
def runs(client: redis.Redis, run_id: str) -> dict[str, Crowd]:
    return {name: Crowd(client, f"{run_id}-{name}", 3, lease=600) for name in "ab"}


class TestTrouble:
    @pytest.mark.fault("the dashboard's user may see one run only", "its page works, and the list says what it needs")
    def test_who_may_not_list_runs_sees_its_own(self, server: RedisServer, runs: dict[str, Crowd]) -> None:
        run_id = runs["a"].keys.run_id
        connection = Connection.open(as_user_of(server, run_id).url)

        async def story(reader: Reader) -> None:
            listed, page = Browser(reader, None), Browser(reader, run_id)
            await listed.until(lambda update: update.get("trouble"))
            assert "needs ~redelastic:* and +scan" in listed.document["trouble"]
            assert listed.document["trouble"].endswith("Here a run's page is /runs/RUN.")
            await page.until(lambda update: update.get("phase") == "running")
            before = page.document["now"]
            await page.until(lambda update: update["now"] > before)
            assert page.document["trouble"] == ""
            assert len(page.document["nodes"]) == 3
            with pytest.raises(RedelasticError, match="scan"):
                await reader.summaries()
            assert (await reader.watch(run_id)).report["run"] == run_id

        play(connection, story)
        connection.close()

    def test_a_run_that_cannot_be_shown_hides_no_other(
        self, connection: Connection, runs: dict[str, Crowd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        good, bad = (runs[name].keys.run_id for name in "ab")
        overview = view.overview

        def fails(run: Run, *rest: Any) -> Mapping[str, Any]:
            if run.run_id == bad:
                raise KeyError("what nobody thought of")
            return overview(run, *rest)

        async def story(reader: Reader) -> None:
            with monkeypatch.context() as patched:
                patched.setattr(view, "overview", fails)
                listed, of_good, of_bad = Browser(reader, None), Browser(reader, good), Browser(reader, bad)
                await of_bad.until(lambda update: "what nobody thought of" in update.get("trouble", ""))
                await of_good.until(lambda update: update.get("phase") == "running")
                await listed.until(lambda update: update.get("runs", {}).keys() >= {good, bad})
                assert listed.document["runs"][good]["phase"] == "running"
                assert listed.document["runs"][bad]["phase"] == "unreadable"
                assert "KeyError" in listed.document["runs"][bad]["why"]
                assert of_good.document["trouble"] == listed.document["trouble"] == ""
                with pytest.raises(RedelasticError, match="KeyError"):
                    await reader.watch(bad)
                phases = {update["run"]: update["phase"] for update in (await reader.summaries())[0]}
                assert (phases[good], phases[bad]) == ("running", "unreadable")
            await of_bad.until(lambda update: update["trouble"] == "")
            assert of_bad.document["phase"] == "running"
            await listed.until(lambda update: update["runs"][bad]["phase"] == "running")

        play(connection, story)

    def test_a_corrupt_run_says_so_also_when_it_was_listed_just_now(
        self, client: redis.Redis, connection: Connection, runs: dict[str, Crowd]
    ) -> None:
        keys = runs["b"].keys
        client.hset(keys.run, "epoch", "x")

        async def story(reader: Reader) -> None:
            phases = {update["run"]: update["phase"] for update in (await reader.summaries())[0]}
            assert (phases[runs["a"].keys.run_id], phases[keys.run_id]) == ("running", "corrupt")
            for _ in range(2):
                with pytest.raises(CorruptStateError, match=keys.run):
                    await reader.watch(keys.run_id)

        play(connection, story)


class TestWhatIsKept:
    def test_only_what_somebody_looks_at_is_waited_for_and_in_the_end_nothing_is_kept(
        self, server: RedisServer, runs: dict[str, Crowd]
    ) -> None:
        asked, followed = runs["a"].keys, runs["b"].keys
        waited: list[set[bytes]] = []

        class Noting(Connection):
            def read(self, streams: Mapping[bytes, str], *rest: Any, **more: Any) -> Any:
                waited.append({*streams})
                return super().read(streams, *rest, **more)

        async def story(reader: Reader) -> None:
            (await reader.watch(asked.run_id)).stirred = True  # something happened there, and nobody asks again
            page = Browser(reader, followed.run_id)
            while len(waited) < 3:
                await page.hear()
            assert waited[:3] == [{followed.events.encode()}] * 3
            await page.close()
            await parked(reader)
            assert reader._watches == {}
            assert reader.runs == {}

        with closing(Noting.open(server.url)) as connection:
            play(connection, story)

    def test_a_run_that_was_asked_for_once_is_let_go(
        self, connection: Connection, runs: dict[str, Crowd], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = (runs[name].keys.run_id for name in "ab")

        async def story(reader: Reader) -> None:
            await reader.watch(first)
            await reader.watch(second)
            assert reader._watches.keys() == {first, second}
            monkeypatch.setattr(reader_module, "KEEP_TIMEOUT", 0.0)
            await reader.watch(second)
            assert reader._watches.keys() == {second}

        play(connection, story)


@pytest.mark.fault("one script of a tenant makes very many runs", "the list is cut, and keeps no page waiting")
class TestManyRuns:
    def test_the_list_is_cut_and_keeps_what_it_has(
        self, own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "LISTED", 3)
        monkeypatch.setattr(reader_module, "LIST_PACE", 0.0)
        with own_server.get_client() as client:
            for name in "xyz":
                Crowd(client, name, 1, lease=600)
            connection = Connection.open(own_server.url)

            async def story(reader: Reader) -> None:
                listed, unlisted = await reader.summaries()
                assert ([update["run"] for update in listed], unlisted) == (["x", "y", "z"], 0)
                for name in "ab":
                    Crowd(client, name, 1, lease=600)
                listed, unlisted = await reader.summaries()
                assert ([update["run"] for update in listed], unlisted) == (["x", "y", "z"], 2)
                page = Browser(reader, None)
                await page.until(lambda update: update.get("runs", {}).keys() == set("xyz") and update["unlisted"] == 2)
                assert (await reader.watch("a")).report["run"] == "a", "its page is there all the same"

            play(connection, story)
            connection.close()

    def test_a_page_waits_for_one_run_of_the_list_at_most(
        self, own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(reader_module, "PACE", 600.0)  # however long it takes to read them all
        with own_server.get_client() as client, lossy_proxy(own_server) as (url, through):
            for i in range(20):
                Crowd(client, f"r{i:02}", 1, lease=600)
            first = through.proxy.add(Fault(b"{r00}:events", keep=None, hold_request=True))

            async def story(reader: Reader) -> None:
                listing = asyncio.create_task(reader.summaries())
                await asyncio.to_thread(first.fired.wait)
                page = asyncio.create_task(reader.watch("r19"))
                await asyncio.sleep(0)  # it is in the queue now
                first.released.set()
                await page
                assert runs_in(through, b"XRE?V?RANGE") == ["r00", "r19"]
                assert len((await listing)[0]) == 20
                order = runs_in(through, b"XRE?V?RANGE")
                assert sorted(order) == sorted({*order}), "each is read once"

            with closing(Connection.open(url)) as connection:
                play(connection, story)

    def test_pages_are_made_of_runs_that_somebody_looks_at(self, server: RedisServer, runs: dict[str, Crowd]) -> None:
        seen, listed_only = (runs[name].keys.run_id for name in "ab")

        async def story(reader: Reader) -> None:
            listed = Browser(reader, None)
            await listed.until(lambda update: update.get("runs", {}).keys() >= {seen, listed_only})
            await reader.summaries()
            assert runs_in(through, b"HMGET") == [], "curves are read for pages only"
            page = Browser(reader, seen)
            await page.until(lambda update: update.get("phase") == "running")
            assert {*runs_in(through, b"HMGET")} == {seen}

        with lossy_proxy(server) as (url, through), closing(Connection.open(url)) as connection:
            play(connection, story)


class TestCost:
    def test_redis_is_read_once_however_many_look_and_not_at_all_while_nobody_does(
        self, own_server: RedisServer
    ) -> None:
        with own_server.get_client() as client:
            crowd = Crowd(client, "r", 3, lease=600)
            connection = Connection.open(own_server.url)

            def calls() -> dict[str, int]:
                update: Any = client.info("commandstats")
                return {
                    name: update.get(f"cmdstat_{name}", {}).get("calls", 0) for name in ("evalsha", "mget", "xrevrange")
                }

            async def story(reader: Reader) -> None:
                pages = [Browser(reader, "r") for _ in range(20)]
                for page in pages:
                    await page.hear()
                before, looks = calls(), 5
                for _ in range(looks):
                    crowd.beat()
                    for page in pages:
                        await page.hear()
                after = calls()
                assert len({*(text for page in pages for text in page.heard)}) <= looks + 2, "all are sent the same"
                for name, n in after.items():
                    assert n - before[name] <= looks + 1, name
                for page in pages:
                    await page.close()
                await parked(reader)
                assert reader._watches == {}

            play(connection, story)
            connection.close()

    def test_what_a_heartbeat_of_all_costs_is_a_part_of_the_page(
        self, client: redis.Redis, connection: Connection, run_id: str
    ) -> None:
        crowd = Crowd(client, run_id, 30, lease=600)

        async def story(reader: Reader) -> None:
            page = Browser(reader, run_id)
            await page.hear()
            crowd.beat()
            await page.until(lambda update: update["step"] == crowd.step)
            whole, patches = len(page.heard[0]), page.heard[1:]
            assert all(patch.startswith("event: patch") for patch in patches)
            assert max(map(len, patches)) < whole / 2
            assert whole < 1200 * 30

        play(connection, story)
