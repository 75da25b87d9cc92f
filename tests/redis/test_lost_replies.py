"""Calls whose reply is lost: redis-py sends nothing twice of its own accord."""

from __future__ import annotations

import pytest
import redis
from redis.cluster import RedisCluster

from redelastic import RedisStore
from redelastic.redis.errors import UnreachableError
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.calls import ATTEMPT_TIMEOUT, increment, open_connection
from tests.support.peers import lossy_proxy


def careless_client(url: str) -> redis.Redis:
    """A client with redis-py's own defaults, which `from_url` does not give it."""
    options = redis.connection.parse_url(url)
    return redis.Redis(options["host"], options["port"], password=options["password"])


def counts(client: redis.Redis | RedisCluster) -> int:
    return int(client.get("counter") or 0)


def test_redis_py_sends_nothing_twice_when_the_connection_breaks(own_server: RedisServer) -> None:
    """Each lost reply is an effect that redis-py's own retry would double."""
    with own_server.get_client() as admin, lossy_proxy(own_server, b"INCRBY") as (url, control):
        connection = open_connection(url)
        for n in range(1, 6):
            control.losses = 1
            with pytest.raises(UnreachableError):
                connection.call(increment, 0)
            assert control.losses == 0
            assert control.sends_of(b"INCRBY") == n
            assert counts(admin) == n
        control.losses = 3
        assert connection.call(increment) == 9  # our own retries are counted too: three lost, one answered
        assert control.sends_of(b"INCRBY") == 9
        connection.close()


def test_redis_pys_defaults_would_send_twice(own_server: RedisServer) -> None:
    """The proxy would show it: this is the control of the test above."""
    with own_server.get_client() as admin, lossy_proxy(own_server, b"INCRBY") as (url, control):
        with careless_client(url) as careless:
            control.losses = 1
            careless.incr("counter")
        assert control.losses == 0
        assert counts(admin) == 2


def test_redis_py_sends_nothing_twice_when_the_time_is_up(own_server: RedisServer) -> None:
    connection = open_connection(own_server.url, attempt=ATTEMPT_TIMEOUT)
    with own_server.get_client() as admin:
        connection.call(lambda c: c.set("counter", 1))  # however often it is sent
        with servers.frozen(own_server), pytest.raises(UnreachableError):
            connection.call(increment, 0)
        assert counts(admin) == 2
    connection.close()


def test_a_callers_own_client_may_send_twice_and_nothing_doubles(own_server: RedisServer, run_id: str) -> None:
    with lossy_proxy(own_server) as (url, control), careless_client(url) as careless:
        store = RedisStore(careless, run_id)
        assert store.add("n", 1) == 1
        before = control.sends_of(b"EVALSHA")
        control.losses = 2
        assert store.add("n", 1) == 2
        store.queue_push("q", "item")
        assert store.queue_len("q") == 1
        assert control.losses == 0
        assert control.sends_of(b"EVALSHA") >= before + 4
        store.close()
