"""The client: its replies have redis-py's form, and each belongs to its command."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable
from typing import Any

import hiredis
import pytest
import redis
from redis.sentinel import SentinelConnectionPool

from redelastic.redis import scripts
from redelastic.redis.client import DirectClient, pack, pack_bytes
from redelastic.redis.server import RedisServer
from tests.support.servers import HOST, port_of


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize(
    "command",
    [
        ("HGETALL", "hash"),  # redis-py makes a dict of it
        ("hgetall", "hash"),
        ("HEXISTS", "hash", "f"),  # and a bool of this
        ("HGET", "hash", "f"),
        ("XREAD", "STREAMS", "stream", "0"),
        ("ZRANGE", "zset", 0, -1, "WITHSCORES"),
        ("TIME",),
    ],
)
def test_replies_are_in_redis_pys_form(own_server: RedisServer, protocol: int, command: tuple[str | int, ...]) -> None:
    clients = [kind.from_url(own_server.url, protocol=protocol) for kind in (DirectClient, redis.Redis)]
    with clients[0] as ours, clients[1] as theirs:
        ours.hset("hash", "f", "1")
        ours.xadd("stream", {"f": "1"})
        ours.zadd("zset", {"member": 1})
        mine, its = (client.execute_command(*command) for client in (ours, theirs))
        assert type(mine) is type(its)
        assert command == ("TIME",) or mine == its


@pytest.mark.parametrize("refused", [0, 1], ids=["the first is refused", "the second is refused"])
def test_of_two_commands_sent_together_no_reply_is_anothers(own_server: RedisServer, refused: int) -> None:
    with DirectClient.from_url(own_server.url) as client:
        client.rpush("list", "item")
        client.hset("hash", "f", "1")
        both = [("HEXISTS", "hash", "f"), ("EXISTS", "list")]
        assert client.exchange(b"".join(map(pack, both)), 2) == [1, 1]
        both[refused] = ("HGET", "list", "f")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.exchange(b"".join(map(pack, both)), 2)
        assert client.execute_command("PING") is True
        last = pack(("LLEN", "list")) + pack(("HGET", "hash", "f"))
        assert client.exchange(last, 2) == [1, b"1"]


def test_what_a_resp3_server_pushes_is_taken_for_no_reply(own_server: RedisServer) -> None:
    """Neither before the replies nor between them, where they are in the buffer already, however much it is."""
    with DirectClient.from_url(own_server.url, protocol=3) as client, own_server.get_client() as other:
        client.exchange(pack(("CLIENT", "TRACKING", "on", "BCAST")))
        for _ in range(2000):
            other.set("k", "1")
        get = pack(("GET", "k"))
        assert client.exchange(get + pack(("SET", "k", "2")) + get + get, 4) == [b"1", b"OK", b"2", b"2"]


@pytest.mark.parametrize("words", [[], [b""], [b"GET", b"100 %d"], [bytes(i) for i in range(300)]])
def test_bytes_are_packed_as_hiredis_packs_them(words: list[bytes]) -> None:
    assert pack_bytes(words) == pack(words) == hiredis.pack_command(tuple(words))  # type: ignore[arg-type]


def test_text_and_numbers_are_packed_as_hiredis_packs_them() -> None:
    words = ("SET", "k\u00e9y", b"\xff", 7, -1.5, 1e300)
    assert pack(words) == hiredis.pack_command(words)  # type: ignore[arg-type]
    with pytest.raises(redis.DataError, match="None"):
        pack(("SET", None))


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_is_packed_as_hiredis_packs_it(whole: bool) -> None:
    """Whatever is in the words that are packed once, and however many different calls came before."""
    script, keys, args = scripts.STORE_SET, ["100 %d", "%b", "%"], ["", "50 %"]
    call = scripts.Call(script, keys, args)
    for n in (*range(100), 0, 1):
        more_keys, more_args = [b"%d" % i for i in range(n)], [b"%%"] * (2 * n)
        first = ("EVAL", script.text) if whole else ("EVALSHA", script.digest)
        words = (*first, str(3 + n), *keys, *more_keys, *args, *more_args)
        assert call.packed(more_keys, more_args, whole=whole) == hiredis.pack_command(words)  # type: ignore[arg-type]
    assert sum(map(len, call._templates.values())) < 50_000, "what is kept does not grow with what was called"


INTERRUPTED = """
import signal
from redelastic.redis.client import DirectClient, pack

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
words = ["MANY", *range(1_000_000)]
connection = DirectClient().connection_pool.make_connection()
for delay in (0.02, 0.05, 0.1, 0.2, 0.3):
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        {packs}
        signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("packs", ["pack(words)", "connection.pack_command(*words)"], ids=["ours", "redis-py's"])
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
        pool = SentinelConnectionPool("master", Found(own_server), password=password)
        with DirectClient(connection_pool=pool) as client:
            assert client.execute_command("SET", "k", "v")
            admin.replicaof("127.0.0.1", 1)
            with pytest.raises(redis.ConnectionError, match="is now a replica"):
                client.execute_command("SET", "k", "v")
            admin.replicaof("no", "one")
            assert client.execute_command("SET", "k", "v")


class Held:
    """Something that a caller holds while a command is refused."""


def test_a_refusal_keeps_nothing_of_its_callers_alive(own_server: RedisServer) -> None:
    def refused(client: DirectClient) -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(redis.ResponseError):
            client.execute_command("EVALSHA", "0" * 40, 0)
        return weakref.ref(held)

    with DirectClient.from_url(own_server.url) as client:
        gc.disable()
        try:
            assert refused(client)() is None
        finally:
            gc.enable()


def test_a_closed_client_opens_new_connections(own_server: RedisServer) -> None:
    with DirectClient.from_url(own_server.url) as client:
        for _ in range(3):
            assert client.execute_command("PING")
            client.close()
        assert not client.connection_pool._in_use_connections
        assert client.execute_command("PING")
        client.connection_pool.disconnect()
        assert client.execute_command("PING")


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.execute_command("PING"),
        lambda client: client.pipeline().execute_command("PING").execute(),
        lambda client: client.connection_pool.get_connection(),
    ],
    ids=["command", "pipeline", "connection"],
)
def test_a_login_that_was_interrupted_is_nobodys_connection(
    own_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[[redis.Redis], Any],
    error: type[BaseException],
) -> None:
    """redis-py puts it back into its pool, with the login's reply still to come."""
    login = redis.Connection.on_connect_check_health
    interrupted: list[redis.Connection] = []

    def on_connect(self: redis.Connection, *args: Any, **options: Any) -> None:
        login(self, *args, **options)
        if not interrupted:
            interrupted.append(self)
            self.send_command("ECHO", "of the login")
            raise error

    monkeypatch.setattr(redis.Connection, "on_connect_check_health", on_connect)
    with DirectClient.from_url(own_server.url) as client:
        with pytest.raises(error):
            call(client)
        assert client.execute_command("ECHO", "ours") == b"ours"


def test_no_connection_to_a_master_that_became_a_replica_is_kept(own_server: RedisServer) -> None:
    """Else each of them would cost an attempt."""
    with own_server.get_client() as admin, DirectClient.from_url(own_server.url) as client:
        taken = [client.take() for _ in range(3)]
        client._idle.extend(taken)
        assert client.execute_command("SET", "k", "v")
        admin.replicaof("127.0.0.1", 1)
        with pytest.raises(redis.ReadOnlyError):
            client.execute_command("SET", "k", "v")
        assert not client._idle
