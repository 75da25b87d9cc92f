"""Calls to Redis: whatever the server does, a call ends within its time and has one effect."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psutil
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousTimeoutError

from redelastic.redis import scripts
from redelastic.redis.connection import Connection
from redelastic.redis.errors import CorruptStateError, UnavailableError, UnreachableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.calls import ATTEMPT_TIMEOUT, LONG_TIMEOUT, increment, open_connection, takes
from tests.support.nodes import NodeFactory
from tests.support.peers import peer, say_nothing, speak_http

# -- Nobody there, or somebody else


def test_connecting_is_given_up_after_its_time(tmp_path_factory: pytest.TempPathFactory) -> None:
    with servers.reserved_port() as port:
        for url in (
            f"redis://127.0.0.1:{port}",
            "redis://no-such-host.invalid",
            f"unix://{tmp_path_factory.getbasetemp()}/no",
        ):
            with (
                takes(0.3, 2),
                pytest.raises(UnreachableError, match=r"could not be reached .*Check that it runs") as raised,
            ):
                open_connection(url, attempt=ATTEMPT_TIMEOUT, connect=0.5)
            assert isinstance(raised.value, UnavailableError)
            assert url in str(raised.value)


@pytest.mark.parametrize(("read", "connect", "expected"), [(0.5, None, 0.5), (0.1, 0.5, 0.5), (60, 0.5, 0.5)])
def test_connecting_takes_no_longer_than_one_call_by_default(
    read: float, connect: float | None, expected: float
) -> None:
    with takes(expected - 0.2, expected + 1.5), pytest.raises(UnreachableError):
        Connection.open("redis://127.0.0.1:1", read_timeout=read, connect_timeout=connect)


def test_a_host_that_drops_every_packet_is_given_up_long_before_an_attempt_would_be_over() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as opened_here:
        for _ in range(3):  # Linux drops what comes once the queue is full
            waiting = opened_here.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        url = f"redis://127.0.0.1:{full.getsockname()[1]}"
        with takes(0.5, 5), pytest.raises(UnreachableError, match="Timeout connecting"):
            Connection.open(url, attempt_timeout=LONG_TIMEOUT, connect_timeout=0.5)


@pytest.mark.parametrize(
    ("answer", "patience"), [(b"-WRONGPASS invalid username-password pair\r\n", 9), (b"", 0)], ids=["final", "no time"]
)
def test_what_is_final_or_took_all_its_time_is_tried_once(answer: bytes, patience: float) -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(answer)

    with peer(refuse) as unwilling:
        with pytest.raises(UnavailableError):
            Connection.open(f"redis://:secret@127.0.0.1:{unwilling.port}", connect_timeout=patience)
        assert unwilling.accepted == 1


@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redis+sentinel"])
def test_a_peer_that_says_nothing(scheme: str) -> None:
    with peer(say_nothing) as mute:
        rest = f"127.0.0.1:{mute.port}" + ("/m" if scheme.endswith("sentinel") else "")
        with takes(0.5, 2), pytest.raises(UnreachableError, match=r"(could not be reached|named no master) within"):
            open_connection(f"{scheme}://{rest}", attempt=ATTEMPT_TIMEOUT, connect=0.5)
        servers.wait_until(lambda: mute.accepted >= 1, "it was asked")


@pytest.mark.parametrize("login", ["", ":password@", "user:password@"])
@pytest.mark.parametrize("scheme", ["redis", "rediss", "redis+cluster", "redis+sentinel"])
def test_a_peer_that_is_no_redis_is_refused_at_once(scheme: str, login: str) -> None:
    with peer(speak_http) as http:
        rest = f"{login}127.0.0.1:{http.port}" + ("/m" if scheme.endswith("sentinel") else "")
        says = r"TLS with Redis at .* failed" if scheme == "rediss" else r"is not Redis: .* Check host and port"
        with takes(0, 1), pytest.raises(UnavailableError, match=says) as raised:
            open_connection(f"{scheme}://{rest}")
        assert not isinstance(raised.value, UnreachableError)


def test_a_client_that_decodes_or_waits_for_ever_is_refused(server: RedisServer) -> None:
    with pytest.raises(ValueError, match=r"decode_responses=True; create it without"):
        Connection(server.get_client(decode_responses=True))
    with pytest.raises(ValueError, match=r"no socket_timeout; create it with one"):
        Connection(server.get_client(socket_timeout=None))


# -- Passing trouble: the call gets through


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


@pytest.mark.fault("maxclients is reached during a call", "the call is retried up to its timeout")
def test_too_many_clients_passes(own_server: RedisServer) -> None:
    admin = own_server.get_client()
    admin.ping()
    connection = open_connection(own_server.url)
    connection.client.connection_pool.disconnect()  # type: ignore[union-attr]
    admin.config_set("maxclients", 1)
    with takes(0.5, 2), pytest.raises(UnreachableError, match=r"max number of clients|could not be reached"):
        connection.call(increment, 0.5)
    with pytest.raises(UnreachableError):
        open_connection(own_server.url, connect=0.5)
    before = admin.info("stats")["rejected_connections"]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, increment)
        servers.wait_until(lambda: admin.info("stats")["rejected_connections"] > before + 3, "the call tries again")
        admin.config_set("maxclients", 100)
        assert waiting.result(LONG_TIMEOUT) == 1
    connection.close()
    admin.close()


def test_a_server_that_still_loads_its_data_is_waited_for(tmp_path: object) -> None:
    with RedisServer(data_dir=str(tmp_path), startup_timeout=30) as server:
        with server.get_client() as client:
            pipe = client.pipeline(transaction=False)
            for i in range(16384):  # it looks at its clients after each 1,024 commands that it loads
                pipe.set(f"k{i}", "x")
            pipe.execute()
        connection = open_connection(server.url, attempt=ATTEMPT_TIMEOUT)
        server.kill()
        server.config["key-load-delay"] = "300"  # in microseconds, for each key
        with ThreadPoolExecutor(2) as pool:
            waiting = pool.submit(connection.call, lambda c: (c.get("k16383"), c.info("persistence")["loading"]))
            starting = pool.submit(server.start)
            seen: list[str] = []

            def loading() -> bool:
                with server.get_client(socket_timeout=5, retry=Retry(NoBackoff(), 0)) as probe:
                    try:
                        probe.get("k0")
                    except redis.BusyLoadingError as e:
                        seen.append(str(e))
                return bool(seen)

            servers.wait_until(loading, "the server loads")
            assert waiting.result(LONG_TIMEOUT) == (b"x", 0)
            starting.result(LONG_TIMEOUT)
        connection.close()


FOREVER = "while true do end"


def test_a_script_that_runs_for_ever_is_waited_for_until_it_is_killed(own_server: RedisServer) -> None:
    with own_server.get_client() as admin:
        admin.config_set("busy-reply-threshold", 10)
        connection = open_connection(own_server.url)
        with own_server.get_client(socket_timeout=60) as culprit:

            def run_forever() -> None:
                with pytest.raises(redis.ResponseError, match=r"[Ss]cript killed"):
                    culprit.eval(FOREVER, 0)

            thread = in_background(run_forever)
            busy: list[str] = []

            def is_busy() -> bool:
                try:
                    admin.get("x")
                except redis.ResponseError as e:
                    busy.append(str(e))
                return bool(busy)

            servers.wait_until(is_busy, "the script blocks the server")
            assert busy[0].startswith("BUSY")
            with takes(0.3, 1), pytest.raises(UnreachableError, match="BUSY"):
                connection.call(increment, 0.3)
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(connection.call, increment)
                assert not waiting.done()
                admin.script_kill()
                assert waiting.result(LONG_TIMEOUT) == 1
            thread.join(LONG_TIMEOUT)
        connection.close()


def test_our_own_script_killed_by_somebody_is_sent_again(own_server: RedisServer) -> None:
    with own_server.get_client() as admin:
        admin.config_set("busy-reply-threshold", 10)
        connection = open_connection(own_server.url)
        admin.set("spin", 1)
        code = "while redis.call('GET', KEYS[1]) == '1' do end return 7"
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(connection.call, lambda c: c.eval(code, 1, "spin"))

            def killed() -> bool:
                try:
                    admin.script_kill()
                except redis.ResponseError:  # NOTBUSY: it does not run yet
                    return False
                return True

            servers.wait_until(killed, "the script is killed")

            def let_go() -> bool:  # it runs again by now, and spins again
                try:
                    admin.set("spin", 0)
                except redis.ResponseError:
                    admin.script_kill()
                    return False
                return True

            servers.wait_until(let_go, "the key is changed between two attempts")
            assert waiting.result(LONG_TIMEOUT) == 7
        connection.close()


@pytest.mark.fault("SCRIPT FLUSH between two calls", "I8: the script is sent again, and has its effect once")
def test_scripts_that_were_flushed_are_sent_again(own_server: RedisServer) -> None:
    connection = open_connection(own_server.url)
    keys = [*RunKeys("r").types, RunKeys("r").status("n")]
    with own_server.get_client() as admin:
        why = scripts.CLOSE(connection, keys, [1000, 0, "me"])
        admin.script_flush()
        assert scripts.CLOSE(connection, keys, [1000, 0, "you"]) == why == b'["closed","me"]'
        stats = admin.info("commandstats")
        # the first call and the one after the flush had to send the text
        assert stats["cmdstat_eval"]["calls"] == 2
        assert scripts.CLOSE(connection, keys, [1000, 0, "you"]) == why
        assert admin.info("commandstats")["cmdstat_eval"]["calls"] == 2
    connection.close()


def test_a_server_killed_and_restarted_between_calls(own_server: RedisServer) -> None:
    connection = open_connection(own_server.url)
    assert connection.call(increment) == 1
    own_server.kill()
    with takes(0.5, 2), pytest.raises(UnreachableError, match=r"within .* s: .*Connection refused"):
        connection.call(increment, 0.5)
    with takes(0, 0.1), pytest.raises(UnreachableError):
        connection.call(increment, 0)
    own_server.start()
    assert connection.call(increment) == 1  # its data are gone
    connection.close()


def test_a_server_killed_and_restarted_during_a_call(own_server: RedisServer) -> None:
    connection = open_connection(own_server.url)
    with own_server.get_client() as admin, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, lambda c: c.blpop(["queue"], 0))
        servers.wait_until(lambda: admin.info("clients")["blocked_clients"] == 1, "the call blocks")
        own_server.kill()
        own_server.start()
        servers.wait_until(lambda: admin.info("clients")["blocked_clients"] == 1, "the call blocks again")
        admin.rpush("queue", "item")
        assert waiting.result(LONG_TIMEOUT) == (b"queue", b"item") or waiting.result() == [b"queue", b"item"]
    connection.close()


def test_a_server_killed_during_a_call_for_good(own_server: RedisServer) -> None:
    connection = open_connection(own_server.url)
    with own_server.get_client() as admin, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(connection.call, lambda c: c.blpop(["queue"], 0), 1.0)
        servers.wait_until(lambda: admin.info("clients")["blocked_clients"] == 1, "the call blocks")
        own_server.kill()
        with pytest.raises(UnreachableError):
            waiting.result(LONG_TIMEOUT)
    connection.close()


def test_a_frozen_server_is_noticed_and_waited_for(own_server: RedisServer) -> None:
    connection = open_connection(own_server.url, attempt=ATTEMPT_TIMEOUT)
    with own_server.get_client(), ThreadPoolExecutor(4) as pool:
        connection.call(lambda c: c.set("counter", 1))  # however often it is sent
        with servers.frozen(own_server):
            with takes(ATTEMPT_TIMEOUT, ATTEMPT_TIMEOUT), pytest.raises(UnreachableError, match="Timeout"):
                connection.call(increment, 0)
            with takes(1, 1 + ATTEMPT_TIMEOUT), pytest.raises(UnreachableError, match="Timeout"):
                connection.call(lambda c: c.get("counter"), 1)
            waiting = [pool.submit(connection.call, lambda c: c.get("counter")) for _ in range(4)]
            with takes(ATTEMPT_TIMEOUT, ATTEMPT_TIMEOUT), pytest.raises(UnreachableError):
                connection.read({b"stream": "0-0"}, 60)
        assert [w.result(LONG_TIMEOUT) for w in waiting] == [b"2"] * 4  # what was on its way arrived once
    connection.close()


@pytest.mark.parametrize("attempt", [1.0, 3.0, 30.0])
def test_the_kernel_gives_up_a_silent_peer_within_a_lease(own_server: RedisServer, attempt: float) -> None:
    connection = open_connection(own_server.url, attempt=attempt)
    used = psutil.Process().net_connections("tcp")
    [descriptor] = [each.fd for each in used if each.raddr and each.raddr.port == servers.port_of(own_server)]
    with socket.socket(fileno=os.dup(descriptor)) as channel:

        def option(name: str) -> int:
            return channel.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))

        assert channel.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert option("TCP_USER_TIMEOUT") == 1000 * attempt, "of what was sent, and of probes"
        assert option("TCP_KEEPIDLE") + option("TCP_KEEPINTVL") <= 2 * attempt, "a probe was sent, and is late"
    connection.close()


def test_a_blocking_read_ends_before_the_time_out_of_its_socket(own_server: RedisServer) -> None:
    """Were it not so, each quiet wait would look like a server that is away."""
    attempt = 8.0  # a busy machine may be late by half of it
    connection = open_connection(own_server.url, attempt=attempt)
    with takes(attempt / 2, attempt):
        assert connection.read({b"stream": "0-0"}, 60) == {}
    with own_server.get_client() as admin:
        admin.xadd("stream", {"a": "1"}, id="5-0")
        assert connection.read({b"stream": "0-0", b"other": "0-0"}, 60) == {b"stream": [("5-0", {"a": "1"})]}
        admin.set("text", 1)
        with pytest.raises(CorruptStateError, match="wrong type"):
            connection.read({b"text": "0-0"}, 60)
    connection.close()


@pytest.mark.parametrize("method", ["next_rendezvous", "set_closed", "is_closed", "store.set", "store.get", "shutdown"])
def test_every_call_of_a_handler_ends_on_a_frozen_server(
    own_server: RedisServer, new_node: NodeFactory, method: str
) -> None:
    times = {"heartbeat_timeout": 0.3, "close_timeout": 1.0, "read_timeout": 5.0}
    if method == "next_rendezvous":
        times["join_timeout"] = 1.0
    node = new_node(1, 1, url=own_server.url, **times)
    info = None if method == "next_rendezvous" else node.next_rendezvous()
    with servers.frozen(own_server), takes(0.3, 8):
        if method == "shutdown":
            assert node.shutdown() is False
            return
        call = getattr(node, method, None)
        if info is not None and call is None:
            call = {"store.set": lambda: info.store.set("k", "v"), "store.get": lambda: info.store.get("k")}[method]
        assert call is not None
        with pytest.raises((RendezvousConnectionError, RendezvousTimeoutError, RuntimeError), match=r"reached|in time"):
            call()


# -- Many threads


def test_a_connection_serves_many_threads_at_once(server: RedisServer, run_id: str) -> None:
    connection = open_connection(server.url)
    with ThreadPoolExecutor(32) as pool:
        blocked = [pool.submit(connection.read, {f"{run_id}{i}".encode(): "0-0"}, LONG_TIMEOUT) for i in range(31)]
        with server.get_client() as admin:
            servers.wait_until(lambda: admin.info("clients")["blocked_clients"] >= 31, "all threads block at once")
            for i in range(31):
                admin.xadd(f"{run_id}{i}", {"n": i})
        assert [list(b.result(LONG_TIMEOUT)) for b in blocked] == [[f"{run_id}{i}".encode()] for i in range(31)]
    connection.close()


@pytest.mark.fault("a thread closes a connection that another thread is about to use", "that one opens a new one")
def test_a_connection_that_another_thread_closes_is_opened_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis-py looks with ``poll`` at a connection that it takes from its pool: the other thread closes it then."""
    connection = open_connection(server.url)
    first = connection.call(lambda client: client.client_id())
    poll, closings = select.poll, iter([connection.close])

    def close_and_poll() -> Any:
        for close in closings:  # once
            close()
        return poll()

    monkeypatch.setattr(select, "poll", close_and_poll)
    [second] = connection.exchange((b"CLIENT", b"ID"))
    assert next(closings, None) is None
    assert second != first
    connection.close()


def test_an_attempt_that_used_up_the_time_is_the_last(server: RedisServer) -> None:
    attempts = []

    def attempt(_: object) -> None:
        attempts.append(time.monotonic())
        while time.monotonic() < attempts[0] + 0.02:
            pass
        raise redis.TimeoutError("no answer")

    connection = Connection.open(server.url)
    with pytest.raises(UnreachableError):
        connection.call(attempt, 0.01)
    connection.close()
    assert len(attempts) == 1
