"""Asking for a key and blocking on it in one round trip: who waits is woken once, and misses no refusal."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import torch.distributed as dist

from redelastic.redis.client import DirectClient
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.servers import HOST
from tests.support.stores import SOON, in_thread, opened, until
from tests.support.tls_files import make_certificates
from tests.support.tls_servers import tls_server

CALLS: dict[str, Callable[[Any], Any]] = {
    "get": lambda s: s.get("k"),
    "wait": lambda s: s.wait(["k"]),
    "barrier": lambda s: s.barrier("b", 2),
}


def has_blocked(client: redis.Redis, callers: int) -> None:
    until(lambda: client.info("clients")["blocked_clients"] == callers)


def leave_entries(store: RedisStore, client: redis.Redis) -> None:
    """Leaves entries in the keys' wake-up streams that are older than any call to come, and no keys."""
    for call in ("get", "barrier"):
        waiting = in_thread(CALLS[call], store)
        has_blocked(client, 1)
        store.set("k", "old") if call == "get" else store.barrier("b", 2)
        waiting.result(SOON)
    for key in ("k", "b/num_members", "b/last_member"):
        assert store.delete_key(key)
        assert key == "b/num_members" or client.exists(store._keys.stream(key.encode()))


def test_who_waits_is_woken_once(own_server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received: Counter[int] = Counter()
    recv = socket.socket.recv

    def counted(self: socket.socket, *args: Any) -> bytes:
        data = recv(self, *args)
        received[threading.get_ident()] += 1
        return data

    def call() -> int:
        store.barrier("b", 4)
        return received[threading.get_ident()]

    with opened(own_server, run_id) as store, own_server.get_client() as client:
        for i in range(2):  # opens the connections
            waiting = [in_thread(store.barrier, f"earlier {i}", 3) for _ in range(3)]
            assert [each.result(SOON) for each in waiting] == [None] * 3
        monkeypatch.setattr(socket.socket, "recv", counted)
        waiting = [in_thread(call) for _ in range(3)]
        has_blocked(client, 3)
        store.barrier("b", 4)
        assert [each.result(SOON) for each in waiting] == [1, 1, 1]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("older", [False, True], ids=["", "with older entries"])
def test_a_refusal_is_told_at_once(own_server: RedisServer, run_id: str, call: str, older: bool) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.barrier("earlier", 1)
        if older:
            leave_entries(store, client)
        store._connection.max_block = 60
        client.config_set("maxmemory", 1)
        with pytest.raises(dist.DistNetworkError, match="out of memory"):
            in_thread(CALLS[call], store).result(SOON)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("key", ["waits", "stream"])
def test_a_key_of_another_program_is_named(own_server: RedisServer, run_id: str, call: str, key: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.barrier("earlier", 1)
        foreign = store._keys.stream(b"b/last_member" if call == "barrier" else b"k")
        foreign = foreign if key == "stream" else store._keys.waits.encode()
        client.delete(foreign)
        client.set(foreign, "another program's")
        with pytest.raises(dist.DistStoreError, match="Another program writes to it") as caught:
            in_thread(CALLS[call], store).result(SOON)
        assert foreign.decode() in str(caught.value)


@pytest.mark.parametrize("older", [False, True], ids=["", "with older entries"])
def test_a_server_that_has_forgotten_the_scripts_is_sent_them(
    own_server: RedisServer, run_id: str, older: bool
) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.barrier("earlier", 1)
        if older:
            leave_entries(store, client)
        store._connection.max_block = 60
        client.script_flush()
        waiting = [in_thread(store.barrier, "b", 2, timedelta(seconds=2)), in_thread(store.get, "k")]
        has_blocked(client, 2)
        client.script_flush()
        store.set("k", "new")
        store.barrier("b", 2)
        assert [each.result(SOON) for each in waiting] == [None, b"new"]
        assert store.get("b/num_members") == b"2"


@pytest.mark.parametrize("what", ["reply", "request"])
def test_a_caller_that_was_cut_off_has_come_once(own_server: RedisServer, run_id: str, what: str) -> None:
    """If the second one were counted twice, it would be the third."""
    host, _, port = own_server.endpoint.partition(":")
    with FaultyProxy(host, int(port)) as proxy, opened(own_server, run_id) as store:
        cut = RedisStore(own_server.url.replace(own_server.endpoint, f"{host}:{proxy.port}"), run_id)
        fault = proxy.add(Fault(b"last_member", lose_request=what == "request", keep=None if what == "request" else 0))
        others = [in_thread(cut.barrier, "b", 3), in_thread(store.barrier, "b", 3)]
        with pytest.raises(dist.DistStoreError, match="wait timeout"):
            store.barrier("c", 2, timedelta(seconds=0.5))
        assert not any(each.done() for each in others)
        store.barrier("b", 3)
        assert [each.result(SOON) for each in others] == [None, None]
        assert fault.fired.is_set()
        assert store.get("b/num_members") == b"3"
        cut.close()


@contextlib.contextmanager
def _in_pieces(port: int) -> Iterator[int]:
    """The port of a relay whose replies come in two pieces each: the last 3 bytes are late."""

    def forward(source: socket.socket, target: socket.socket, late: float) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                target.sendall(data[:-3])
                time.sleep(late)
                target.sendall(data[-3:])
        target.close()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((HOST, port))
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                in_thread(forward, client, server, 0)
                in_thread(forward, server, client, 0.05)

    with socket.create_server((HOST, 0)) as listener:
        in_thread(accept)
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def test_over_tls_a_reply_in_pieces_is_read_at_once(tmp_path: Path, run_id: str) -> None:
    """The last bytes of a TLS record may be too few for a socket that waits for more of them."""
    certificates = make_certificates(tmp_path)
    with tls_server("terminator", "password", certificates, ask_clients=False) as (server, url):
        with opened(server, run_id) as store, server.get_client() as client:
            store.barrier("earlier", 1)
            leave_entries(store, client)
        host, _, port = url.rpartition(":")
        with _in_pieces(int(port)) as relay:
            endpoint = parse_endpoint(f"{host}:{relay}", ca_cert=certificates.ca)
            connection = Connection.open(endpoint, attempt_timeout=60)
            store = RedisStore(connection, run_id, timeout=1)
            with pytest.raises(dist.DistStoreError, match="wait timeout"):
                in_thread(store.get, "k").result(2 * SOON)
            store.close()
            connection.close()


def test_a_barrier_survives_the_loss_of_all_data(own_server: RedisServer, run_id: str) -> None:
    """Each caller that still waits counts anew when it asks again."""
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waiting = [in_thread(store.barrier, "b", 3) for _ in range(2)]
        has_blocked(client, 2)
        client.flushall()
        store.barrier("b", 3)
        assert [each.result(SOON) for each in waiting] == [None, None]


@pytest.mark.parametrize("call", CALLS)
def test_what_is_older_than_a_call_ends_none(own_server: RedisServer, run_id: str, call: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        leave_entries(store, client)
        waiting = [in_thread(CALLS[call], store) for _ in range(1 if call == "barrier" else 3)]
        has_blocked(client, len(waiting))
        store.barrier("b", 2) if call == "barrier" else store.set("k", "new")
        assert {each.result(SOON) for each in waiting} == {b"new" if call == "get" else None}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("kind", [DirectClient, redis.Redis])
def test_a_time_out_holds(
    own_server: RedisServer, run_id: str, call: str, protocol: int, kind: type[redis.Redis]
) -> None:
    """The reply of a read that ends without entries is the shortest that follows a registration."""
    with kind.from_url(own_server.url, protocol=protocol, socket_timeout=1) as client:
        store = RedisStore(client, run_id)
        for seconds in (0.0, 0.2, 0.8):
            store.set_timeout(timedelta(seconds=seconds))
            started = time.monotonic()
            with pytest.raises(dist.DistStoreError, match=f"wait timeout after {round(1000 * seconds)}ms"):
                store.barrier(f"b{seconds}", 2) if call == "barrier" else CALLS[call](store)
            assert seconds <= time.monotonic() - started < seconds + 0.7
        store.close()
