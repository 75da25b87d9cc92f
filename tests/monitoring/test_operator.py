"""A run in the hands of a program: what it reads is what the commands print as JSON, with the types that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import GenericAlias
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

import redelastic
from redelastic.monitoring import documents, report
from redelastic.monitoring.control import UnknownNodeError, UnknownRunError
from redelastic.monitoring.events import Closed, Completed, Failed, Left, Stopped
from redelastic.monitoring.failure import document as failure_document
from redelastic.monitoring.failure import last_failure
from redelastic.monitoring.sentences import cause_document, event_document
from redelastic.redis.server import RedisServer
from tests.support.commands import Cli, rank_of, until, with_agent
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all

pytest_plugins = ["tests.support.cli_fixtures"]


@pytest.fixture
def run(server: RedisServer, run_id: str) -> Iterator[redelastic.Run]:
    with redelastic.Run(server.url, run_id) as opened:
        yield opened


def check(value: Any, kind: Any, place: str) -> None:
    """The value has the type, with exactly the keys of a document."""
    alternatives = get_args(kind) if get_origin(kind) is Union or type(kind).__name__ == "UnionType" else (kind,)
    if value is None:
        assert type(None) in alternatives, place
        return
    [kind] = [one for one in alternatives if one is not type(None)]
    if hasattr(kind, "__required_keys__"):
        hints = get_type_hints(kind)
        if kind not in {documents.Event, documents.Cause}:  # with the fields of its kind
            assert value.keys() == hints.keys(), place
        for name, hint in hints.items():
            check(value[name], hint, f"{place}.{name}")
    elif isinstance(kind, GenericAlias) and get_origin(kind) is list:
        for item in value:
            check(item, get_args(kind)[0], f"{place}[]")
    elif kind is float:
        assert isinstance(value, int | float), place
    else:
        assert isinstance(value, get_origin(kind) or kind), place


def test_documents_have_their_types(run: redelastic.Run, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
    nodes = [new_node(2, 2) for _ in range(2)]
    workers = [{"rank": 0, "local_rank": 0, "state": "running", "step": 7, "idle": 0.1, "memory": 5.5}, {}]
    status = {"agent": "redelastic", "workers": workers, "gpus": [{"index": 0, "xids": {"79": 1}}, {}], "cpu": 3.5}
    for node in nodes:
        node.node.describe = lambda base: json.dumps(base | status)
    join_all(pool, *nodes)
    failed = Failed(rank=1, exit_code=3, message="no memory", node=nodes[0].node.id)
    run.control.note(failed)
    nodes[0].end(Left(cause="failed"), "goes on")
    found = run.status()
    check(found, documents.Status, "status")
    assert any(node["workers"] and node["gpus"] for node in found["nodes"])
    check(run.logs(), documents.Logs, "logs")
    for event in run.events():
        check(json.loads(json.dumps(event_document(event))), documents.Event, event.event)
    check(json.loads(json.dumps(cause_document(Closed(cause="asked")))), documents.Cause, "cause")
    check(failure_document(last_failure(run.events())), documents.Failure | None, "failure")
    check(report._worker({}), documents.Worker, "worker")
    check(report._gpu({}), documents.Gpu, "gpu")


def test_it_reads_what_the_commands_print(run: redelastic.Run, cli: Cli, new_node: NodeFactory) -> None:
    new_node(1, 1).next_rendezvous()
    printed, read = cli("status", run.id, "--json").json, run.status()
    assert printed.keys() == {*read, "version"}
    assert [printed[name] for name in ("phase", "epoch", "size", "events")] == [
        read["phase"],
        read["epoch"],
        read["size"],
        json.loads(json.dumps(read["events"])),
    ]
    assert cli("logs", run.id, "--json").json["logs"] == run.logs()["logs"]
    assert [event["id"] for event in cli("events", run.id, "--json").json["events"]] == [e.id for e in run.events()]


def test_events_as_they_come_until_the_run_is_closed(
    run: redelastic.Run, server: RedisServer, new_node: NodeFactory, pool: ThreadPoolExecutor
) -> None:
    node = new_node(1, 1)
    node.next_rendezvous()
    coming = run.follow()
    past = run.follow("0")
    assert isinstance(next(event for event in past if event.event == "completed"), Completed)
    with redelastic.Run(server.url, run.id) as another:
        waiting = pool.submit(another.wait)
        nothing = run.wait(0.01)
        assert nothing["phase"] == "running", "the timeout is over"
        closing = run.close(reason="enough")
        assert (closing.before, closing.stopped, closing.saves) == (False, False, None)
        assert isinstance(next(coming), Closed)
        assert waiting.result(60)["phase"] == "closed"
    again = run.close(stop=True, reason="now")
    assert (again.before, again.stopped) == (True, True)
    assert isinstance(run.events(1)[0], Stopped)


def test_a_node_is_drained(run: redelastic.Run, new_node: NodeFactory, pool: ThreadPoolExecutor) -> None:
    nodes = [with_agent(new_node(1, 2)), new_node(1, 2)]
    join_all(pool, *nodes)
    able, unable = (str(rank_of(node.node)) for node in nodes)
    refused = run.drain(unable)
    assert (refused.can_drain, refused.asked) == (False, False)
    request = run.drain(able, reason="a spot notice")
    assert (request.node.id, request.can_drain, request.asked) == (nodes[0].node.id, True, True)
    waiting = pool.submit(request.wait)
    until(lambda: nodes[0].node.view.drains, "it is asked")
    nodes[0].end(Left(cause="drained"), "goes on")
    assert waiting.result(60) == ""
    with pytest.raises(UnknownNodeError, match="no node 'x'"):
        run.drain("x")
    with pytest.raises(UnknownNodeError, match="no host has any"):
        run.readmit("a")


def test_nothing_is_known_of_the_run(run: redelastic.Run) -> None:
    for ask in (run.status, run.events, run.logs, run.history, run.checkpoint, run.close, run.wait):
        with pytest.raises(UnknownRunError, match="has no run"):
            ask()


def test_a_bad_run_id_is_refused_before_redis_is_asked() -> None:
    with pytest.raises(ValueError, match="run id"):
        redelastic.Run("127.0.0.1:1", "a{b}")
