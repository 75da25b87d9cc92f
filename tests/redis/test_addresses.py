"""Addresses that move, and name servers that go silent: what the user named and what was discovered are both tried."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psutil
import pytest

from redelastic.redis.errors import UnreachableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.names import look_up
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support import servers
from tests.support.calls import ATTEMPT_TIMEOUT, LONG_TIMEOUT, increment, open_connection, takes
from tests.support.interrupts import assert_thread_finishes, interrupt_everywhere
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
        connection = open_connection(f"redis+cluster://:right@{HOST}:{port}")
        assert connection.call(increment) == 1
        behind.append(new)
        old.kill()
        assert connection.call(increment) == 1
        connection.close()


def masters_of(cluster: Cluster, key: str) -> tuple[RedisServer, RedisServer]:
    """The master of a key and another one, once they know each other as masters: replicas may have taken over."""
    shards = [cluster.shard(key), *cluster.shards()]
    source, target, *_ = dict.fromkeys(master for shard in shards if (master := shard.master()) is not None)
    for one, other in ((source, target), (target, source)):
        with one.get_client() as asked, other.get_client() as named:
            node = named.execute_command("CLUSTER MYID").decode()

            def is_known() -> bool:
                known = asked.execute_command("CLUSTER NODES").values()
                return any(each["node_id"] == node and "master" in each["flags"].split(",") for each in known)  # noqa: B023

            wait_until(is_known, "two masters know each other")
    return source, target


def move_slot(slot: int, source: RedisServer, target: RedisServer, password: str) -> None:
    """Move a slot of a Cluster as its tools do."""
    with source.get_client() as giver, target.get_client() as taker:
        ids = [each.execute_command("CLUSTER MYID") for each in (giver, taker)]
        taker.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", ids[0])
        giver.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", ids[1])
        while keys := giver.execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            to_taker = (HOST, port_of(target), "", 0, 5000, "AUTH", password)
            giver.execute_command("MIGRATE", *to_taker, "KEYS", *keys)
        for each in (taker, giver):
            each.execute_command("CLUSTER SETSLOT", slot, "NODE", ids[1])


@pytest.mark.fault(
    "a run's slot moves to another node of the Cluster", "I8: calls wait until it has moved; each takes effect once"
)
def test_a_slot_that_moves(replicated_cluster: Cluster, run_id: str) -> None:
    base = RunKeys(run_id).store("default").base
    source, target = masters_of(replicated_cluster, base)
    with source.get_client() as client:
        slot = client.execute_command("CLUSTER KEYSLOT", base)
    with closing(RedisStore(replicated_cluster.url, run_id, timeout=30)) as store, ThreadPoolExecutor(1) as pool:
        over, sums = threading.Event(), [store.add("sum", 1)]

        def keep_adding() -> None:
            while not over.is_set():
                sums.append(store.add("sum", 1))

        adding = pool.submit(keep_adding)
        try:
            for giver, taker in ((source, target), (target, source)):
                move_slot(slot, giver, taker, replicated_cluster.password)
                enough = len(sums) + 5
                wait_until(lambda: adding.done() or len(sums) >= enough, "calls go on", 30)  # noqa: B023
        finally:
            over.set()
        adding.result(60)
    assert sums == list(range(1, len(sums) + 1))


NameServer = Callable[[str], Any]  # what `getaddrinfo` returns for a name, or raises; None: as without this server


@pytest.fixture
def ask_instead(monkeypatch: pytest.MonkeyPatch) -> Callable[[NameServer], None]:
    """Has a function of the test look up names: the C library's configuration is not the test's to write."""
    answer = socket.getaddrinfo

    def put(name_server: NameServer) -> None:
        def look_up(host: str, *args: Any, **options: Any) -> Any:
            if options.get("flags", 0) & socket.AI_NUMERICHOST or (found := name_server(host)) is None:
                return answer(host, *args, **options)
            return found

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return put


@pytest.mark.fault(
    "the name of Redis leads to another server, the one before becomes its replica", "clients ask the name again"
)
def test_a_name_that_leads_to_another_server(ask_instead: Callable[[NameServer], None], run_id: str) -> None:
    """As a managed Redis fails over, whose address is a name."""
    name = "redis.example"

    def name_server(host: str) -> Any:
        if host != name:
            return None
        return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (HOST, port_of(behind[-1])))]

    ask_instead(name_server)
    with servers.redis_server("right", {}) as new, servers.redis_server("right", {}) as old:
        behind = [old]
        with closing(RedisStore(f"redis://:right@{name}:1", run_id)) as store:
            assert store.add("sum", 1) == 1
            behind.append(new)
            with old.get_client() as admin:
                admin.replicaof(HOST, port_of(new))
            assert store.add("sum", 1) == 1, "the new master has no data"


def test_a_failover_in_a_cluster_whose_named_endpoint_is_gone(
    in_cluster: Shard, replicated_cluster: Cluster, run_id: str
) -> None:
    write = (b"SET", f"{{{run_id}}}:k".encode(), b"v")
    with front(in_cluster.servers[0]) as (port, behind):
        connection = open_connection(f"redis+cluster://:{replicated_cluster.password}@{HOST}:{port}")
        assert connection.exchange(write)
        behind.clear()
        in_cluster.kill_master()
        assert connection.exchange(write)
        connection.close()


@pytest.mark.parametrize("silent", [0, pytest.param(1, marks=pytest.mark.long)])
def test_sentinels_that_the_user_did_not_name(sentinels: SentinelGroup, silent: int) -> None:
    """The one that the user named is gone: those that it knew name the master; silent ones share an attempt."""

    def serve(connection: socket.socket) -> None:
        with socket.create_connection((HOST, sentinels.sentinel_ports[0])) as upstream:
            while named and (request := connection.recv(2**16)):
                upstream.sendall(request)
                connection.sendall(upstream.recv(2**16))

    named = True
    with peer(serve) as first, contextlib.ExitStack() as stack:
        hosts = ",".join(f"{HOST}:{port}" for port in sentinels.sentinel_ports)
        connection = open_connection(sentinels.url.replace(hosts, f"{HOST}:{first.port}"), attempt=LONG_TIMEOUT)
        assert connection.call(lambda client: client.ping())
        named = False
        for opened_socket in first.sockets:
            with contextlib.suppress(OSError):
                opened_socket.shutdown(socket.SHUT_RDWR)
        for port in sorted(sentinels.sentinel_ports[1:])[:silent]:
            stack.enter_context(stopped(port))
        connection.close()
        with takes(0, silent * LONG_TIMEOUT / 3 + 1):
            assert connection.call(lambda client: client.ping())
        connection.close()


@contextlib.contextmanager
def stopped(port: int) -> Iterator[None]:
    """The process that listens on a port stands still."""
    listening = (each for each in psutil.net_connections("tcp") if each.status == psutil.CONN_LISTEN)
    [process] = {each.pid for each in listening if each.pid and each.laddr and each.laddr.port == port}
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


@pytest.fixture
def silent_name_server(ask_instead: Callable[[NameServer], None]) -> Iterator[threading.Event]:
    """Once set, each look-up of a name gets no answer until the test ends."""
    silent, over = threading.Event(), threading.Event()

    def name_server(host: str) -> None:
        if silent.is_set() and host != HOST:
            over.wait(60)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    ask_instead(name_server)
    yield silent
    over.set()


@pytest.mark.fault("the name server goes silent", "nodes reconnect to the last addresses that it gave")
def test_a_silent_name_server_and_a_lost_connection(
    own_server: RedisServer, silent_name_server: threading.Event
) -> None:
    connection = open_connection(own_server.url.replace(HOST, "localhost"), attempt=ATTEMPT_TIMEOUT)
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
        open_connection("redis://never-known.invalid:1", attempt=ATTEMPT_TIMEOUT, connect=0.5)


def test_an_interrupt_amid_a_look_up_holds_up_no_other_thread(silent_name_server: threading.Event) -> None:
    silent_name_server.set()

    def ask() -> None:
        with contextlib.suppress(socket.gaierror):
            look_up("not-known.invalid", 1, 0.01)

    ask()  # from now on all share one look-up, which does not end
    assert interrupt_everywhere(ask, lambda: assert_thread_finishes(ask)) > 10
