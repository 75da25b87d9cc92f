"""RedisRendezvousBackend against the contract of torch's RendezvousBackend."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from redelastic import RedisRendezvousBackend, create_backend, create_handler
from redelastic.redis.connection import Connection
from redelastic.redis.errors import UnreachableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.backend import wait_for_backend
from tests.support import servers
from tests.support.peers import lossy_proxy, peer, speak_http


@pytest.fixture
def backend(connection: Connection, run_id: str) -> RedisRendezvousBackend:
    return RedisRendezvousBackend(connection, run_id)


def test_it_is_torchs_backend_named_redis(backend: RedisRendezvousBackend) -> None:
    assert isinstance(backend, RendezvousBackend)
    assert backend.name == "redis"


def test_there_is_no_state_at_first(backend: RedisRendezvousBackend) -> None:
    assert backend.get_state() is None


@pytest.mark.parametrize("state", [b"x", b"", b"\x00\xff" * 3, b"x" * 1_000_000])
def test_the_state_is_any_bytes(backend: RedisRendezvousBackend, state: bytes) -> None:
    result = backend.set_state(state)
    assert result is not None
    assert result == (state, result[1], True)
    assert backend.get_state() == (state, result[1])
    assert type(result[0]) is bytes


@pytest.mark.parametrize("state", ["x", None, 5, bytearray(b"x")])
def test_a_state_that_is_not_bytes_is_refused(backend: RedisRendezvousBackend, state: Any) -> None:
    with pytest.raises(TypeError, match=rf"must be bytes, not {type(state).__name__}"):
        backend.set_state(state)
    assert backend.get_state() is None


def first(backend: RedisRendezvousBackend) -> int:
    result = backend.set_state(b"first")
    assert result is not None
    return result[1]


def test_a_matching_token_replaces_the_state(backend: RedisRendezvousBackend) -> None:
    token = first(backend)
    result = backend.set_state(b"second", token)
    assert result is not None
    assert (result[0], result[2]) == (b"second", True)
    assert result[1] > token
    assert backend.get_state() == (b"second", result[1])


def test_an_old_token_changes_nothing_and_returns_the_state(backend: RedisRendezvousBackend) -> None:
    old = first(backend)
    second = backend.set_state(b"second", old)
    assert second is not None
    assert backend.set_state(b"third", old) == (b"second", second[1], False)
    assert backend.get_state() == (b"second", second[1])


def test_without_a_token_only_the_first_state_is_set(backend: RedisRendezvousBackend) -> None:
    token = first(backend)
    assert backend.set_state(b"second", None) == (b"first", token, False)
    assert backend.get_state() == (b"first", token)


@pytest.mark.parametrize("token", ["invalid", b"1", "1", 1.0, True, object(), (), -1, 0, 10**30])
def test_a_token_of_another_kind_matches_nothing(backend: RedisRendezvousBackend, token: Any) -> None:
    assert backend.set_state(b"other", token) is None  # there is no state, and the token says that there was one
    assert backend.get_state() is None
    ours = first(backend)
    for wrong in (token, str(ours), float(ours), ours + 1, str(ours).encode()):
        assert backend.set_state(b"other", wrong) == (b"first", ours, False)


def test_tokens_only_grow_even_over_the_states_expiry(connection: Connection, client: redis.Redis, run_id: str) -> None:
    backend = RedisRendezvousBackend(connection, run_id, ttl=100)
    token, tokens = first(backend), []
    for i in range(50):
        result = backend.set_state(b"%d" % i, token)
        assert result is not None
        token = result[1]
        tokens.append(token)
    assert tokens == sorted(set(tokens))
    assert 0 < client.pttl(backend.keys.state) <= 100_000
    client.pexpire(backend.keys.state, 1)
    servers.wait_until(lambda: client.pttl(backend.keys.state) == -2, "the state expires")
    assert backend.get_state() is None
    assert backend.set_state(b"late", token) is None
    second = backend.set_state(b"second")
    assert second is not None
    assert second[1] > token
    assert backend.set_state(b"late", token) == (b"second", second[1], False)


def test_tokens_grow_though_the_clock_stands_behind_them(backend: RedisRendezvousBackend, client: redis.Redis) -> None:
    first(backend)
    ahead = 8_000_000_000_000_000  # microseconds: the year 2223
    client.hset(backend.keys.state, "token", ahead)
    result = backend.set_state(b"second", ahead)
    assert result == (b"second", ahead + 1, True)


def test_each_change_renews_the_time_to_live(connection: Connection, client: redis.Redis, run_id: str) -> None:
    backend = RedisRendezvousBackend(connection, run_id, ttl=100)
    token = first(backend)
    client.pexpire(backend.keys.state, 50_000)
    backend.set_state(b"refused", token - 1)
    assert client.pttl(backend.keys.state) <= 50_000
    backend.set_state(b"accepted", token)
    assert client.pttl(backend.keys.state) > 90_000


def test_one_of_several_writers_with_the_same_token_wins(server: RedisServer, run_id: str) -> None:
    connections = [Connection.open(server.url) for _ in range(8)]
    backends = [RedisRendezvousBackend(connection, run_id) for connection in connections]
    token: int | None = None
    with ThreadPoolExecutor(8) as pool:
        for round_number in range(25):
            held = token

            def attempt(
                i: int, held: int | None = held, round_number: int = round_number
            ) -> tuple[bytes, int, bool] | None:
                return backends[i].set_state(b"%d/%d" % (round_number, i), held)

            results = list(pool.map(attempt, range(8)))
            winners = [i for i, result in enumerate(results) if result and result[2]]
            assert len(winners) == 1
            winning = results[winners[0]]
            assert winning is not None
            assert winning[0] == b"%d/%d" % (round_number, winners[0])
            assert all(result is not None and result[:2] == winning[:2] for result in results)
            token = winning[1]
    for connection in connections:
        connection.close()


def test_two_backends_of_one_run_share_its_state_and_other_runs_do_not(connection: Connection, run_id: str) -> None:
    one, same, other, prefixed = (
        RedisRendezvousBackend(connection, run_id),
        RedisRendezvousBackend(connection, run_id),
        RedisRendezvousBackend(connection, f"{run_id}-other"),
        RedisRendezvousBackend(connection, run_id, "other"),
    )
    token = first(one)
    assert same.get_state() == (b"first", token)
    assert other.get_state() is None
    assert prefixed.get_state() is None


@pytest.mark.parametrize("losses", [1, 3])
def test_a_write_whose_reply_is_lost_still_reports_that_it_won(server: RedisServer, run_id: str, losses: int) -> None:
    """I8: the repeated request recognizes its own effect."""
    with lossy_proxy(server) as (url, control):
        connection = Connection.open(url)
        backend = RedisRendezvousBackend(connection, run_id)
        token = first(backend)
        control.losses = losses
        result = backend.set_state(b"second", token)
        assert control.losses == 0
        assert result is not None
        assert (result[0], result[2]) == (b"second", True)
        assert backend.get_state() == result[:2]
        control.losses = losses
        assert backend.set_state(b"third", token) == (*result[:2], False)
        assert control.losses == 0
        connection.close()


def test_a_first_write_whose_reply_is_lost_still_reports_that_it_won(server: RedisServer, run_id: str) -> None:
    with lossy_proxy(server) as (url, control):
        connection = Connection.open(url)
        control.losses = 1
        result = RedisRendezvousBackend(connection, run_id).set_state(b"first")
        assert control.losses == 0
        assert result is not None
        assert result[2] is True
        connection.close()


@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "nobody answers"])
def test_connecting_takes_no_longer_than_a_call_may(run_id: str, listens: bool) -> None:
    with socket.socket() as bound:  # to the end: the next one to ask for a port would get this one
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        if listens:
            bound.listen()
        params = RendezvousParameters("redis", f"127.0.0.1:{port}", run_id, 1, 1, read_timeout="1.5")
        with pytest.raises(
            RendezvousConnectionError, match=rf"127.0.0.1:{port}.* could not be reached within [1-8]\.[0-9] s"
        ):
            create_backend(params)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 3.0),  # half a lease of 6 s
        ({"heartbeat_timeout": "2.75"}, 2.75),
        ({"keep_alive_interval": "20", "heartbeat_timeout": "25"}, 25.0),
        ({"read_timeout": "1.5"}, 1.5),  # for a call with all its retries
        ({"join_timeout": "1"}, 3.0),
    ],
)
def test_how_long_connecting_is_tried_does_not_limit_later_calls(
    server: RedisServer, run_id: str, given: dict[str, str], expected: float
) -> None:
    backend = wait_for_backend(RendezvousParameters("redis", server.url, run_id, 1, 1, **given))
    assert backend.connection.client.get_connection_kwargs()["socket_timeout"] == expected
    assert backend.connection.max_block == expected / 2
    backend.connection.close()


def test_a_server_that_is_away_is_a_connection_error(own_server: RedisServer, run_id: str) -> None:
    connection = Connection.open(own_server.url)
    backend = RedisRendezvousBackend(connection, run_id)
    token = first(backend)
    own_server.kill()
    connection.read_timeout = 0.5
    calls: list[Callable[[], object]] = [
        backend.get_state,
        lambda: backend.set_state(b"x"),
        lambda: backend.set_state(b"x", token),
        lambda: backend.set_state(b"x", "no token"),
    ]
    for call in calls:
        with pytest.raises(RendezvousConnectionError, match="could not be reached within") as raised:
            call()
        assert isinstance(raised.value.__cause__, UnreachableError)
    own_server.start()
    connection.read_timeout = 60
    assert backend.get_state() is None
    connection.close()


@pytest.mark.parametrize(
    "fields", [{"state": "x"}, {"token": "5"}, {"state": "x", "token": "five"}, {"state": "x", "token": ""}]
)
def test_corrupt_state_names_its_key(
    backend: RedisRendezvousBackend, client: redis.Redis, fields: dict[str, str]
) -> None:
    key = backend.keys.state
    for name, value in fields.items():
        client.hset(key, name, value)
    with pytest.raises(RendezvousStateError, match=r"corrupt.*Remove that key") as raised:
        backend.get_state()
    assert key in str(raised.value)
    if "token" in fields:
        with pytest.raises(RendezvousStateError, match="Remove that key") as raised:
            backend.set_state(b"y")
        assert key in str(raised.value)
    assert client.hgetall(key) == {name.encode(): value.encode() for name, value in fields.items()}  # nothing is lost


def test_the_error_names_a_key_of_another_type(backend: RedisRendezvousBackend, client: redis.Redis) -> None:
    key = backend.keys.state
    client.rpush(key, "theirs")
    for call in (backend.get_state, lambda: backend.set_state(b"x"), lambda: backend.set_state(b"x", 5)):
        with pytest.raises(RendezvousStateError, match="is a list, but a run needs a hash") as raised:
            call()
        assert key in str(raised.value)
        assert "another key_prefix" in str(raised.value)
    assert client.lrange(key, 0, -1) == [b"theirs"]


@pytest.mark.parametrize(
    "make", [lambda c: RedisRendezvousBackend(c, "{x}"), lambda c: RedisRendezvousBackend(c, "x", "a b")]
)
def test_texts_that_cannot_be_part_of_a_key_are_refused(
    client: redis.Redis, make: Callable[[redis.Redis], object]
) -> None:
    with pytest.raises(ValueError, match=r"contains .*; it must not contain white space"):
        make(client)


def test_a_plain_redis_client_is_accepted(client: redis.Redis, run_id: str) -> None:
    backend = RedisRendezvousBackend(client, run_id)
    token = first(backend)
    assert backend.get_state() == (b"first", token)
    assert backend.connection.name.startswith("redis://127.0.0.1:")


def test_prefix_and_ttl_of_none_mean_the_defaults(client: redis.Redis, run_id: str) -> None:
    """torch's etcd backend takes None for both."""
    plain, backend = RedisRendezvousBackend(client, run_id), RedisRendezvousBackend(client, run_id, None, None)
    assert (backend.keys, backend.ttl) == (plain.keys, plain.ttl)
    first(backend)
    assert plain.get_state() == backend.get_state() is not None


# -- create_backend and create_handler


def test_a_client_that_waits_longer_than_a_lease_is_refused(
    server: RedisServer, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    """On a silently dead connection the node would lose its lease while it waits for one reply."""
    lease = {"keep_alive_interval": 20, "keep_alive_max_attempt": 3}
    params = parameters(server, run_id, **lease)
    refusal = r"socket_timeout=60 s .* lease is 60 s: .* with socket_timeout=5,"
    with server.get_client(socket_timeout=60) as client, pytest.raises(ValueError, match=refusal):
        create_handler(RedisRendezvousBackend(client, run_id), params)
    assert not caplog.records
    with server.get_client(socket_timeout=59) as client:
        handler = create_handler(RedisRendezvousBackend(client, run_id), params)
        assert "this node may lose its lease before it tries another" in caplog.text
        handler.shutdown()
    caplog.clear()
    with server.get_client(socket_timeout=5) as client:
        create_handler(RedisRendezvousBackend(client, run_id), params).shutdown()
    assert not caplog.records


def parameters(server: RedisServer, run_id: str, low: int = 1, high: int = 1, **config: Any) -> RendezvousParameters:
    return RendezvousParameters("redis", server.url, run_id, low, high, **config)


def test_create_backend_gives_a_backend_and_a_store_of_the_run(
    server: RedisServer, client: redis.Redis, run_id: str
) -> None:
    backend, store = create_backend(parameters(server, run_id, ttl=100, read_timeout=7, key_prefix="p"))
    assert (backend.keys, backend.ttl, store.timeout.total_seconds()) == (RunKeys(run_id, "p"), 100, 7)
    store.set("k", "v")
    assert client.hget(f"p:{{{run_id}}}:store:default", "k") == b"v"
    assert not client.keys(f"redelastic:*{run_id}*")
    store.close()
    backend.connection.close()


def test_create_backend_without_a_server(run_id: str) -> None:
    with peer(speak_http) as http:
        params = RendezvousParameters("redis", f"127.0.0.1:{http.port}", run_id, 1, 1)
        with pytest.raises(RendezvousConnectionError, match="is not Redis"):
            create_backend(params)


def test_parameters_for_another_run_are_refused(server: RedisServer, backend: RedisRendezvousBackend) -> None:
    other = parameters(server, "another")
    with pytest.raises(ValueError, match=rf"for run 'another' .*backend is for run '{backend.keys.run_id}'.*the same"):
        create_handler(backend, other)
    prefixed = parameters(server, backend.keys.run_id, key_prefix="p")
    with pytest.raises(ValueError, match="key_prefix='p', but the backend"):
        create_handler(backend, prefixed)
