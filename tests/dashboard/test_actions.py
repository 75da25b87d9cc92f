"""What the dashboard may be asked to do to a run, by whom, and what the run then knows of it."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from redelastic.dashboard.actions import MAX_ACTIONS, Action, Actions, BusyError
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Drain, Left, Save, Saved, Stopped
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, STOPPED, AgentJob
from tests.support.browsing import dashboard
from tests.support.nodes import NodeFactory
from tests.support.servers import frozen

TOKEN = "a-token-of-enough-characters"
# The code of the answer; the body and the headers of the request; a part of the answer.
Wrong = tuple[int, Any, Mapping[str, str], str]
CLOSE = {"action": "close", "by": "Ada"}
CLOSING = Action("close", "Ada")


@pytest.fixture(scope="module")
def url(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A dashboard that allows actions."""
    file = tmp_path_factory.mktemp("secret") / "token"
    file.write_text(TOKEN)
    with dashboard(f"--endpoint={server.url}", f"--token-file={file}", "--allow-actions") as (found, _):
        yield found


def request(
    url: str, run: str, body: Any, headers: Mapping[str, str] = MappingProxyType({})
) -> tuple[int, dict[str, Any]]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}", **headers}
    asked = urllib.request.Request(f"{url}api/runs/{run}", sent, given, method="POST")  # noqa: S310
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.loads(e.read())


@pytest.mark.fault("an operator acts by the dashboard", "each act is an event that names the person; a job saves first")
def test_a_job_saves_drains_a_node_and_is_stopped(url: str, server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2") as job:
        job.begin("a", "b")
        job.wait_round("ab")
        asked = {"by": "Ada", "reason": "to try"}
        code, answer = request(url, job.run_id, {"action": "checkpoint", **asked})
        assert (code, answer["text"]) == (200, f"Run {job.run_id!r}: the workers of 2 nodes have saved.")
        assert job.wait_event(Save).reason == "by Ada at 127.0.0.1, on the dashboard: to try"
        assert job.events(Saved)

        code, answer = request(url, job.run_id, {"action": "drain", "node": job.id_of("b"), **asked})
        assert (code, "was asked to drain" in answer["text"]) == (200, True)
        assert job.wait_end("b") == DRAINED
        assert job.wait_event(Drain).reason == "by Ada at 127.0.0.1, on the dashboard: to try"

        code, answer = request(url, job.run_id, {"action": "stop", **asked})
        assert (code, "its nodes end their workers" in answer["text"]) == (200, True)
        assert job.wait_end("a") == STOPPED
        assert job.wait_event(Stopped).reason == "by Ada at 127.0.0.1, on the dashboard: to try"
        assert {event.cause for event in job.events(Left)} == {"drained", "closed"}


@pytest.mark.parametrize(
    "wrong",
    [
        (403, CLOSE, {"Origin": "http://evil.example"}, "pages of http://evil.example are refused"),
        (403, CLOSE, {"Origin": "null"}, "pages of null are refused"),
        (415, CLOSE, {"Content-Type": "text/plain"}, "application/json"),
        (413, b" " * 20_000, {}, "at most 10000 bytes"),
        (400, b"[" * 9_000, {}, ""),  # what it says depends on the version of Python
        (400, b"{", {}, "Expecting property name"),
        (400, [], {}, "checkpoint, drain, close, stop"),
        (400, {"action": "delete", "by": "Ada"}, {}, "checkpoint, drain, close, stop"),
        (400, {"action": "close", "by": " "}, {}, "who asks"),
        (400, CLOSE | {"reason": 1}, {}, "texts"),
        (404, {"action": "drain", "by": "Ada", "node": "nobody"}, {}, "has no node 'nobody'"),
    ],
)
def test_a_request_that_changes_nothing(url: str, new_node: NodeFactory, wrong: Wrong) -> None:
    code, body, headers, said = wrong
    node = new_node(1, 1)
    node.next_rendezvous()
    found, answer = request(url, node.node.run_id, body, headers)
    assert (found, said in answer["error"]) == (code, True), answer
    control = RunControl(node.node.connection, RunKeys(node.node.run_id))
    assert control.state().closed is None
    assert not control.state().nodes[0].draining


def test_without_the_token_nothing_happens(url: str, new_node: NodeFactory) -> None:
    node = new_node(1, 1)
    node.next_rendezvous()
    with pytest.raises(urllib.error.HTTPError, match="401"):
        urllib.request.urlopen(f"{url}api/runs/{node.node.run_id}", json.dumps(CLOSE).encode(), timeout=30)  # noqa: S310
    assert RunControl(node.node.connection, RunKeys(node.node.run_id)).state().closed is None


def test_a_run_that_is_not_there(url: str) -> None:
    assert request(url, "no-such-run", CLOSE)[0] == 404
    assert request(url, "bad*id", CLOSE)[0] == 404


def test_redis_is_away(own_server: RedisServer, new_node: NodeFactory, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(TOKEN)
    options = (f"--endpoint={own_server.url}", f"--token-file={tmp_path / 'token'}", "--allow-actions")
    new_node(1, 1, url=own_server.url, run_id="away").next_rendezvous()
    with dashboard(*options) as (url, _):
        own_server.kill()
        code, answer = request(url, "away", CLOSE)
        assert (code, "could not be reached" in answer["error"]) == (503, True)
        own_server.start()


def test_too_many_requests_at_once_are_refused(own_server: RedisServer, new_node: NodeFactory) -> None:
    """One that waited for its turn might stop a run long after the person has given up."""
    new_node(1, 1, url=own_server.url, run_id="a").next_rendezvous()

    async def ask_often() -> list[str]:
        asked = Actions(parse_endpoint(own_server.url), "redelastic")
        with frozen(own_server):
            waiting = [asyncio.ensure_future(asked.perform("a", CLOSING, "::1")) for _ in range(MAX_ACTIONS)]
            await asyncio.sleep(0)
            with pytest.raises(BusyError, match=f"{MAX_ACTIONS} requests wait"):
                await asked.perform("a", CLOSING, "::1")
        answers = await asyncio.gather(*waiting)
        assert await asked.perform("a", CLOSING, "::1"), "there is room again"
        asked.close()
        return answers

    assert all("'a'" in answer for answer in asyncio.run(ask_often()))


def test_a_page_of_its_own_may_ask(url: str, new_node: NodeFactory) -> None:
    node = new_node(1, 1)
    node.next_rendezvous()
    code, answer = request(url, node.node.run_id, CLOSE, {"Origin": url.rstrip("/")})
    assert (code, "no new round; running workers may finish" in answer["text"]) == (200, True)
