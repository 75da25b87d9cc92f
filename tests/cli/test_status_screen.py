"""What `redelastic status` prints: whatever anyone wrote into a run, at every width."""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any

import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from redelastic.monitoring.events import Event, Hung, Left
from redelastic.monitoring.report import describe
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.commands import running_command, until
from tests.support.long_tests import examples
from tests.support.nodes import NodeFactory
from tests.support.status_screens import node_of, run_of, shown, workers

GIB = 2**30
HOSTILE = "\x1b[2J[bold]\x9b\n\u202e"
INVISIBLE = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}  # categories of signs that a terminal may obey
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -1, float("nan"), float("inf"), 1e308])
WORDS = st.text() | st.just(HOSTILE)
JSON = (
    NUMBERS
    | WORDS
    | st.none()
    | st.booleans()
    | st.lists(NUMBERS | WORDS, max_size=2)
    | st.dictionaries(WORDS, NUMBERS, max_size=2)
)


def made_of(*names: str, **more: Any) -> Any:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON) | more)


WORKER = made_of("local_rank", "rank", "pid", "state", "step", "idle", "step_time", "own_time", "cpu", "memory")
GPU = made_of(
    "index", "uuid", "memory_used", "memory_total", "utilization", "temperature", "ecc", "xid", "xids", "lost"
)


STATUS = made_of(
    *("pid", "agent", "restarts", "cpu", "memory", "memory_available", "memory_total"),
    workers=JSON | st.lists(WORKER, max_size=3),
    gpus=JSON | st.lists(GPU, max_size=3),
)


@settings(max_examples=examples(150))
@given(STATUS, WORDS, st.sampled_from(["member", "candidate", "spare"]))
def test_no_status_crashes_it_or_gets_to_the_terminal(status: dict[str, Any], word: str, standing: str) -> None:
    names = {"name": word, "host": word, "state": word}
    broken = Left(node=word, reason=word)
    hostile = run_of(node_of(1, standing=standing, **status | names), broken=broken, failures={word: 1}, barred=[word])
    events = Hung(node=word, message=word, stacks=word), Event(event=word, node=word)
    out = shown(hostile, *events, width=140)
    assert {unicodedata.category(sign) for sign in out.replace("\n", "")}.isdisjoint(INVISIBLE)
    document = json.loads(json.dumps(describe(hostile, events, 1.7e9), allow_nan=False))
    [node] = document["nodes"]
    for name in ("pid", "restarts", "cpu", "memory", "memory_available", "memory_total", "step", "idle"):
        assert node[name] is None or isinstance(node[name], int | float)


def test_markup_is_text() -> None:
    assert "[bold red]closed[/]" in shown(run_of(node_of(0), broken=Left(reason="[bold red]closed[/]")))


@pytest.mark.parametrize(
    ("step", "now", "shows"),
    [
        pytest.param(47, {}, True, id="all steps were made before"),
        pytest.param(48, {}, False, id="it has made a new step since"),
        pytest.param(47, {"closed": Left(cause="finished")}, False, id="it has ended"),
    ],
)
def test_restarts_without_progress_count_until_there_is_some(step: int, now: dict[str, Any], shows: bool) -> None:
    run = run_of(node_of(0, workers=workers(step)), idle=2, progress=48, **now)
    assert ("the last 2 restarts made no progress" in shown(run)) == shows


RICH_STATUS: dict[str, Any] = {
    "restarts": 1,
    "cpu": 780.2,
    "memory": 31 * GIB,
    "memory_total": 1007 * GIB,
    "workers": workers(412, 412, state="running"),
    "gpus": [
        {"index": i, "utilization": 98, "memory_used": 71 * GIB, "memory_total": 80 * GIB, "temperature": 66}
        for i in range(8)
    ],
}


@pytest.mark.parametrize("width", [80, 140])
def test_it_fits_a_terminal(width: int) -> None:
    out = shown(
        run_of(*(node_of(i, **RICH_STATUS) for i in range(4))), width=width, force_terminal=True, color_system=None
    )
    lines = out.splitlines()
    assert max(map(len, lines)) <= width
    assert (
        len([line for line in lines if re.match(r" +\d  ?host-000\d .*running.*412.*780%.*31\.0G.*8: 98%.*66°C", line)])
        == 4
    )


def test_a_thousand_nodes() -> None:
    nodes = [node_of(i, **RICH_STATUS) for i in range(1000)]
    nodes[700] = node_of(700, gpus=[{"index": 0, "xid": 1}])
    nodes[900] = node_of(900, silence=5.0)
    out = shown(run_of(*nodes))
    rows = [line for line in out.splitlines() if re.match(r" *\d+ host-", line)]
    assert len(rows) == 25
    assert [row.split()[1] for row in rows[-2:]] == ["host-0700", "host-0900"]
    assert "and 975 more nodes (--all)" in out
    assert "! host-0700 (rank 700) GPU 0 has 1 Xid error\n" in out
    assert "! host-0900 (rank 900) silent for 5.0 s: its lease expires in 1.0 s\n" in out
    assert (
        len([line for line in shown(run_of(*nodes), rows=None).splitlines() if re.match(r" *\d+ host-", line)]) == 1000
    )


def test_a_thousand_nodes_with_something_wrong() -> None:
    out = shown(run_of(*(node_of(i, silence=5.0) for i in range(1000))))
    assert out.count("! ") == 9
    assert "and 991 more (--json has all)" in out
    assert "and 975 more nodes, 975 of them with problems (--all)" in out


def test_nodes_on_one_host_are_distinguished() -> None:
    out = shown(run_of(*(node_of(i, name="host") for i in range(2))))
    assert "host-0000-7 " in out
    assert "host-0001-7 " in out


def test_a_pipe_gets_no_colours_and_nothing_cut(
    server: RedisServer, new_node: NodeFactory, client: redis.Redis, keys: RunKeys
) -> None:
    new_node(1, 1).next_rendezvous()
    reason = 200 * "long "
    client.xadd(keys.events, {"event": "refused", "reason": reason})
    with running_command("status", keys.run_id, "--endpoint", server.url) as one:
        assert one.process.wait(60) == 0
        one.until(reason.strip())
        assert "\x1b" not in one.out
    with running_command("status", keys.run_id, "--endpoint", server.url, columns=80) as one:
        assert one.process.wait(60) == 0
        until(lambda: "\x1b[1;32mrunning: round 1" in one.out, "green in a terminal")
