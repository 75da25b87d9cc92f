"""Errors of Redis as ours: which are final at once, which may pass, and what each says to do."""

from __future__ import annotations

import pytest
import redis

from redelastic.redis import scripts
from redelastic.redis.connection import Connection
from redelastic.redis.errors import CorruptStateError, RedelasticError, UnavailableError, UnreachableError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.calls import increment, open_connection, takes

# -- refused


@pytest.mark.parametrize("login", [":wrong@", "", "nobody:wrong@", "default:@"])
def test_a_refused_login_is_final_and_says_where_to_put_it(server: RedisServer, login: str) -> None:
    with (
        takes(0, 1),
        pytest.raises(UnavailableError, match=r"refused the login: .*REDELASTIC_REDIS_URL") as raised,
    ):
        open_connection(f"redis://{login}{server.endpoint}")
    assert not isinstance(raised.value, UnreachableError)


def test_a_user_that_is_switched_off_while_we_are_connected(own_server: RedisServer) -> None:
    with own_server.get_client() as admin:
        admin.acl_setuser("u", enabled=True, passwords=["+p"], categories=["+@all"], keys=["*"])
        connection = open_connection(f"redis://u:p@{own_server.endpoint}")
        admin.acl_setuser("u", enabled=False)
        admin.client_kill_filter(_type="normal", skipme=True)
        with takes(0, 1), pytest.raises(UnavailableError, match="refused the login"):
            connection.call(increment)
        connection.close()


def test_a_database_that_is_not_there(server: RedisServer) -> None:
    with (
        takes(0, 1),
        pytest.raises(UnavailableError, match=r"does not have that database.*Omit the number"),
    ):
        open_connection(server.url.removesuffix("/0") + "/99")


def test_a_server_that_is_no_cluster_and_no_sentinel(server: RedisServer) -> None:
    for scheme, rest, says in (
        ("redis+cluster", "", r"is not a Cluster. Use redis://"),
        ("redis+sentinel", f"/m?sentinel_password={server.password}", r"is not a sentinel. Use redis://"),
    ):
        url = server.url.replace("redis://", f"{scheme}://").removesuffix("/0") + rest
        with takes(0, 1), pytest.raises(UnavailableError, match=says):
            open_connection(url)


@pytest.mark.fault("the endpoint is a read-only replica", "it is told at once, with what to do")
def test_a_replica_is_refused(server: RedisServer) -> None:
    with servers.replica_of(server) as replica:
        connection = open_connection(replica.url)
        for write in (increment, lambda _: scripts.CLOSE(connection, [*RunKeys("r").types, "n"], [1000, 0, "me"])):
            with takes(0, 1), pytest.raises(UnavailableError, match=r"read-only replica. Name its master"):
                connection.call(write)
        connection.close()


@pytest.mark.fault("maxmemory is reached, at a call", "it is told at once, with what to do")
def test_a_request_that_is_too_long_is_sent_once() -> None:
    """The server says so and hangs up while the request is still being sent."""
    with servers.redis_server("right", {"proto-max-bulk-len": "1mb"}) as server, server.get_client() as admin:
        connection = open_connection(server.url)
        before = admin.info("stats")["total_connections_received"]
        with pytest.raises(UnavailableError, match="proto-max-bulk-len") as raised:
            connection.exchange((b"SET", b"k", bytes(4_000_000)))
        assert not isinstance(raised.value, UnreachableError)
        assert admin.info("stats")["total_connections_received"] == before
        assert connection.call(increment) == 1
        connection.close()


def test_a_server_out_of_memory(own_server: RedisServer) -> None:
    with own_server.get_client() as admin:
        connection = open_connection(own_server.url)
        admin.config_set("maxmemory", "1")
        with pytest.raises(UnavailableError, match=r"out of memory.*Raise its maxmemory"):
            connection.call(increment)
        connection.close()


# -- the map of errors


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        ("return redis.error_reply('CORRUPT the key')", CorruptStateError, "the key. Remove that key"),
        ("return redis.error_reply('NOREPLICAS Not enough good replicas')", UnreachableError, "NOREPLICAS"),
        ("return redis.error_reply('CLUSTERDOWN Hash slot not served')", UnreachableError, "not served"),
        ("return redis.error_reply('TRYAGAIN Multiple keys')", UnreachableError, "Multiple keys"),
        ("return redis.error_reply('MASTERDOWN Link')", UnreachableError, "Link"),
        ("return redis.error_reply('LOADING Redis is loading')", UnreachableError, "is loading"),
        ("return redis.error_reply('MOVED 1 127.0.0.1:7')", UnavailableError, r"Use redis\+cluster://"),
        ("return redis.error_reply('ERR whatever')", RedelasticError, "answered with an error: whatever"),
        ("return redis.call('LPUSH', KEYS[1], 1), redis.call('GET', KEYS[1])", CorruptStateError, "wrong type"),
        ("return nil + 1", CorruptStateError, "redelastic's script cannot read"),
    ],
)
def test_replies_become_torchs_errors(server: RedisServer, run_id: str, code: str, kind: type, says: str) -> None:
    connection = open_connection(server.url)
    with pytest.raises(RedelasticError, match=says) as raised:
        connection.call(lambda c: c.eval(code, 1, run_id), 0)
    assert type(raised.value) is kind
    assert server.endpoint in str(raised.value)
    assert isinstance(raised.value.__cause__, redis.RedisError)
    assert ".." not in str(raised.value)
    connection.close()


def test_what_redis_py_itself_refuses_is_no_outage(connection: Connection) -> None:
    with takes(0, 0.5), pytest.raises(RedelasticError, match="redis-py rejected") as raised:
        connection.call(lambda c: c.set("k", object()))  # type: ignore[arg-type]
    assert not isinstance(raised.value, UnavailableError)
