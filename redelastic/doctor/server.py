"""Checks of a Redis server: what it reports about itself that matters to a run, and how far away it is."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import redis
from redis.cluster import RedisCluster

from redelastic.redis.connection import Connection, text
from redelastic.redis.endpoint import Endpoint

from .finding import LEVELS, Finding, Level, finding
from .host import is_local

Version = tuple[int, int, int]
Facts = Mapping[str, Any]  # about one server, from HELLO, INFO, CLUSTER INFO and CONFIG; what it refuses is missing

OLDEST: Final[Version] = (6, 2, 0)
NEWEST: Final = {"redis": 8, "valkey": 9}  # the newest major version that was tested
CONNECTIONS_PER_NODE: Final = 3  # the keeper's, the caller's and the store's
MIN_FREE_NODES: Final = 32  # that should still be able to connect
MIN_HZ: Final = 10  # a blocking read ends up to 1/hz s late; a node allows for a tenth of a second
MIN_SCRIPT_LIMIT_MS: Final = 100
PINGS: Final = 100
PINGS_S: Final = 1.5  # no more pings after this time, in seconds
SLOW_MS: Final = 10.0
_CONFIG: Final = (
    "busy-reply-threshold",
    "client-output-buffer-limit",
    "lua-time-limit",
    "min-replicas-to-write",
    "save",
    "timeout",
)


_named: Final = partial(finding, "server")
_found: Final = partial(finding, "server", "")  # by a check: `_judge` gives it the check's name


def examine_server(connection: Connection, endpoint: Endpoint) -> Iterator[Finding]:
    """Ask the server, or each master of a Cluster, about itself.

    Raises:
        UnavailableError: it stopped answering.
    """
    servers = {
        name: connection.call(lambda _, client=client: _ask(client))  # type: ignore[misc]
        for name, client in masters(connection).items()
    }
    facts_of_first = next(iter(servers.values()))
    yield _encryption(endpoint)
    yield _login(endpoint, facts_of_first)
    yield _topology(endpoint, facts_of_first)
    for name, (check, should) in _CHECKS.items():
        yield _worst({server: _judge(name, check, should, facts, endpoint) for server, facts in servers.items()})


def examine_round_trips(connection: Connection) -> Finding:
    """Measure the round trip to the server.

    Raises:
        UnavailableError: it stopped answering.
    """
    client = next(iter(masters(connection).values()))
    times: list[float] = []
    until = time.monotonic() + PINGS_S
    while len(times) < PINGS and (not times or time.monotonic() < until):
        started = time.perf_counter()
        connection.call(lambda _: client.ping())
        times.append(1000 * (time.perf_counter() - started))
    median, most = statistics.median(times), max(times)
    level: Level = "warning" if median > SLOW_MS else "ok"
    found = f"{median:.2f} ms median, {most:.2f} ms maximum of {len(times)} round trips"
    advice = "Move Redis closer to the nodes: a rendezvous takes several round trips."
    return finding("trial", "latency", level, found, advice, median_ms=median, max_ms=most)


def masters(connection: Connection) -> dict[str, redis.Redis]:
    """A client for each server that takes writes, by name; the name is empty if there is only one."""
    client = connection.client
    if isinstance(client, RedisCluster):
        return {node.name: client.get_redis_connection(node) for node in client.get_primaries()}
    return {"": client}


def _ask(client: redis.Redis) -> Facts:
    pipeline = client.pipeline(transaction=False)
    pipeline.execute_command("HELLO")
    pipeline.info()
    pipeline.execute_command("CLUSTER INFO")
    for name in _CONFIG:
        pipeline.config_get(name)
    hello, *others = pipeline.execute(raise_on_error=False)
    facts: dict[str, Any] = {}
    for reply in others:
        if isinstance(reply, dict):
            facts |= {text(name): value for name, value in reply.items()}
    if isinstance(hello, list):
        hello = dict(zip(hello[::2], hello[1::2], strict=True))
    if isinstance(hello, dict):
        fields = {text(name): text(value) for name, value in hello.items() if isinstance(value, bytes | str)}
        facts |= {"product": fields.get("server"), "version": fields.get("version"), "mode": fields.get("mode")}
        facts["role"] = {"replica": "slave"}.get(fields.get("role", ""), fields.get("role"))  # as INFO calls it
    elif "redis_version" in facts:
        valkey = facts.get("server_name") == "valkey"
        version = facts.get("valkey_version" if valkey else "redis_version")
        facts |= {"product": "valkey" if valkey else "redis", "version": version, "mode": facts.get("redis_mode")}
    return facts


def _judge(
    name: str, check: Callable[[Facts, Endpoint], Finding], should: str, facts: Facts, endpoint: Endpoint
) -> Finding:
    try:
        return replace(check(facts, endpoint), name=name)
    except (KeyError, ValueError, TypeError):
        return _named(name, "note", "unknown: this user may not ask", should)


def _worst(findings: Mapping[str, Finding]) -> Finding:
    """One finding for all masters: the worst, with the names of the masters concerned."""
    shown = max(findings, key=lambda name: LEVELS.index(findings[name].level))
    worst = findings[shown]
    if len({(one.level, one.found) for one in findings.values()}) == 1:
        return worst
    bad = sum(one.level == worst.level for one in findings.values())
    more = f" and {bad - 1} more" if bad > 1 else ""
    return replace(worst, found=f"{worst.found} (at {shown}{more})")


# -- How it is reached


def _encryption(endpoint: Endpoint) -> Finding:
    if endpoint.tls:
        return _named("encryption", "ok", "TLS")
    if endpoint.scheme == "unix" or is_local(endpoint):
        return _named("encryption", "ok", "none; the server is on this host")
    advice = "Anyone on the network path can read the password and change a run: use rediss:// and a server with TLS."
    return _named("encryption", "warning", "none", advice)


def _login(endpoint: Endpoint, facts: Facts) -> Finding:
    if not endpoint.password:
        level: Level = "note" if endpoint.scheme == "unix" or is_local(endpoint) else "warning"
        advice = "Anyone who reaches the server can change a run: set a password and users (SECURITY.md)."
        return _named("login", level, "none", advice)
    user = f"user {endpoint.username or 'default'!r}"
    if "timeout" not in facts:  # CONFIG is for administrators
        return _named("login", "ok", user)
    return _named("login", "note", f"{user}, an administrator", "A job's user needs fewer rights: see SECURITY.md.")


def _topology(endpoint: Endpoint, facts: Facts) -> Finding:
    kind, mode = endpoint.scheme.partition("+")[2], facts.get("mode")
    if mode == "cluster" and kind != "cluster":
        advice = "Use redis+cluster://: this node has only some of the keys."
        return _named("topology", "problem", "a node of a Cluster, reached as a single server", advice)
    if mode == "sentinel" and kind != "sentinel":
        advice = "Use redis+sentinel://host:port/master-name."
        return _named("topology", "problem", "a sentinel, reached as a server", advice)
    shown = {"cluster": "a Cluster", "sentinel": "a master that sentinels watch"}.get(kind, "a single server")
    return _named("topology", "ok", shown)


# -- What one server reports


def _version_of(facts: Facts) -> Version:
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", facts["version"])
    if not match:
        raise ValueError(facts["version"])
    return int(match[1]), int(match[2]), int(match[3])


def _version(facts: Facts, _: Endpoint) -> Finding:
    product, version = facts["product"], _version_of(facts)
    shown = f"{product.capitalize()} {facts['version']}"
    if product not in NEWEST:
        return _found("note", shown, "Not tested; Redis 6.2 to 8 and Valkey up to 9 are known to work.")
    if version < OLDEST:
        return _found("problem", shown, "Too old: redelastic needs Redis 6.2 or newer, or Valkey.")
    if version[0] > NEWEST[product]:
        return _found("note", shown, "Newer than the tested versions.")
    return _found("ok", shown)


def _role(facts: Facts, _: Endpoint) -> Finding:
    if facts["role"] == "slave":
        advice = "Name its master, or use redis+sentinel:// to follow the master."
        return _found("problem", "a replica: read-only", advice)
    return _found("ok", facts["role"])


def _cluster(facts: Facts, _: Endpoint) -> Finding:
    if facts["mode"] != "cluster":
        return _found("ok", "not a Cluster")
    if facts["cluster_state"] != "ok":
        return _found("problem", f"the Cluster is {facts['cluster_state']}", "See CLUSTER INFO and CLUSTER NODES.")
    return _found("ok", f"ok, {facts['cluster_size']} masters")


def _eviction(facts: Facts, _: Endpoint) -> Finding:
    policy, limited = facts["maxmemory_policy"], bool(facts["maxmemory"])
    advice = "Set maxmemory-policy noeviction."
    if policy == "noeviction":
        return _found("ok", policy)
    if not limited:
        return _found("warning", f"{policy}; no maxmemory, so nothing is evicted yet", advice)
    if policy.startswith("allkeys"):
        return _found("problem", f"{policy}: keys of running jobs are evicted when memory is full", advice)
    return _found("warning", f"{policy}: a run's keys have a time to live, so they can be evicted", advice)


def _memory(facts: Facts, _: Endpoint) -> Finding:
    used, limit = int(facts["used_memory"]), int(facts["maxmemory"])
    if not limit:
        return _found("ok", f"{_mib(used)} used, no maxmemory", used_bytes=used)
    shown = f"{_mib(used)} of {_mib(limit)} used"
    advice = "Raise maxmemory, or free memory; a run needs up to 8 MiB for its events, and 100 kB for each node."
    share = used / limit
    level: Level = "problem" if share >= 1 else "warning" if share > 0.9 else "ok"
    return _found(level, shown, advice, used_bytes=used, limit_bytes=limit)


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


def _persistence(facts: Facts, _: Endpoint) -> Finding:
    # A server that refuses writes because it cannot persist them refuses PING too, so this is never reached.
    if facts["save"] and facts["rdb_last_bgsave_status"] != "ok":
        return _found("warning", "the last snapshot failed", "Check the server's log and disk.")
    if facts["aof_enabled"]:
        return _found("ok", "append-only file")
    if facts["save"]:
        return _found("note", "snapshots only: a crash loses everything after the last one", "Set appendonly yes.")
    level: Level = "note" if int(facts["connected_slaves"]) else "warning"
    return _found(level, "none: a restart loses finished runs, events, stores", "Set appendonly yes, or add replicas.")


def _replicas(facts: Facts, endpoint: Endpoint) -> Finding:
    count, required = int(facts["connected_slaves"]), int(facts["min-replicas-to-write"])
    good = int(facts.get("min_slaves_good_slaves", count))
    if required > good:
        found = f"{good} in step, and min-replicas-to-write is {required}: writes are refused"
        return _found("problem", found, "Repair the replicas, or lower min-replicas-to-write.")
    level: Level = "warning" if "+" in endpoint.scheme else "note"  # with a failover or without
    if not count:
        return _found(level, "none: nothing takes over if this server fails")
    if not required:
        advice = "Set min-replicas-to-write 1: an isolated master must stop accepting writes (PROTOCOL.md)."
        return _found(level, f"{count}, and min-replicas-to-write is 0", advice)
    return _found("ok", f"{count}, and min-replicas-to-write is {required}", replicas=count)


def _clients(facts: Facts, _: Endpoint) -> Finding:
    connected, limit = int(facts["connected_clients"]), int(facts["maxclients"])
    nodes = max(0, limit - connected) // CONNECTIONS_PER_NODE
    found = f"{connected:,} of {limit:,} connected: room for about {nodes:,} nodes"
    level: Level = "problem" if nodes < 2 else "warning" if nodes < MIN_FREE_NODES else "ok"
    return _found(level, found, "Raise maxclients.", connected=connected, limit=limit)


def _idle_timeout(facts: Facts, _: Endpoint) -> Finding:
    seconds = int(facts["timeout"])
    if not seconds:
        return _found("ok", "idle connections stay open")
    found = f"idle connections are closed after {seconds} s, and reopened when needed"
    return _found("note" if seconds < 60 else "ok", found, "Set timeout 0.", seconds=seconds)


def _hz(facts: Facts, _: Endpoint) -> Finding:
    hz = int(facts["configured_hz"])
    if hz >= MIN_HZ:
        return _found("ok", str(hz), hz=hz)
    return _found("warning", f"{hz}: blocking reads end up to {1 / hz:.1f} s late", f"Set hz {MIN_HZ}.", hz=hz)


def _script_limit(facts: Facts, _: Endpoint) -> Finding:
    ms = int(facts["busy-reply-threshold"] if "busy-reply-threshold" in facts else facts["lua-time-limit"])
    level: Level = "note" if 0 < ms < MIN_SCRIPT_LIMIT_MS else "ok"
    advice = "Longer scripts of other users make the server answer BUSY: 5000 is usual."
    return _found(level, f"{ms} ms" if ms else "none", advice, ms=ms)


def _output_limit(facts: Facts, _: Endpoint) -> Finding:
    words = facts["client-output-buffer-limit"].split()
    hard = int(words[words.index("normal") + 1])
    if not hard or hard >= 2**25:
        return _found("ok", _mib(hard) if hard else "none for normal clients")
    found = f"{_mib(hard)}: a larger store reply disconnects the client"
    return _found("warning", found, "Set it to 0 for normal clients.")


_CHECKS: Final[Mapping[str, tuple[Callable[[Facts, Endpoint], Finding], str]]] = {
    "version": (_version, "It should be Redis 6.2 or newer, or Valkey."),
    "role": (_role, "It should be a master."),
    "cluster": (_cluster, "If it is a Cluster, its state should be ok."),
    "eviction": (_eviction, "maxmemory-policy should be noeviction."),
    "memory": (_memory, "It should have some MiB to spare."),
    "persistence": (_persistence, "appendonly should be yes, unless there are replicas."),
    "replicas": (_replicas, "With replicas, min-replicas-to-write should be 1."),
    "clients": (_clients, f"Each node needs about {CONNECTIONS_PER_NODE} connections."),
    "idle-timeout": (_idle_timeout, "timeout should be 0."),
    "hz": (_hz, f"hz should be {MIN_HZ} or more."),
    "script-limit": (_script_limit, "lua-time-limit should not be below 100 ms."),
    "output-limit": (_output_limit, "client-output-buffer-limit should be 0 for normal clients."),
}
