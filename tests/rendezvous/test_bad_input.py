"""Corrupt keys, nodes that disagree, and parameters that do not fit: a clear error, or no harm; and nothing hangs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
from torch.distributed import DistStoreError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from redelastic import RedisStore
from redelastic.monitoring.events import Closed, Left
from redelastic.redis.connection import Connection, text
from redelastic.redis.keys import RunKeys
from tests.support import servers
from tests.support.nodes import NodeFactory

pytestmark = pytest.mark.timeout(60)

RUN_KEYS = [name.rpartition(":")[2] for name in RunKeys("r").types]


def key_named(keys: RunKeys, name: str) -> str:
    [key] = [key for key in keys.types if key.endswith(f":{name}")]
    return key


def corrupt_type(client: redis.Redis, key: str, is_type: str) -> bytes:
    """Puts a value of another type at a key; returns its dump, to check later that nothing changed it.

    At once: a node whose heartbeat found no key in between would be out.
    """
    with client.pipeline() as at_once:
        at_once.delete(key)
        if is_type == "string":
            at_once.rpush(key, "theirs")
        else:
            at_once.set(key, "theirs")
        at_once.dump(key)
        *_, dumped = at_once.execute()
    assert isinstance(dumped, bytes)
    return dumped


# -- Keys of a wrong type


@pytest.mark.parametrize("name", [name for name in RUN_KEYS if name != "failures"])  # no join reads these
def test_a_run_whose_key_is_of_another_type(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, name: str
) -> None:
    key = key_named(keys, name)
    theirs = corrupt_type(client, key, keys.types[key])
    node = new_node(1, 1)
    with pytest.raises(RendezvousStateError, match=r"is a string, but a run needs a") as raised:
        node.next_rendezvous()
    assert key in str(raised.value)
    assert "remove that key, or use another key_prefix" in str(raised.value)
    assert client.dump(key) == theirs
    client.delete(key)
    assert node.next_rendezvous().world_size == 1  # the same node, after the repair


@pytest.mark.parametrize("name", RUN_KEYS)
def test_a_key_that_changes_its_type_under_a_running_round(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent sees no error, and the round goes on once the key is back."""
    key = key_named(keys, name)
    node = new_node(1, 1, keep_alive_interval=0.05, keep_alive_max_attempt=200)
    node.next_rendezvous()
    ours = client.dump(key)
    node_name = node.node.id
    # the script fails as well where it would only write to the key
    theirs = corrupt_type(client, key, keys.types[key])
    beats_before = beat_count(client)
    servers.wait_until(lambda: beat_count(client) > beats_before + 3, "the node goes on beating")
    assert node.num_nodes_waiting() == 0
    assert client.dump(key) == theirs
    if isinstance(ours, bytes):
        client.restore(key, 60_000, ours, replace=True)
    else:
        client.delete(key)
    servers.wait_until(lambda: client.pttl(keys.status(node_name)) > 9_000, "the lease is renewed again")
    assert node.num_nodes_waiting() == 0
    assert node.is_closed() is False
    assert node.next_rendezvous().world_size == 1
    assert "Traceback" not in caplog.text or "CorruptStateError" in caplog.text


def beat_count(client: redis.Redis) -> int:
    return int(client.info("commandstats")["cmdstat_evalsha"]["calls"])


def test_a_status_of_another_type(client: redis.Redis, new_node: NodeFactory, keys: RunKeys) -> None:
    node = new_node(1, 1, keep_alive_interval=20)
    node.next_rendezvous()
    status = keys.status(node.node.id)
    theirs = corrupt_type(client, status, "string")
    with pytest.raises(RendezvousStateError, match=r"is a list, but a run needs a string") as raised:
        node.next_rendezvous()
    assert status in str(raised.value)
    assert client.dump(status) == theirs
    client.delete(status)
    assert node.next_rendezvous().world_size == 1


@pytest.mark.parametrize("call", ["is_closed", "set_closed"])
def test_closing_a_run_whose_record_is_of_another_type(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, call: str
) -> None:
    node = new_node(1, 1)
    corrupt_type(client, keys.run, "hash")
    with pytest.raises(RendezvousStateError, match=r"is a string, but a run needs a hash") as raised:
        getattr(node, call)()
    assert keys.run in str(raised.value)
    assert node.shutdown() is False
    client.delete(keys.run)


# -- Wrong contents

NUMBERS = ["epoch", "size", "min", "max", "last_call", "replacement", "lease", "interval", "ttl", "deadline", "beat_at"]


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["many", ""])
def test_a_record_with_a_field_that_is_no_number(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, field: str, value: str
) -> None:
    first, second = new_node(1, 2, last_call_timeout=0), new_node(1, 2)
    first.next_rendezvous()
    before = client.hget(keys.run, field)
    client.hset(keys.run, field, value)
    for call in (second.next_rendezvous, second.set_closed):
        with pytest.raises(RendezvousStateError, match=f"field {field} is not a number") as raised:
            call()
        assert keys.run in str(raised.value)
        assert "Remove that key" in str(raised.value)
    assert first.num_nodes_waiting() == 0
    assert client.hget(keys.run, field) == value.encode()
    if before is None:
        client.hdel(keys.run, field)
    else:
        client.hset(keys.run, field, before)
    assert first.next_rendezvous().world_size == 1


@pytest.mark.parametrize("field", ["size", "max", "lease", "ttl", "epoch", "interval", "replacement"])
def test_a_record_that_lacks_a_field(client: redis.Redis, new_node: NodeFactory, keys: RunKeys, field: str) -> None:
    """Torch's errors only, in bounded time; the other node's agent sees no error."""
    first, second = new_node(1, 2, last_call_timeout=0), new_node(1, 2, join_timeout=1)
    first.next_rendezvous()
    client.hdel(keys.run, field)
    try:
        second.next_rendezvous()
    except RendezvousStateError as e:
        assert keys.run in str(e)  # noqa: PT017  (it may also find a way to go on)
    except RendezvousError:
        pass
    first.num_nodes_waiting()


@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1.5", "1e400", "0x10", "9" * 400])
@pytest.mark.parametrize("field", NUMBERS)
def test_a_record_with_an_invalid_number(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, field: str, value: str
) -> None:
    """Torch's errors only, or no harm, in bounded time."""
    first, second = new_node(1, 2, last_call_timeout=0, join_timeout=2), new_node(1, 2, join_timeout=0.5)
    first.next_rendezvous()
    client.hset(keys.run, field, value)
    with ThreadPoolExecutor(2) as pool:
        for joining in [pool.submit(node.next_rendezvous) for node in (first, second)]:
            with contextlib.suppress(RendezvousError):
                assert joining.result(20).world_size in (1, 2)
    assert first.num_nodes_waiting() >= 0


@pytest.mark.parametrize("endpoint", ["nowhere", "", "host port", "host 1x", " 1", "host -1"])
def test_an_endpoint_without_host_or_port(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, endpoint: str
) -> None:
    nodes = [new_node(2, 2), new_node(2, 2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nodes[0].next_rendezvous)
        candidates, endpoints = key_named(keys, "candidates"), key_named(keys, "endpoints")
        servers.wait_until(lambda: client.zcard(candidates) == 1, "the first node waits")
        client.hset(endpoints, nodes[0].node.id, endpoint)
        for joining in (nodes[1].next_rendezvous, waiting.result):
            with pytest.raises(
                RendezvousStateError, match=r"master is .*, not a host and a port. Remove that key"
            ) as raised:
                joining()
            assert keys.run in str(raised.value)


def test_a_member_without_a_rank(client: redis.Redis, new_node: NodeFactory, keys: RunKeys) -> None:
    node = new_node(1, 1)
    node.next_rendezvous()
    client.delete(key_named(keys, "ranks"))
    with pytest.raises(RendezvousStateError, match=r"has no rank") as raised:
        node.next_rendezvous()
    assert key_named(keys, "ranks") in str(raised.value)
    assert "Remove that key once no node of the run is alive" in str(raised.value)


GARBAGE_ENTRIES: list[dict[str, str]] = [
    {"x": "y"},
    {"event": "unheard of"},
    {"event": "broken"},
    {"event": "broken", "epoch": "1"},
    {"event": "broken", "epoch": "1", "waiting": "many", "cause": "garbage"},
    {"event": "broken", "epoch": "1", "waiting": "", "cause": "[1, {}]"},
    {"event": "broken", "epoch": "one", "waiting": "1"},
    {"event": "\udcff"},
]


@pytest.mark.parametrize("entry", GARBAGE_ENTRIES, ids=range(len(GARBAGE_ENTRIES)))
def test_garbage_in_the_wake_stream_does_not_stop_the_keeper(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, entry: dict[str, str]
) -> None:
    node = new_node(1, 1, keep_alive_interval=0.05, keep_alive_max_attempt=200)
    node.next_rendezvous()
    fields = {name: value.encode("utf-8", "surrogateescape") for name, value in entry.items()}
    client.xadd(keys.wake, fields)  # type: ignore[arg-type]
    last = Closed(cause="asked", reason="the last entry")
    client.xadd(keys.wake, {"event": "closed", "cause": last.as_cause()})
    servers.wait_until(lambda: node.node.view.closed == "the last entry", "the keeper has read all entries")
    before = beat_count(client)
    servers.wait_until(lambda: beat_count(client) > before + 3, "it goes on beating")
    assert node.num_nodes_waiting() >= 0
    assert node.next_rendezvous().world_size == 1  # the run itself is not closed


@pytest.mark.fault("a reason in Redis contains terminal escapes", "the log has it as one printable line")
def test_no_terminal_escapes_reach_the_log(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, caplog: pytest.LogCaptureFixture
) -> None:
    node = new_node(1, 1)
    node.next_rendezvous()
    why = Left(node="a", reason="\x1b[2J\nall is well\r").as_cause()
    entry: dict[Any, Any] = {"event": "broken", "epoch": 1, "cause": why, "waiting": 1, "lost": 1}
    client.xadd(keys.wake, entry)
    servers.wait_until(lambda: "all is well" in caplog.text, "the log has the reason")  # a moment after the read
    [said] = [record.getMessage() for record in caplog.records if "all is well" in record.getMessage()]
    assert said.isprintable()


@pytest.mark.parametrize("entry", GARBAGE_ENTRIES, ids=range(len(GARBAGE_ENTRIES)))
def test_garbage_in_the_wake_stream_does_not_stop_waiting_nodes(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, entry: dict[str, str]
) -> None:
    nodes = [new_node(2, 2), new_node(2, 2)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nodes[0].next_rendezvous)
        servers.wait_until(lambda: client.zcard(key_named(keys, "candidates")) == 1, "the first node waits")
        fields = {name: value.encode("utf-8", "surrogateescape") for name, value in entry.items()}
        client.xadd(keys.wake, fields)  # type: ignore[arg-type]
        assert nodes[1].next_rendezvous().world_size == 2
        assert waiting.result(20).world_size == 2


# -- Stores


StoreCall = Callable[[RedisStore], object]
STORE_CALLS: list[tuple[str, str, StoreCall]] = [  # the key, its type, and a call that needs it
    ("data", "hash", lambda store: store.set("k", "v")),
    ("data", "hash", lambda store: store.get("k")),
    ("data", "hash", lambda store: store.multi_get(["k", "l"])),
    ("data", "hash", lambda store: store.add("k", 1)),
    ("data", "hash", lambda store: store.append("k", "v")),
    ("data", "hash", lambda store: store.compare_set("k", "", "v")),
    ("data", "hash", lambda store: store.check(["k"])),
    ("data", "hash", lambda store: store.wait(["k"], timedelta(seconds=5))),
    ("data", "hash", lambda store: store.delete_key("k")),
    ("data", "hash", lambda store: store.num_keys()),
    ("data", "hash", lambda store: store.list_keys()),
    ("waits", "zset", lambda store: store.set("k", "v")),
    ("waits", "zset", lambda store: store.wait(["k"], timedelta(seconds=5))),
    ("dedup", "string", lambda store: store.add("k", 1)),
    ("dedup", "string", lambda store: store.queue_push("k", "v")),
    ("stream", "stream", lambda store: store.wait(["k"], timedelta(seconds=5))),
    ("queue", "list", lambda store: store.queue_push("k", "v")),
    ("queue", "list", lambda store: store.queue_pop("k")),
    ("queue", "list", lambda store: store.queue_len("k")),
]


@pytest.mark.parametrize("case", STORE_CALLS, ids=range(len(STORE_CALLS)))
def test_a_store_whose_key_is_of_another_type(
    client: redis.Redis, connection: Connection, run_id: str, case: tuple[str, str, StoreCall]
) -> None:
    name, is_type, call = case
    store = RedisStore(connection, run_id, timeout=5)
    keys = RunKeys(run_id).store("default")
    store.delete_key("k")
    [kept] = client.keys(keys.dedup(b"*"))
    named = {"stream": keys.stream(b"k").decode(), "queue": keys.queue(b"k").decode(), "dedup": text(kept)}
    key = named.get(name) or getattr(keys, name)
    theirs = corrupt_type(client, key, is_type)
    with pytest.raises(DistStoreError, match=r"(has a key|is a string|is a list)") as raised:
        call(store)
    assert keys.base in str(raised.value)
    assert "use another key_prefix" in str(raised.value)
    assert client.dump(key) == theirs
    client.delete(key)
    store.set("k", "1")
    assert store.get("k") == b"1"
    store.close()


@pytest.mark.parametrize("record", ["", "x", "1", " ", "1 ", "\x00\xff", "x" * 1000])
def test_garbage_among_the_last_effects_of_a_store(
    client: redis.Redis, connection: Connection, run_id: str, record: str
) -> None:
    """It is ignored: it is no reply to any request."""
    store = RedisStore(connection, run_id)
    assert store.add("n", 1) == 1
    [dedup] = client.keys(RunKeys(run_id).store("default").dedup(b"*"))
    client.set(dedup, record, ex=60)
    assert store.add("n", 1) == 2
    store.close()


# -- Nodes that disagree


def test_a_node_with_other_numbers_of_nodes_is_refused_and_the_run_goes_on(
    new_node: NodeFactory, client: redis.Redis, keys: RunKeys
) -> None:
    """It waits one lease first, since the others might be dead."""
    timing: dict[str, Any] = {"keep_alive_interval": 1.2, "last_call_timeout": 0}
    first = new_node(1, 2, **timing)
    first.next_rendezvous()
    other = new_node(2, 3, **timing)
    with pytest.raises(
        RendezvousError, match=r"wants 2 to 3 nodes, but .* has 1 to 2; start all nodes with the same --nnodes"
    ):
        other.next_rendezvous()
    assert other.shutdown() is True
    assert first.is_closed() is False
    assert first.num_nodes_waiting() == 0
    third = new_node(1, 2, **timing)
    with ThreadPoolExecutor(2) as pool:
        joining = pool.submit(third.next_rendezvous)
        servers.wait_until(lambda: first.num_nodes_waiting() == 1, "the third node waits")
        assert first.next_rendezvous().world_size == 2
        assert joining.result(20).world_size == 2
    assert not client.hexists(keys.run, "closed")


def test_a_node_with_other_numbers_takes_over_from_the_dead(new_node: NodeFactory) -> None:
    timing: dict[str, Any] = {"keep_alive_interval": 1.2, "last_call_timeout": 0}
    dead = new_node(1, 2, **timing)
    dead.next_rendezvous()
    dead.node.stop()  # it stops without a word
    assert new_node(1, 1, **timing).next_rendezvous().world_size == 1


def test_a_node_that_gave_up_waiting_closes_nothing_when_it_is_shut_down(
    new_node: NodeFactory, client: redis.Redis, keys: RunKeys
) -> None:
    alone = new_node(2, 2, join_timeout=0.3)
    with pytest.raises(RendezvousTimeoutError, match=r"within the join_timeout of 0.3 s: fewer than 2 nodes joined"):
        alone.next_rendezvous()
    assert client.zcard(keys.candidates) == 0
    assert alone.shutdown() is True
    others = [new_node(2, 2), new_node(2, 2)]
    with ThreadPoolExecutor(2) as pool:
        infos = list(pool.map(lambda node: node.next_rendezvous(), others))
    assert [info.world_size for info in infos] == [2, 2]


def test_a_newcomer_that_gave_up_waiting_closes_nothing(new_node: NodeFactory) -> None:
    members = [new_node(2, 3, last_call_timeout=0), new_node(2, 3, last_call_timeout=0)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda node: node.next_rendezvous(), members))
        late = new_node(2, 3, join_timeout=0.3)
        with pytest.raises(RendezvousTimeoutError, match="join_timeout"):
            late.next_rendezvous()
        assert late.shutdown() is True
        assert [node.is_closed() for node in members] == [False, False]
        infos = list(pool.map(lambda node: node.next_rendezvous(), members))
    assert [info.world_size for info in infos] == [2, 2]


def test_a_node_that_never_joined_closes_nothing(new_node: NodeFactory) -> None:
    member, idle = new_node(1, 2, last_call_timeout=0), new_node(1, 2)
    member.next_rendezvous()
    assert idle.shutdown() is True
    assert member.is_closed() is False
    assert member.num_nodes_waiting() == 0


# -- Parameters that do not fit
