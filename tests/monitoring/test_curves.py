"""What nodes measure becomes curves of the run: by minute, over all nodes, for some hours."""

from __future__ import annotations

import pytest
import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.curves import MINUTE, MINUTES, Curves, measured
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer

NOW = 1_800_000_030.0
THIS = int(NOW // MINUTE)


@pytest.fixture
def control(server: RedisServer, run_id: str) -> RunControl:
    return RunControl(Connection.open(server.url), RunKeys(run_id))


def read(*texts: str) -> dict[int, dict[str, float]]:
    """The points of the last minutes, before this one, of which Redis holds these texts."""
    curves = Curves()
    curves.add(range(THIS - len(texts), THIS), texts)
    return curves.points


def test_what_a_node_measures() -> None:
    workers = [{"step": 7, "idle": 0.5, "state": "running"}, {"step": 6, "idle": 2.0}, {"idle": 99, "state": "exited"}]
    gpus = [{"utilization": 90, "memory_used": 1, "memory_total": 4}, {"utilization": 70}, {"lost": True}]
    status = {"workers": workers, "gpus": gpus, "memory_total": 200, "memory_available": 50}
    assert measured(status) == {"step": 7, "idle": 2.0, "memory": 75.0, "gpu": 80.0, "gpu_memory": 25.0}
    assert measured({}) == {}
    assert measured({"workers": [{"step": "7", "idle": None}], "gpus": [{}], "memory_total": 0}) == {}


def test_the_nodes_of_a_minute_become_one_point(control: RunControl, client: redis.Redis, run_id: str) -> None:
    """Unless a minute ends between two of its calls."""
    key = RunKeys(run_id).curves
    while True:
        began = client.time()[0] // 60
        client.delete(key)
        control.measure({"step": 10**15 + 1, "idle": 0.5, "gpu": 90.0})
        control.measure({"step": 12, "idle": 0.1, "gpu": 70.0, "memory": 30.0})
        if client.time()[0] // 60 == began:
            break
    curves = Curves()
    control.read_curves(curves, MINUTE * (began + 1))
    assert curves.points == {began: {"idle": 0.5, "gpu": 80.0, "memory": 30.0}}, "no speed without the minute before"
    assert f"step={10**15 + 1}/".encode() in client.hgetall(key)[b"%d" % began]
    assert 0 < client.ttl(key) <= MINUTE * MINUTES


def test_old_minutes_go(control: RunControl, client: redis.Redis, run_id: str) -> None:
    key, this = RunKeys(run_id).curves, client.time()[0] // 60
    gone, kept = range(this - MINUTES - 30, this - MINUTES), range(this - MINUTES + 2, this)
    for minute in (*gone, *kept):
        client.hset(key, str(minute), "idle=1/1")
    client.hset(key, "first", str(gone[0]))
    control.measure({"idle": 1.0})
    left = {int(field) for field in client.hkeys(key) if field != b"first"}
    assert left >= set(kept)
    assert left.isdisjoint(gone)
    for first in ("x", "-5", str(this + 10**6)):  # redelastic did not write them
        client.hset(key, "first", first)
        control.measure({"idle": 1.0})
        assert this - MINUTES < int(client.hget(key, "first") or 0) <= this + 1


def test_what_redelastic_did_not_write_ends_no_request(control: RunControl, client: redis.Redis, run_id: str) -> None:
    key, this = RunKeys(run_id).curves, client.time()[0] // 60
    client.hset(key, mapping={str(minute): "idle=x/y step=1 gpu=/ \n=" for minute in (this, this + 1)})
    control.measure({"idle": 1.0, "gpu": 2.0})
    curves = Curves()
    control.read_curves(curves, MINUTE * (this + 2))
    assert {"idle": 1.0, "gpu": 2.0} in curves.points.values()
    client.set(key, "a string")
    control.read_curves(Curves(), MINUTE * this)


def test_the_speed_is_that_between_two_minutes() -> None:
    points = read("step=100/10000", "step=160/60000 idle=1/0", "")
    assert points == {THIS - 2: {"speed": 1.2}}


@pytest.mark.parametrize(
    "later",
    [
        pytest.param("step=90/120000", id="workers make steps again"),
        pytest.param("step=200/60000", id="the server's clock stands still"),
        pytest.param("step=200", id="somebody has cut it"),
    ],
)
def test_no_speed_where_it_is_not_known(later: str) -> None:
    assert read("step=100/60000", later) == {}


@pytest.mark.parametrize("value", ["x", "", "nan", "inf", "1e99", "1" * 40])
def test_a_value_that_is_no_number_is_left_out(value: str) -> None:
    assert read(f"gpu={value}/2 idle=3/7 other=1/1 memory=5/0") == {THIS - 1: {"idle": 3.0}}


def test_only_new_minutes_are_read_and_old_ones_are_forgotten() -> None:
    curves = Curves()
    assert list(curves.missing(NOW)) == list(range(THIS - MINUTES, THIS))
    curves.add(curves.missing(NOW), ["idle=1/1"] * MINUTES)
    assert not curves.missing(NOW)
    assert not curves.missing(NOW - 3 * MINUTE), "the server's clock goes back"
    assert list(curves.missing(NOW + MINUTE)) == [THIS]
    curves.add(curves.missing(NOW + MINUTE), ["idle=3/1"])
    assert curves.points[THIS] == {"idle": 3.0}
    assert len(curves.points) == MINUTES
    assert len(curves.missing(NOW + 10 * MINUTE * MINUTES)) == MINUTES, "after a long time that nobody looked"
