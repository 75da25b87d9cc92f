"""The client: its replies have redis-py's form, and each belongs to its command."""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis

from redelastic.redis.client import DirectClient
from redelastic.redis.server import RedisServer


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
        assert client.execute_both(*both) == (1, 1)
        both[refused] = ("HGET", "list", "f")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            client.execute_both(*both)
        assert client.execute_command("PING") is True
        assert client.execute_both(("LLEN", "list"), ("HGET", "hash", "f")) == (1, b"1")


INTERRUPTED = """
import signal
from redelastic.redis.client import pack

def stop(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, stop)
words = ["MANY", *range(1_000_000)]
signal.setitimer(signal.ITIMER_REAL, 0.02)
try:
    pack(words)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_an_interrupt_while_a_command_is_packed_is_an_exception() -> None:
    """hiredis ends the process if it comes while it turns a number into text."""
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr


def test_no_connection_to_a_master_that_became_a_replica_is_kept(own_server: RedisServer) -> None:
    """Else each of them would cost an attempt."""
    with own_server.get_client() as admin, DirectClient.from_url(own_server.url) as client:
        taken = [client._take() for _ in range(3)]
        client._idle.extend(taken)
        assert client.execute_command("SET", "k", "v")
        admin.replicaof("127.0.0.1", 1)
        with pytest.raises(redis.ReadOnlyError):
            client.execute_command("SET", "k", "v")
        assert not client._idle
