"""Addresses that move, and name servers that go silent: what the user named and what was discovered are both tried."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from redelastic.redis.errors import UnreachableError
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.calls import ATTEMPT, increment, opened, takes
from tests.support.peers import peer
from tests.support.servers import HOST, Cluster, SentinelGroup, Shard, port_of, wait_until

pytest_plugins = ["tests.support.failover_servers"]


@contextlib.contextmanager
def one_node_cluster() -> Iterator[RedisServer]:
    with servers.one_node_of_a_cluster("right") as server, server.get_client() as admin:
        admin.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok", "one node is a Cluster")
        yield server


@contextlib.contextmanager
def front(server: RedisServer) -> Iterator[tuple[int, list[RedisServer]]]:
    """A port that leads to the last server of a list, or, if that is empty, to none."""
    behind = [server]

    def copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)

    def serve(connection: socket.socket) -> None:
        if behind:
            with socket.create_connection((HOST, port_of(behind[-1]))) as upstream:
                threading.Thread(target=copy, args=(upstream, connection), daemon=True).start()
                copy(connection, upstream)

    with peer(serve) as named:
        yield named.port, behind


@pytest.mark.fault("all nodes of a Cluster get new addresses", "clients find them by the endpoint that the user named")
def test_a_cluster_whose_addresses_all_change() -> None:
    with one_node_cluster() as new, one_node_cluster() as old, front(old) as (port, behind):
        connection = opened(f"redis+cluster://:right@{HOST}:{port}")
        assert connection.call(increment) == 1
        behind.append(new)
        old.kill()
        assert connection.call(increment) == 1
        connection.close()


def test_a_failover_in_a_cluster_whose_named_endpoint_is_gone(
    in_cluster: Shard, replicated_cluster: Cluster, run_id: str
) -> None:
    write = (b"SET", f"{{{run_id}}}:k".encode(), b"v")
    with front(in_cluster.servers[0]) as (port, behind):
        connection = opened(f"redis+cluster://:{replicated_cluster.password}@{HOST}:{port}")
        assert connection.exchange(write)
        behind.clear()
        in_cluster.kill_master()
        assert connection.exchange(write)
        connection.close()


def test_sentinels_that_the_user_did_not_name(sentinels: SentinelGroup) -> None:
    """The one that the user named is gone: those that it knew name the master."""

    def serve(connection: socket.socket) -> None:
        with socket.create_connection((HOST, sentinels.sentinel_ports[0])) as upstream:
            while named and (request := connection.recv(2**16)):
                upstream.sendall(request)
                connection.sendall(upstream.recv(2**16))

    named = True
    with peer(serve) as first:
        hosts = ",".join(f"{HOST}:{port}" for port in sentinels.sentinel_ports)
        connection = opened(sentinels.url.replace(hosts, f"{HOST}:{first.port}"))
        assert connection.call(lambda client: client.ping())
        named = False
        for opened_socket in first.sockets:
            with contextlib.suppress(OSError):
                opened_socket.shutdown(socket.SHUT_RDWR)
        connection.close()
        assert connection.call(lambda client: client.ping())
        connection.close()


@pytest.fixture
def silent_name_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Once set, each look-up of a name gets no answer until the test ends."""
    silent, over, answer = threading.Event(), threading.Event(), socket.getaddrinfo

    def look_up(host: str, *args: Any, **options: Any) -> Any:
        if silent.is_set() and host != HOST and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return answer(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield silent
    over.set()


@pytest.mark.fault("the name server goes silent", "nodes reconnect to the last addresses that it gave")
def test_a_silent_name_server_and_a_lost_connection(
    own_server: RedisServer, silent_name_server: threading.Event
) -> None:
    connection = opened(own_server.url.replace(HOST, "localhost"), attempt=ATTEMPT)
    connection.call(lambda client: client.set("counter", 1))
    silent_name_server.set()
    with own_server.get_client() as admin:
        admin.client_kill_filter(_type="normal", skipme=True)
    with takes(0, 2):
        assert connection.call(lambda client: client.get("counter")) == b"1"
    connection.close()


def test_a_look_up_ends_with_its_caller_s_time(silent_name_server: threading.Event) -> None:
    silent_name_server.set()
    with takes(0.5, 2), pytest.raises(UnreachableError, match="did not answer"):
        opened("redis://never-known.invalid:1", attempt=ATTEMPT, connect=0.5)
