"""`redelastic preflight` as real processes: on one host, and on hosts that are slow, throttled, cut off or hang."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from redelastic.cli import common
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import EXCLUDED, Outlier, Preflight
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.commands import run_command
from tests.support.namespaces import Network, NetworkServer, redis_and_hosts
from tests.support.preflight_draws import FAULTS
from tests.support.preflight_job import Hosts

NAMES = ("vm-a", "vm-b", "vm-c")


def test_three_hosts_measure_themselves_and_each_other(
    server: RedisServer, connection: Connection, run_id: str, tmp_path: Path
) -> None:
    options = ("--nnodes=2:3", "--rdzv-conf=last_call_timeout=100", "--timeout=60", "--size=1", "--exclude")
    with Hosts(server, server.url, run_id, tmp_path, *options, "--require=write=1000000") as hosts:
        hosts.start("vm-a", "vm-b")
        hosts.start("vm-c", options=[f"--path={tmp_path}"])  # no disk writes as fast as required
        ended = hosts.results(*NAMES)
    assert {one.code for one in ended.values()} == {common.NO}, ended
    document = ended["vm-a"].document
    assert sorted(host["host"] for host in document["hosts"]) == sorted(NAMES)
    measures, written = {"compute", "memory", "send", "receive", "latency"}, f"write:{tmp_path}"
    figures = {host["host"]: set(host["figures"]) for host in document["hosts"]}
    assert figures == {"vm-a": measures, "vm-b": measures, "vm-c": measures | {written}}
    assert set(document["medians"]) == measures | {written}
    assert document["unmeasured"] == []
    assert document["group"]["hosts"] == len(NAMES)
    assert [found["host"] for found in document["outliers"] if found["required"]] == ["vm-c"]
    bad = {found["host"] for found in document["outliers"]}  # on a busy machine, perhaps more
    assert document["excluded"] == (len(bad) == 1)
    control = RunControl(connection, RunKeys(run_id))
    excluded = {name for name in NAMES if control.failures(name) >= EXCLUDED}
    assert excluded == (bad if document["excluded"] else set())
    for name, one in ended.items():
        assert one.document["self"]["host"] == name
        assert {**one.document, "self": {}, "seconds": 0} == {**document, "self": {}, "seconds": 0}
    events = control.events()
    assert isinstance(events[-1], Preflight)
    assert (set(events[-1].outliers), events[-1].excluded) == (bad, document["excluded"])
    assert all(isinstance(event, Outlier) for event in events[:-1])
    assert any(event.node == "vm-c" and event.required == 1e6 for event in events[:-1] if isinstance(event, Outlier))
    assert not list(tmp_path.glob(".redelastic-*"))


def test_a_preflight_waits_for_a_missing_host_and_measures_nothing(
    server: RedisServer, run_id: str, tmp_path: Path
) -> None:
    options = ("--nnodes=2", "--rdzv-conf=join_timeout=3")
    with Hosts(server, server.url, run_id, tmp_path, *options) as hosts:
        hosts.start("vm-a")
        alone = hosts.results("vm-a")["vm-a"]
    assert alone.code == common.UNMEASURED
    assert "fewer than 2 nodes joined" in alone.errors


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--nnodes=0", "--nnodes=0 is invalid"),
        ("--require=speed=1", "--require=speed=1 is invalid"),
        ("--timeout=0", "--timeout=0 is out of range"),
        ("--size=0", "--size=0 is out of range"),
        ("--rdzv-conf=x", "--rdzv-conf=x is invalid"),
    ],
)
def test_a_wrong_option_is_refused(argument: str, message: str) -> None:
    done = run_command("preflight", "--rdzv-id=j", "--nnodes=2", argument)
    assert done.code == common.USAGE
    assert message in done.err


@pytest.fixture
def network() -> Iterator[Network]:
    with redis_and_hosts(*NAMES, "vm-d") as network:
        yield network


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", FAULTS)
def test_the_bad_host_is_named(network: Network, run_id: str, tmp_path: Path, kind: str) -> None:
    names = (*NAMES, "vm-d")
    with NetworkServer(network.addresses["redis"]) as server, ExitStack() as faults:
        endpoint = f"redis://:{server.password}@{server.endpoint}"
        options = ("--nnodes=4", "--timeout=20", "--size=1")
        hosts = faults.enter_context(Hosts(server, endpoint, run_id, tmp_path, *options, network=network))
        FAULTS[kind](network, hosts, "vm-c", names, faults)
        others = [name for name in names if name != "vm-c"]
        for one in hosts.results(*others).values():
            named = {found["host"] for found in one.document["outliers"]}  # on a busy machine, perhaps more
            assert "vm-c" in named, one
            assert one.code == common.NO
