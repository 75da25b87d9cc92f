"""A worker's log as it grows: asked for in Redis, answered by the node, forgotten soon."""

from __future__ import annotations

import pytest
import redis

from redelastic.monitoring.live_logs import MAX_LINES, LiveLog, LiveLogs
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer


@pytest.fixture
def logs(server: RedisServer, run_id: str) -> LiveLogs:
    return LiveLogs(Connection.open(server.url), RunKeys(run_id))


def test_a_node_answers_whoever_asks(logs: LiveLogs, client: redis.Redis, run_id: str) -> None:
    assert logs.wanted("a") is None
    assert logs.ask("a", 1) is None
    assert (logs.wanted("a"), logs.wanted("b")) == (1, None)
    logs.answer("a", LiveLog(1, "/log", "step 7\nstep 8"))
    assert logs.ask("a", 1) == LiveLog(1, "/log", "step 7\nstep 8")
    assert logs.ask("a", 0) is None, "the answer is about another worker"
    assert logs.ask("b", 1) is None
    assert {0 < client.ttl(key) <= 10 for key in RunKeys(run_id).live_log("a")} == {True}


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'["0", "a", "b"]', b'[0, "a"]', b"[" * 9999, b'{"a": 1}'])
def test_what_a_node_did_not_write_is_no_answer(logs: LiveLogs, client: redis.Redis, run_id: str, value: bytes) -> None:
    client.set(RunKeys(run_id).live_log("a")[1], value)
    assert logs.ask("a", 0) is None


def test_what_is_read_is_bounded(logs: LiveLogs) -> None:
    logs.answer("a", LiveLog(0, "", "x" * 2 * MAX_LINES))
    log = logs.ask("a", 0)
    assert log is not None
    assert len(log.lines) == MAX_LINES


@pytest.mark.parametrize("value", [b"x", b"-1", b"1.5", b""])
def test_a_request_that_is_no_rank_is_none(logs: LiveLogs, client: redis.Redis, run_id: str, value: bytes) -> None:
    client.set(RunKeys(run_id).live_log("a")[0], value)
    assert logs.wanted("a") is None
