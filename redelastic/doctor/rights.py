"""Whether this Redis user may do what a run needs, tried on keys beside the run's own."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis.cluster import RedisCluster

from redelastic.monitoring.wording import few
from redelastic.redis.connection import Connection, text
from redelastic.redis.errors import ACL_RULES, RedelasticError
from redelastic.redis.keys import RunKeys

from .finding import Finding

TTL: Final = 60.0  # how long leftovers that could not be removed stay, in seconds
WAKES: Final = 5  # keys of the trial's store that a reader waits for
KINDS: Final = ("string", "hash", "set", "zset", "stream", "list")

# One harmless call of each command that a run sends or that its scripts call: a script has only its user's rights.
# A word of KINDS stands for a key of that type.
PROBES: Final = (
    "PING",
    "TIME",
    "EVAL return(1) 1 string",
    f"EVALSHA {'0' * 40} 1 string",
    *("DEL string", "SET string v", "GET string", "MGET string", "EXISTS string", "TYPE string"),
    *("HSET hash f 1", "HSETNX hash f 1", "HGET hash f", "HMGET hash f", "HGETALL hash", "HKEYS hash", "HLEN hash"),
    *("HEXISTS hash f", "HINCRBY hash f 1", "HDEL hash g"),
    *("SADD set m", "SCARD set", "SISMEMBER set m", "SMEMBERS set", "SREM set n"),
    *("ZADD zset 1 m", "ZCARD zset", "ZCOUNT zset 0 1", "ZRANGE zset 0 1", "ZRANGEBYSCORE zset 0 1", "ZSCORE zset m"),
    *("ZREM zset n", "ZREMRANGEBYRANK zset 5 6"),
    *("XADD stream * f v", "XREVRANGE stream + - COUNT 1", "XREAD COUNT 1 STREAMS stream 0"),
    *("RPUSH list v", "LLEN list", "LPOP list"),
    *(f"PEXPIRE {kind} {round(1000 * TTL)}" for kind in KINDS),
    "PTTL string",
)
_DENIED_COMMAND: Final = re.compile(r"run the '([^' |]+)|unknown command [`']([^'`,]+)")


@dataclass(frozen=True)
class _CornerKeys(RunKeys):
    """Keys in the run's slot that match its ACL pattern but are not the run's own."""

    corner: str = ""

    def _key(self, name: str) -> str:
        return super()._key(f"{self.corner}:{name}")

    def probe(self, kind: str) -> str:
        """The name of a key of that type to try commands on."""
        return self._key(f"probe-{kind}")


class Corner:
    """The keys that a trial writes: in a run's slot and pattern, beside the run's own.

    Args:
        key_prefix: prefix of the run's keys.
        run_id: id of the run; empty for one of the trial's own.

    Raises:
        ValueError: they cannot be part of a key.
    """

    def __init__(self, key_prefix: str, run_id: str) -> None:
        self.name = f"doctor-{uuid.uuid4().hex[:12]}"
        self.keys = _CornerKeys(run_id or self.name, key_prefix, self.name)
        self.store_keys = RunKeys(self.keys.run_id, key_prefix).store(self.name)
        store_keys = [f"{what}-{which}" for what in ("value", "count") for which in ("first", "second")]
        store_keys += [f"wake-{n}" for n in range(WAKES)]
        self._written = [*self.keys.types, *(self.keys.probe(kind) for kind in KINDS)]
        self._written += [self.store_keys.data, self.store_keys.waits]
        self._written += [text(self.store_keys.stream(key.encode())) for key in store_keys]
        for epoch in range(2):  # the scripts of a rendezvous take the key of the round before
            self._written += [self.keys.store(epoch).data, self.keys.store(epoch).waits]

    @property
    def pattern(self) -> str:
        """The pattern of the trial's key names."""
        return f"{self.keys.prefix}:{{{self.keys.run_id}}}:*"

    @property
    def rules(self) -> str:
        """The ACL rules that the user needs: for the run, or for all runs under the key prefix."""
        keys = f"~{self.keys.prefix}:*" if self.keys.run_id == self.name else f"~{self.pattern}"
        return f"{keys} {ACL_RULES.partition(' ')[2]}"

    def add(self, key: str) -> None:
        """Have :meth:`clear` remove one more key."""
        self._written.append(key)

    def clear(self, connection: Connection) -> None:
        """Remove everything written; what the server refuses to remove expires."""
        try:
            connection.call(lambda client: client.delete(*self._written), timeout=0)
        except RedelasticError:
            return


def examine_rights(connection: Connection, corner: Corner) -> Finding:
    """Try each command that a run needs once.

    ACL DRYRUN would answer this too, but only administrators may call it.

    Raises:
        UnavailableError: the server stopped answering.
    """
    replies = connection.call(lambda client: _probe(client, corner.keys))
    denied = [str(reply) for reply in replies if isinstance(reply, redis.ResponseError) and _is_denial(reply)]
    commands = sorted({(m[1] or m[2]).upper() for reply in denied if (m := _DENIED_COMMAND.search(reply))})
    if commands:
        found = f"this user may not run {few(commands, 8)}"
        return Finding("trial", "rights", "problem", found, f"It needs the rules '{corner.rules}' (SECURITY.md).")
    if denied:
        advice = f"If the user is for one run, name it with --run; otherwise grant it ~{corner.keys.prefix}:*."
        return Finding("trial", "rights", "problem", f"this user may not use the keys {corner.pattern}", advice)
    return Finding("trial", "rights", "ok", f"this user may do everything that a run needs with {corner.pattern}")


def _probe(client: redis.Redis | RedisCluster, keys: _CornerKeys) -> list[Any]:
    if isinstance(client, RedisCluster):
        client = client.get_redis_connection(client.get_node_from_key(keys.probe(KINDS[0])))
    pipeline = client.pipeline(transaction=False)
    for line in PROBES:
        command, *words = line.split()
        pipeline.execute_command(command, *(keys.probe(word) if word in KINDS else word for word in words))
    replies: list[Any] = pipeline.execute(raise_on_error=False)
    return replies


def _is_denial(reply: redis.ResponseError) -> bool:
    return isinstance(reply, redis.exceptions.NoPermissionError) or str(reply).startswith("unknown command")
