"""`redelastic doctor` on servers that are fit and on servers that are not; it leaves each as it was."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from redelastic import cli
from redelastic.cli import doctor as command
from redelastic.doctor import LEVELS, Finding, rights
from redelastic.redis.server import RedisServer
from tests.support.doctoring import examined, names_at, problems, unchanged
from tests.support.faulty_proxy import Fault
from tests.support.peers import lossy_proxy
from tests.support.servers import HOST, frozen, redis_cluster, replica_of, reserved_port, sentinel_group, wait_until


def run_doctor(*argv: str) -> int:
    return cli.main(["doctor", *argv])


# -- Servers that are fit


def test_a_good_server_is_found_fit_and_left_as_it_was(every_server: RedisServer) -> None:
    with every_server.get_client() as client:
        before = client.dbsize()
        found = examined(every_server.url)
        assert not problems(found)
        assert not [finding for finding in found.values() if "unknown" in finding.found]
        for name in ("latency", "rights", "rendezvous", "bootstrap", "store", "wake-up", "version", "eviction"):
            assert found[name].level == "ok", found[name]
        info = client.info()
        assert found["version"].found.endswith(info.get("valkey_version", info["redis_version"]))
        assert 0 < found["latency"].numbers["median_ms"] <= found["latency"].numbers["max_ms"]
        assert found["rendezvous"].numbers["ms"] > 0
        assert found["store"].numbers.keys() == {f"{n}_ms" for n in ("set", "get", "add", "wait", "compare_set")}
        assert client.dbsize() == before
        assert not client.keys("*doctor*")


def test_repeated_examinations_leave_nothing_behind(own_server: RedisServer) -> None:
    with unchanged(own_server):
        for _ in range(5):
            assert examined(own_server.url)["rendezvous"].level == "ok"


def test_keys_that_could_not_be_removed_expire(own_server: RedisServer) -> None:
    with lossy_proxy(own_server) as (url, through), own_server.get_client() as client:
        through.proxy.add(
            Fault(b"wake-0", keep=None, meanwhile=lambda: client.execute_command("ACL SETUSER default -del"))
        )
        examined(url)
        left = client.keys("*")
        assert len(left) > 10
        assert all(0 < client.ttl(key) <= rights.TTL for key in left)


def test_a_persistent_server_behind_a_unix_socket_has_no_warnings(tmp_path: Any) -> None:
    with RedisServer(unix_socket=True, data_dir=tmp_path) as server, unchanged(server):
        found = examined(server.url)
        assert names_at(found, "warning") <= {"shared-memory", "open-files"}
        assert not problems(found)
        assert found["persistence"].found == "append-only file"


def test_a_master_that_sentinels_watch() -> None:
    with sentinel_group() as group, unchanged(group.master()):
        found = examined(group.url)
        assert not problems(found)
        assert "sentinels" in found["topology"].found
        assert found["replicas"].level == "warning"
        assert "min-replicas-to-write is 0" in found["replicas"].found
        sentinel = f"redis://:{group.sentinel_password}@{HOST}:{group.sentinel_ports[0]}"
        wrong = examined(sentinel)
        assert "redis+sentinel://" in wrong["topology"].advice
        assert problems(wrong) == {"topology"}


def test_a_cluster_and_one_node_of_it() -> None:
    with redis_cluster() as cluster, contextlib.ExitStack() as stack:
        for server in cluster.servers:
            clients = stack.enter_context(server.get_client())
            clients.config_set("maxmemory-policy", "noeviction")
        found = examined(cluster.url)
        assert not problems(found)
        assert found["topology"].found == "a Cluster"
        assert found["cluster"].found == "ok, 3 masters"
        with cluster.servers[1].get_client() as client:
            client.config_set("maxmemory-policy", "allkeys-lru")
        worst = examined(cluster.url)["eviction"]
        assert worst.level == "warning"
        assert cluster.servers[1].endpoint in worst.found
        single = examined(cluster.servers[0].url)
        assert problems(single) == {"topology"}
        assert "redis+cluster://" in single["topology"].advice
        for server in cluster.servers:
            with server.get_client() as client:
                assert client.dbsize() == 0


# -- Servers that are not fit


@pytest.mark.parametrize(
    ("config", "name", "level", "said"),
    [
        ({"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb"}, "eviction", "problem", "noeviction"),
        ({"maxmemory-policy": "allkeys-lru"}, "eviction", "warning", "noeviction"),
        ({"maxmemory-policy": "volatile-ttl", "maxmemory": "100mb"}, "eviction", "warning", "noeviction"),
        ({"save": "3600 1"}, "persistence", "note", "appendonly"),
        ({}, "persistence", "warning", "appendonly"),
        ({"maxclients": "7"}, "clients", "problem", "maxclients"),
        ({"maxclients": "50"}, "clients", "warning", "maxclients"),
        ({"timeout": "10"}, "idle-timeout", "note", "timeout 0"),
        ({"hz": "5"}, "hz", "warning", "hz 10"),
        ({"lua-time-limit": "10"}, "script-limit", "note", "BUSY"),
        ({"client-output-buffer-limit": "normal 1mb 0 0"}, "output-limit", "warning", "0 for normal"),
    ],
)
def test_the_finding_of_each_setting(config: dict[str, str], name: str, level: str, said: str) -> None:
    with RedisServer(config=config) as server, unchanged(server):
        finding = examined(server.url)[name]
        assert finding.level == level, finding
        assert said in finding.advice


def test_the_tutorials_server_has_the_warnings_that_the_tutorial_quotes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    [lines] = re.findall(r"printf '(.+)' \| redis-server -", page)
    config = dict(line.split(" ", 1) for line in lines.replace("\\n", "\n").splitlines())
    del config["requirepass"]  # RedisServer sets one of its own
    with RedisServer(config=config) as server:
        found = examined(server.url.replace(HOST, "0.0.0.0"))  # noqa: S104  # this host, by an address that is not loopback
    warnings = [one for one in found.values() if one.group == "server" and one.level not in {"ok", "note"}]
    assert {one.name for one in warnings} == {"encryption", "persistence"}
    said = "".join(f"  {one.name}: {one.found}\n    {one.advice}\n" for one in warnings)
    assert f"```text\n2 warnings\n{said}```" in page


def test_the_nodes_of_its_trial_log_nothing(own_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """The output is the findings, without lines of a job's log."""
    assert examined(own_server.url)["rendezvous"].level == "ok"
    assert caplog.records == []


def test_a_full_server_is_a_problem_of_each_finding_that_it_causes() -> None:
    with RedisServer(config={"maxmemory": "1mb"}) as server, server.get_client() as client:
        found = examined(server.url)
        assert problems(found) == {"memory", "rendezvous", "store"}
        assert "maxmemory" in found["rendezvous"].advice  # in other words on Redis 6.2
        assert "maxmemory" in found["memory"].advice
        assert client.dbsize() == 0


def test_a_master_that_waits_for_its_replicas_is_a_problem() -> None:
    with RedisServer(config={"min-replicas-to-write": "1"}) as server:
        found = examined(server.url)
        assert problems(found) == {"replicas"}
        assert found["rendezvous"].found == "skipped because of replicas"
        assert "writes are refused" in found["replicas"].found


def test_a_failed_snapshot_is_a_problem(own_server: RedisServer) -> None:
    with own_server.get_client() as client:
        client.config_set("save", "3600 1")
        Path(client.config_get("dir")["dir"], "dump.rdb").mkdir()  # a snapshot cannot replace a folder, not even root's
        client.bgsave()
        wait_until(lambda: client.info()["rdb_last_bgsave_status"] == "err", "the snapshot failed")
        found = examined(own_server.url)
        assert problems(found) == {"reachable"}
        assert found["reachable"].found == "yes, but it refuses the login"
        assert "MISCONF" in found["reachable"].advice
        client.config_set("stop-writes-on-bgsave-error", "no")
        found = examined(own_server.url)
        assert not problems(found)
        assert found["persistence"].found == "the last snapshot failed"
        client.config_set("save", "")  # else the server would not end before it has saved


def test_a_replica_is_a_problem_and_gets_no_trial(own_server: RedisServer) -> None:
    with replica_of(own_server) as replica, unchanged(own_server):
        found = examined(replica.url)
        assert problems(found) == {"role"}
        assert found["rendezvous"].found == "skipped because of role"


# -- No server


def test_a_wrong_password_is_unreachable_and_the_host_is_shown(
    server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_doctor("--endpoint", f"redis://:wr0ng-secret@{server.endpoint}")
    out = capsys.readouterr().out
    assert code == 3
    assert "refused the login" in out
    assert "wr0ng-secret" not in out
    assert "torchrun" in out


def test_a_closed_port_is_unreachable_and_the_host_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with reserved_port() as port:
        assert run_doctor("--endpoint", f"{HOST}:{port}", "--json") == 3
    found = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}
    assert found["reachable"]["level"] == "problem"
    assert "Check that it runs there" in found["reachable"]["advice"]
    assert {finding["group"] for name, finding in found.items() if name != "reachable"} == {"host"}


@pytest.mark.parametrize(
    ("before", "request_"),
    # connecting sends a PING too
    [(b"INFO", b"PING"), (b"", b"probe-string"), (b"probe-string", b""), (b"", b":leases")],
    ids=["round trips", "rights", "a rendezvous", "its first request"],
)
def test_a_server_that_freezes_midway_ends_the_examination_with_the_findings(
    before: bytes, request_: bytes, own_server: RedisServer
) -> None:
    """It stands still from the first such request on after another one."""
    with contextlib.ExitStack() as stack, lossy_proxy(own_server) as (url, through):
        freezes = Fault(request_, lose_request=True, meanwhile=lambda: stack.enter_context(frozen(own_server)))
        through.proxy.add(Fault(before, keep=None, meanwhile=lambda: through.proxy.add(freezes)))
        started = time.monotonic()
        found = examined(url)
        assert freezes.fired.is_set()
        assert time.monotonic() - started < 30  # ten seconds, and time for a busy machine
    assert problems(found) == {"reachable"}
    assert found["reachable"].found == "no longer"
    assert found["version"].level == "ok"
    assert found["torch"].level == "ok"


def test_a_bad_endpoint_or_run_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--endpoint", "http://example") == 2
    assert run_doctor("--endpoint", HOST, "--run", "a b") == 2
    assert capsys.readouterr().err.count("\n") == 2


def test_an_interrupt_removes_the_keys(own_server: RedisServer) -> None:
    with unchanged(own_server), lossy_proxy(own_server) as (url, through):
        of_store = through.proxy.add(
            Fault(b"value-second", keep=None, meanwhile=lambda: os.kill(os.getpid(), signal.SIGINT))
        )
        assert run_doctor("--endpoint", url) == 130
        assert of_store.fired.is_set()


# -- What is printed


def test_json_is_a_list_with_numbers_as_numbers(server: RedisServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_doctor("--endpoint", server.url, "--json") == 0
    found = json.loads(capsys.readouterr().out)["findings"]
    for finding in found:
        assert finding.keys() == {"group", "name", "level", "found", "advice", "numbers"}
        assert finding["level"] in LEVELS
        assert all(isinstance(number, int | float) for number in finding["numbers"].values())
    assert server.password not in json.dumps(found)


def test_a_pipe_gets_whole_lines_without_colours_and_problems_last(capsys: pytest.CaptureFixture[str]) -> None:
    config = {"maxmemory-policy": "allkeys-lru", "maxmemory": "100mb", "hz": "5"}
    with RedisServer(config=config) as server:
        assert run_doctor("--endpoint", server.url) == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert out.rstrip().endswith("Set maxmemory-policy noeviction.")
    assert out.index("warnings") < out.index("1 problem\n")


def test_control_characters_of_the_server_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = Finding("server", "reachable", "problem", "\x1b[2J[bold]x\r\n", "\x07[/]\x9b31m")
    command._show([hostile])
    out = capsys.readouterr().out
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", out)
    assert "\\x1b[2J[bold]x" in out


def test_a_narrow_terminal_wraps_and_loses_nothing() -> None:
    narrow = io.StringIO()
    console = Console(file=narrow, width=80, force_terminal=True, highlight=False, color_system=None)
    findings = [Finding("server", "eviction", "problem", "word " * 40 + "end", "advice " * 40 + "last")]
    command._show_table(console, findings)
    command._show_what_to_do(console, findings)
    lines = narrow.getvalue().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert narrow.getvalue().count("word") == 80
    assert narrow.getvalue().count("advice") == 40
