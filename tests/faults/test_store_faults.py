"""Redis answers a store, but not as it should: operations are retried up to their timeout, or say why."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest
import torch.distributed as dist

from redelastic import RedisStore
from redelastic.redis.connection import Connection
from redelastic.redis.errors import UnavailableError
from redelastic.redis.server import RedisServer
from tests.support.calls import takes
from tests.support.faulty_proxy import Fault as Faulty
from tests.support.faulty_proxy import FaultyProxy
from tests.support.long_tests import quick_first
from tests.support.lossy_network import address_of
from tests.support.nodes import NodeFactory
from tests.support.rounds import events
from tests.support.server_faults import (
    AT_ONCE,
    FAULTS,
    INTERVAL,
    Fault,
    configured,
    failing_disk,
    full_memory,
    group,
    read_only,
    waiting_counts,
)
from tests.support.servers import frozen

pytestmark = pytest.mark.timeout(180)

RETRIED: Final = "a store's operation is retried up to its timeout"


@pytest.mark.parametrize(
    "inflicted",
    [
        pytest.param(inflicted, marks=pytest.mark.fault(f"{what}, under a store", RETRIED))
        for inflicted, what, _, _ in FAULTS
        if inflicted not in (full_memory, failing_disk)
    ],
)
def test_a_store_retries(inflicted: Fault, own_server: RedisServer, run_id: str) -> None:
    store = RedisStore(own_server.url, run_id, timeout=60)
    store.add("n", 1)
    with ThreadPoolExecutor(2) as pool:
        waiting = pool.submit(store.get, "later")
        with inflicted(own_server):
            added = pool.submit(store.add, "n", 1)
            time.sleep(INTERVAL)
        assert added.result(60) == 2, "once"
        store.set("later", "value")
        assert waiting.result(60) == b"value"
    store.close()


@pytest.mark.fault("the master becomes a read-only replica, under a store", RETRIED)
def test_a_store_gives_up_at_its_time(own_server: RedisServer, run_id: str) -> None:
    store = RedisStore(own_server.url, run_id, timeout=1.5)
    store.set("key", "value")
    with read_only(own_server):
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="read-only replica"):
            store.set("key", "other")
        assert time.monotonic() - started >= 1
        assert store.get("key") == b"value", "it can be read"
    store.set("key", "other")
    store.close()


@pytest.mark.parametrize(
    ("inflicted", "says"),
    [
        pytest.param(inflicted, says, marks=pytest.mark.fault(f"{what}, under a store", "it is told at once, and why"))
        for inflicted, what, says, _ in FAULTS
        if inflicted in (full_memory, failing_disk)
    ],
)
def test_a_store_says_at_once_what_will_not_pass(
    inflicted: Fault, says: str, own_server: RedisServer, run_id: str
) -> None:
    store = RedisStore(own_server.url, run_id, timeout=120)
    store.set("key", "value")
    writes: list[Callable[[], object]] = [
        lambda: store.set("key", "other"),
        lambda: store.add("n", 1),
        lambda: store.append("key", "more"),
        lambda: store.compare_set("key", "value", "other"),
        lambda: store.queue_push("queue", "item"),
    ]
    with inflicted(own_server):
        for write in writes:
            started = time.monotonic()
            with pytest.raises((dist.DistNetworkError, dist.DistStoreError), match=says):
                write()
            assert time.monotonic() - started < AT_ONCE
        assert store.get("key") == b"value", "it can be read"
    assert store.add("n", 1) == 1, "nothing of it had an effect"
    store.close()


@pytest.mark.fault(
    "the network takes longer for a value than one attempt at a call may", "it is sent for as long as any of it arrives"
)
def test_a_value_takes_longer_than_an_attempt(own_server: RedisServer, run_id: str) -> None:
    value = b"v" * 2**25
    late = Faulty(keep=None, hold_request=True, hold=0.05)
    with FaultyProxy(*address_of(own_server), lambda: late) as slow:  # by that time for each MB, or less
        url = own_server.url.replace(own_server.endpoint, f"127.0.0.1:{slow.port}")
        connection = Connection.open(url, attempt_timeout=0.5)
        store = RedisStore(connection, run_id, timeout=30)
        store.set("key", value)
        with own_server.get_client() as admin:
            assert int(admin.info("stats")["total_net_input_bytes"]) < 1.5 * len(value), "it was sent once"
        assert store.get("key") == value
        store.close()
        connection.close()


def test_a_value_of_which_nothing_more_arrives_is_given_up(own_server: RedisServer, run_id: str) -> None:
    connection = Connection.open(own_server.url, attempt_timeout=0.5)
    store = RedisStore(connection, run_id, timeout=1)
    with frozen(own_server), takes(1, 2), pytest.raises(dist.DistNetworkError, match="Timeout"):
        store.set("key", b"v" * 2**25)
    store.close()
    connection.close()


@pytest.mark.fault(
    "a reply is larger than client-output-buffer-limit", "I9: that read fails and says so, the round goes on"
)
@pytest.mark.parametrize("read", quick_first(["get", "multi_get", "list_keys", "events"]))
def test_a_reply_too_large_for_the_servers_buffer(read: str, own_server: RedisServer, new_node: NodeFactory) -> None:
    nodes = group(new_node, own_server, 1, 3, read_timeout=1.5)
    with ThreadPoolExecutor(3) as pool:
        infos = [future.result(60) for future in [pool.submit(node.next_rendezvous) for node in nodes]]
    store: Any = infos[0].store
    many = [f"{i}-{'k' * 1000}" for i in range(500)]
    store.multi_set(["large", *many], ["v" * 1_000_000] + ["v" * 1000] * 500)
    with own_server.get_client() as admin:
        pipe = admin.pipeline()
        one: Any = {"event": "x", "epoch": 1, "size": 1, "node": "n", "reason": "r" * 1000}
        for _ in range(500):
            pipe.xadd(nodes[0].backend.keys.events, one)
        pipe.execute()
    operation: Callable[[], object] = {
        "get": lambda: store.get("large"),
        "multi_get": lambda: store.multi_get(many),
        "list_keys": store.list_keys,
        "events": lambda: events(nodes[0], "x"),
    }[read]
    with configured(own_server, client_output_buffer_limit="normal 65536 0 0"):
        wanted = UnavailableError if read == "events" else dist.DistNetworkError
        with pytest.raises(wanted, match="could not be reached"):
            operation()
        assert waiting_counts(nodes) == [0, 0, 0]
    assert operation()
    assert waiting_counts(nodes) == [0, 0, 0]
    assert not events(nodes[0], "lost")
