"""Last words: a node's leave, written down by one process and sent by another with only the standard library."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fakeredis
import pytest
import redis
from redis.connection import Connection as RedisConnection

from redelastic.agent.workers import deliver as deliver_module
from redelastic.redis import scripts
from redelastic.redis.last_words import last_words
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.run.control import RunControl
from tests.support import servers
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.job_user import as_user_of
from tests.support.nodes import NodeFactory
from tests.support.tls_files import Certificates, make_certificates
from tests.support.tls_servers import WHO_SPEAKS_TLS, tls_server
from tests.support.whole_life import make_node

REASON = "lost its agent"
ALONE = "import sys; sys.path.append(sys.argv[1]); import deliver; print(deliver.deliver(sys.stdin.buffer.read()))"


def deliver(words: bytes) -> bool:
    """As the warden does it: without this package, in another directory."""
    folder = str(Path(deliver_module.__file__).parent)
    command = [sys.executable, "-I", "-S", "-c", ALONE, folder]
    done = subprocess.run(command, input=words, capture_output=True, check=True, cwd="/", timeout=60)
    return {b"True\n": True, b"False\n": False}[done.stdout]


@contextmanager
def silent_node(url: str, run_id: str, **config: Any) -> Iterator[RedisRendezvousHandler]:
    """A node in a round of its own, which says nothing more, as if its process had been killed."""
    node = make_node(url, run_id, 1, 1, **{"keep_alive_interval": 100} | config)
    try:
        node.next_rendezvous()
        node.membership.stop()
        yield node
    finally:
        node.shutdown()


def leaves(node: RedisRendezvousHandler) -> list[tuple[str, str]]:
    """Which node left, and why, as the run's events have it."""
    control = RunControl(node.backend.connection, node.backend.keys)
    return [(event.node, event.reason) for event in control.events() if event.event in {"left", "lost"}]


def check(url: str, run_id: str, **config: Any) -> None:
    with silent_node(url, run_id, **config) as node:
        words = node.membership.last_words(REASON)
        assert leaves(node) == []
        assert deliver(words)
        assert leaves(node) == [(node.membership.node, REASON)]
        assert deliver(words), "they may be sent twice (I8)"
        assert leaves(node) == [(node.membership.node, REASON)]


# -- any way to Redis


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


def test_with_a_password(server: RedisServer, run_id: str) -> None:
    check(server.url, run_id)


def test_without_one(own_server: RedisServer, run_id: str) -> None:
    with own_server.get_client() as client:
        client.config_set("requirepass", "")
    check(f"redis://{own_server.endpoint}", run_id)


def test_as_the_user_of_a_job(server: RedisServer, run_id: str) -> None:
    check(as_user_of(server, run_id).url, run_id)


def test_in_another_database(server: RedisServer, run_id: str) -> None:
    check(f"{server.url.removesuffix('/0')}/3", run_id)


def test_on_a_server_that_has_not_seen_the_script(own_server: RedisServer, run_id: str) -> None:
    with silent_node(own_server.url, run_id) as node, own_server.get_client() as client:
        client.script_flush()
        assert deliver(node.membership.last_words(REASON))
        assert leaves(node) == [(node.membership.node, REASON)]


def test_over_a_unix_socket(run_id: str) -> None:
    with RedisServer(unix_socket=True) as server:
        check(server.url, run_id)


@pytest.mark.parametrize("who", WHO_SPEAKS_TLS)
def test_over_tls_with_client_certificates(
    who: str, certificates: Certificates, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(certificates.ca).parent)  # whoever delivers is elsewhere
    files = {"ca_cert": certificates.ca, "ssl_cert": certificates.client, "ssl_cert_key": certificates.client_key}
    with tls_server(who, "tls-password", certificates, ask_clients=True) as (_, url):
        check(url, run_id, **{name: Path(path).name for name, path in files.items()})


@pytest.mark.parametrize("who", WHO_SPEAKS_TLS)
def test_nothing_is_told_to_a_server_of_another_ca(who: str, certificates: Certificates, run_id: str) -> None:
    with (
        tls_server(who, "tls-password", certificates, ask_clients=False) as (_, url),
        silent_node(url, run_id, ca_cert=certificates.ca) as node,
    ):
        told = json.loads(node.membership.last_words(REASON))
        told["tls"]["ca"] = certificates.other_ca
        assert not deliver(json.dumps(told).encode())
        assert leaves(node) == []


def test_at_the_master_that_sentinels_name_now(run_id: str) -> None:
    with servers.sentinel_group() as group:
        check(group.url, run_id)
        with silent_node(group.url, f"{run_id}-later") as node:
            before = json.loads(node.membership.last_words(REASON))["address"]
            group.fail_over()
            servers.wait_until(lambda: node.backend.connection.call(lambda c: c.ping()), "the client has followed")
            words = node.membership.last_words(REASON)
            assert json.loads(words)["address"] != before
            assert deliver(words)


def test_at_the_node_of_a_cluster_that_has_the_run(run_id: str) -> None:
    with servers.redis_cluster() as cluster:
        for number in range(4):
            check(cluster.url, f"{run_id}-{number}")


# -- fencing


def test_a_node_that_came_back_is_not_touched_by_its_old_words(new_node: NodeFactory) -> None:
    node = new_node(1, 1)
    node.next_rendezvous()
    old, words = node.membership.node, node.membership.last_words(REASON)
    node.membership.leave("goes")
    node.next_rendezvous()
    assert deliver(words)
    assert leaves(node) == [(old, "goes")]
    state = RunControl(node.backend.connection, node.backend.keys).state()
    assert [member.id for member in state.members] == [node.membership.node] != [old]


# -- what cannot be told


def test_a_reply_that_is_an_error(server: RedisServer, run_id: str) -> None:
    with silent_node(server.url, run_id) as node, server.get_client() as client:
        words = node.membership.last_words(REASON)
        client.execute_command("ACL SETUSER default -eval")
        try:
            assert not deliver(words)
        finally:
            client.execute_command("ACL SETUSER default +eval")
        assert leaves(node) == []


def test_a_connection_that_breaks_is_made_again(server: RedisServer, run_id: str) -> None:
    port = servers.port_of(server)
    with FaultyProxy("127.0.0.1", port) as proxy, silent_node(server.url, run_id) as node:
        told = json.loads(node.membership.last_words(REASON)) | {"address": ["127.0.0.1", proxy.port]}
        lost = proxy.add(Fault(b"EVAL"))
        assert deliver(json.dumps(told).encode())
        assert lost.fired.is_set()
        assert leaves(node) == [(node.membership.node, REASON)]


def test_a_server_that_is_away(server: RedisServer, run_id: str, free_ports: list[int]) -> None:
    with silent_node(server.url, run_id) as node:
        told = json.loads(node.membership.last_words(REASON)) | {"address": ["127.0.0.1", free_ports[0]]}
        assert not deliver(json.dumps(told).encode())


def test_a_server_that_answers_nothing(server: RedisServer, run_id: str) -> None:
    with silent_node(server.url, run_id) as node, socket.create_server(("127.0.0.1", 0)) as mute:
        told = json.loads(node.membership.last_words(REASON)) | {"address": mute.getsockname()}
        assert not deliver(json.dumps(told).encode())


class Own(RedisConnection):
    """A way to connect that nobody but its author knows."""


@pytest.mark.parametrize("how", ["class", "credentials", "ciphers", "fake"])
def test_a_client_that_connects_in_a_way_of_its_own_leaves_none(how: str) -> None:
    made = {
        "class": lambda: redis.Redis(connection_pool=redis.ConnectionPool(connection_class=Own)),
        "credentials": lambda: redis.Redis(credential_provider=redis.UsernamePasswordCredentialProvider("u", "p")),
        "ciphers": lambda: redis.Redis(ssl=True, ssl_ciphers="AES"),
        "fake": fakeredis.FakeRedis,
    }[how]()
    assert last_words(made, scripts.LEAVE, ["key"], []) == b""
    assert last_words(redis.Redis(ssl=True), scripts.LEAVE, ["key"], []) != b""


def test_a_link_to_a_certificate_is_followed_when_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kubernetes exchanges what such a link leads to."""
    (tmp_path / "old.crt").touch()
    (tmp_path / "ca.crt").symlink_to("old.crt")
    monkeypatch.chdir(tmp_path)
    words = last_words(redis.Redis(ssl=True, ssl_ca_certs="ca.crt"), scripts.LEAVE, ["key"], [])
    assert json.loads(words)["tls"]["ca"] == os.path.join(tmp_path, "ca.crt")  # noqa: PTH118
