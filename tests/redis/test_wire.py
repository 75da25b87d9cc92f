"""The wire: each reply belongs to its command, and nobody is given a connection on which something went wrong."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import hiredis
import pytest
import redis
from redis.sentinel import SentinelConnectionPool

from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.server import RedisServer
from redelastic.redis.sockets import encoded
from redelastic.redis.wire import Client, ClientWire, PoolWire
from tests.support.servers import HOST, port_of, wait_until
from tests.support.stores import until

PING = (b"PING",)


@pytest.fixture
def ours(own_server: RedisServer) -> Iterator[redis.Redis]:
    """A client as an endpoint opens it."""
    client = parse_endpoint(own_server.url).open(60)
    assert isinstance(client, redis.Redis)
    with client:
        yield client


@pytest.fixture
def wire(ours: redis.Redis) -> Iterator[PoolWire]:
    with closing(PoolWire(ours.connection_pool)) as made:
        yield made


@pytest.mark.parametrize("refused", [0, 1], ids=["the first is refused", "the second is refused"])
def test_of_two_commands_sent_together_no_reply_is_anothers(ours: redis.Redis, wire: PoolWire, refused: int) -> None:
    ours.rpush("list", "item")
    ours.hset("hash", "f", "1")
    both = [(b"HEXISTS", b"hash", b"f"), (b"EXISTS", b"list")]
    assert wire.exchange(*both) == [1, 1]
    both[refused] = (b"HGET", b"list", b"f")
    with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
        wire.exchange(*both)
    assert wire.exchange((b"LLEN", b"list"), (b"HGET", b"hash", b"f")) == [1, b"1"]
    assert len(ours.client_list()) == 2, "a refusal costs no connection"


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("make", [lambda client: PoolWire(client.connection_pool), ClientWire], ids=["pool", "client"])
def test_both_wires_reply_alike(own_server: RedisServer, make: Callable[[Client], Any], protocol: int) -> None:
    with redis.Redis.from_url(own_server.url, protocol=protocol) as client:
        client.hset("hash", "f", "1")
        first = client.xadd("stream", {"f": "1", "g": "2"})
        wire = make(client)
        assert wire.exchange((b"HGET", b"hash", b"f"), (b"HMGET", b"hash", b"f", b"g")) == [b"1", [b"1", None]]
        read = wire.exchange((b"XREAD", b"BLOCK", b"1", b"STREAMS", b"stream", b"0"))[0]
        [(_, fields)] = dict(read)[b"stream"]
        assert ([*dict(read)], fields) == ([b"stream"], [b"f", b"1", b"g", b"2"])
        assert not wire.exchange((b"XREAD", b"BLOCK", b"1", b"STREAMS", b"stream", first))[0]


def test_words_are_encoded_as_hiredis_encodes_them() -> None:
    words = ("SET", "k\u00e9y", b"\xff", 7, -1.5, 1e300)
    assert hiredis.pack_command(encoded(words)) == hiredis.pack_command(words)  # type: ignore[arg-type]
    with pytest.raises(redis.DataError, match="None"):
        encoded(("SET", None))  # type: ignore[arg-type]


INTERRUPTED = """
import signal
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.sockets import encoded

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
words = ["MANY", *range(1_000_000)]
connection = parse_endpoint("redis://nowhere").open(1).connection_pool.make_connection()
for delay in (0.02, 0.05, 0.1, 0.2, 0.3):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        {packs}
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("packs", ["encoded(words)", "connection.pack_command(*words)"], ids=["ours", "redis-py's"])
def test_an_interrupt_while_a_command_is_packed_is_an_exception(packs: str) -> None:
    """hiredis' own packing ends the process if it comes while a number is turned into text."""
    program = INTERRUPTED.replace("{packs}", packs)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "interrupted" in done.stdout


class Found:
    """A sentinel that always names the same master."""

    def __init__(self, server: RedisServer) -> None:
        self.address = HOST, port_of(server)

    def discover_master(self, _: str) -> tuple[str, int]:
        return self.address


def test_a_sentinels_master_that_became_a_replica_is_looked_for_again(own_server: RedisServer) -> None:
    """As redis-py has it: what named the master is expected to name another soon."""
    with own_server.get_client() as admin:
        password = admin.get_connection_kwargs()["password"]
        wire = PoolWire(SentinelConnectionPool("master", Found(own_server), password=password))
        assert wire.exchange((b"SET", b"k", b"v"))
        admin.replicaof("127.0.0.1", 1)
        with pytest.raises(redis.ConnectionError, match="previous master"):
            wire.exchange((b"SET", b"k", b"v"))
        admin.replicaof("no", "one")
        assert wire.exchange((b"SET", b"k", b"v"))
        wire.close()


class Held:
    """Something that a caller holds while a command is refused."""


@pytest.mark.parametrize("commands", [1, 2])
def test_a_refusal_keeps_nothing_of_its_callers_alive(wire: PoolWire, commands: int) -> None:
    def refused() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(redis.ResponseError):
            wire.exchange(*[(b"EVALSHA", b"0" * 40, b"0")] * commands)
        return weakref.ref(held)

    gc.disable()
    try:
        assert refused()() is None
    finally:
        gc.enable()


def test_a_closed_wire_opens_new_connections(ours: redis.Redis, wire: PoolWire) -> None:
    for _ in range(3):
        assert wire.exchange(PING) == [b"PONG"]
        wire.close()
    wait_until(lambda: len(ours.client_list()) == 1, "the one that asks is left")
    assert wire.exchange(PING) == [b"PONG"]
    ours.connection_pool.disconnect()
    assert wire.exchange(PING) == [b"PONG"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.ping(),
        lambda client: client.pipeline().ping().execute(),
        lambda client: PoolWire(client.connection_pool).exchange(PING),
    ],
    ids=["command", "pipeline", "wire"],
)
def test_a_login_that_was_interrupted_is_nobodys_connection(
    ours: redis.Redis, wire: PoolWire, call: Callable[[redis.Redis], Any], error: type[BaseException]
) -> None:
    """redis-py puts it back into its pool, with the login's reply still to come."""
    interrupted: list[redis.Connection] = []

    def on_connect(connection: redis.Connection) -> None:
        connection.on_connect()
        if not interrupted:
            interrupted.append(connection)
            connection.send_command("ECHO", "of the login")
            raise error

    ours.connection_pool.connection_kwargs["redis_connect_func"] = on_connect
    with pytest.raises(error):
        call(ours)
    assert ours.echo("ours") == b"ours"
    assert wire.exchange((b"ECHO", b"ours")) == [b"ours"]


def test_no_connection_to_a_master_that_became_a_replica_is_kept(own_server: RedisServer, wire: PoolWire) -> None:
    """Else each of them would cost an attempt."""
    with own_server.get_client() as admin, ThreadPoolExecutor(4) as pool:
        blocked = [pool.submit(wire.exchange, (b"BLPOP", b"list", b"0")) for _ in range(4)]
        wait_until(lambda: admin.info("clients")["blocked_clients"] == 4, "each has a connection")
        admin.rpush("list", *"abcd")
        assert all(each.result(60) for each in blocked)
        assert len(admin.client_list()) == 5
        admin.replicaof("127.0.0.1", 1)
        with pytest.raises(redis.ReadOnlyError):
            wire.exchange((b"SET", b"k", b"v"))
        admin.replicaof("no", "one")
        assert wire.exchange((b"SET", b"k", b"v")) == [b"OK"]
        wait_until(lambda: len(admin.client_list()) == 2, "one is left, and the one that asks")


def test_a_connection_that_the_server_closed_while_idle_is_not_used(ours: redis.Redis, wire: PoolWire) -> None:
    """Redis' setting ``timeout`` does so: it is no outage."""
    wire.exchange(PING)
    ours.config_set("timeout", 1)
    until(lambda: len(ours.client_list()) == 1)
    assert wire.exchange(PING) == [b"PONG"]
