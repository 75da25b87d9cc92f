"""`redelastic doctor` as a user with few rights: what is denied is named, and the rest is examined."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

import pytest

from redelastic.doctor import rights
from redelastic.doctor import server as server_checks
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.errors import ACL_RULES
from redelastic.redis.server import RedisServer
from tests.support.doctoring import examined, problems, unchanged


def add_user(server: RedisServer, rules: str) -> str:
    with server.get_client() as admin:
        admin.execute_command("ACL SETUSER", "job", "reset", "on", ">job-password", *rules.split())
    return f"redis://job:job-password@{server.endpoint}"


def rules_of(run_id: str) -> str:
    return ACL_RULES.replace("<key_prefix>", "redelastic").replace("<run_id>", run_id)


def test_the_readmes_user_of_one_run(own_server: RedisServer) -> None:
    url = add_user(own_server, rules_of("my-job"))
    with unchanged(own_server):
        found = examined(url, "my-job")
    assert not problems(found)
    for name in ("rights", "rendezvous", "bootstrap", "store", "wake-up", "version", "role"):
        assert found[name].level == "ok", found[name]
    assert found["login"].found == "user 'job'"
    assert found["login"].level == "ok"
    for name in ("eviction", "memory", "persistence", "replicas", "clients", "hz"):  # CONFIG and INFO are refused
        assert found[name].level == "note"
        assert "unknown" in found[name].found


def test_a_trial_does_not_disturb_the_run_whose_keys_it_may_use(new_node: Any, server: RedisServer) -> None:
    node = new_node(1, 1, keep_alive_interval=0.2)
    before = node.next_rendezvous()
    found = examined(server.url, node.get_run_id())
    assert found["rendezvous"].level == "ok"
    assert found["store"].level == "ok"
    assert node.num_nodes_waiting() == 0
    assert not node.is_closed()
    assert before.world_size == 1


def test_the_user_of_another_run_is_asked_for_its_name(own_server: RedisServer) -> None:
    found = examined(add_user(own_server, rules_of("my-job")))
    assert problems(found) == {"rights"}
    assert "--run" in found["rights"].advice
    assert found["rendezvous"].found == "skipped because of rights"


def test_commands_that_are_denied_are_named(every_server: RedisServer) -> None:
    url = add_user(every_server, rules_of("my-job") + " -evalsha -hset")
    found = examined(url, "my-job")
    assert problems(found) == {"rights"}
    assert "EVALSHA, HSET" in found["rights"].found
    assert rules_of("my-job") in found["rights"].advice


def test_info_replaces_a_denied_hello(own_server: RedisServer) -> None:
    found = examined(add_user(own_server, rules_of("my-job") + " +info -hello"), "my-job")
    assert not problems(found)
    for name in ("version", "role", "topology", "eviction", "memory", "clients", "hz"):
        assert "unknown" not in found[name].found
    assert found["role"].found == "master"


@pytest.mark.parametrize(
    ("url", "encryption", "login"),
    [
        ("redis://redis.example", "warning", "warning"),
        ("redis://user:secret@redis.example", "warning", "ok"),
        ("rediss://user:secret@redis.example", "ok", "ok"),
        ("redis://localhost", "ok", "note"),
        ("redis+cluster://:secret@[::1]:7000,127.0.0.2:7001", "ok", "ok"),
        ("redis+cluster://:secret@127.0.0.1:7000,redis.example:7001", "warning", "ok"),
        ("unix:///tmp/redis.sock", "ok", "note"),
    ],
)
def test_the_findings_of_encryption_and_login(url: str, encryption: str, login: str) -> None:
    endpoint = parse_endpoint(url)
    assert server_checks._encryption(endpoint).level == encryption
    found = server_checks._login(endpoint, {})
    assert found.level == login
    assert "secret" not in found.found


def test_the_probes_cover_the_commands_of_scripts_and_package() -> None:
    folder = files("redelastic") / "lua"
    texts = [script.read_text() for script in folder.iterdir() if script.name.endswith(".lua")]
    called = {name for text in texts for name in re.findall(r"redis\.call\('(\w+)'", text)}
    assert len(called) > 20
    sent = {"EVAL", "EVALSHA", "HGET", "HMGET", "HKEYS", "HLEN", "LLEN", "MGET", "TYPE", "XREAD", "XREVRANGE", "HDEL"}
    assert called | sent <= {probe.split()[0] for probe in rights.PROBES}


def test_every_probe_is_a_call_that_works(every_server: RedisServer) -> None:
    corner = rights.Corner("redelastic", "")
    connection = Connection.open(every_server.url)
    replies = connection.call(lambda client: rights._probe(client, corner.keys))
    failed = {probe: reply for probe, reply in zip(rights.PROBES, replies, strict=True) if isinstance(reply, Exception)}
    assert [probe.split()[0] for probe in failed] == ["EVALSHA"], failed
    corner.clear(connection)
    connection.close()
