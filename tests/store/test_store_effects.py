"""A store's write takes effect once, however often it is sent, and not after its round is over (I4, I7, I8)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
import torch.distributed as dist

from redelastic.monitoring.events import Left
from redelastic.redis import scripts
from redelastic.redis.keys import RunKeys
from redelastic.redis.scripts import Script
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.store import RedisStore, RoundBrokenError
from tests.support import stores
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.nodes import NodeFactory
from tests.support.stores import SOON, in_thread, until

store = stores.store

# -- one effect, however often a request is sent (I8)

Writes = dict[
    str, tuple[Callable[[RedisStore], Any], Callable[[RedisStore], Any], Any, Callable[[RedisStore], Any], Any]
]


def _state(key: str) -> Callable[[RedisStore], Any]:
    return lambda s: s.get(key) if s.check([key]) else None


# Each: the call that is lost; another client's call before the repeat; its reply; what is read at the end, and found.
WRITES: Writes = {
    "set": (lambda s: s.set("k", "1"), lambda s: s.set("k", "2"), None, _state("k"), b"2"),
    "multi_set": (lambda s: s.multi_set(["k"], ["1"]), lambda s: s.set("k", "2"), None, _state("k"), b"2"),
    "add": (lambda s: s.add("n", 1), lambda s: s.add("n", 10), 1, _state("n"), b"11"),
    "append": (lambda s: s.append("a", "x"), lambda s: s.append("a", "y"), None, _state("a"), b"xy"),
    "compare_set": (lambda s: s.compare_set("k", "0", "1"), lambda s: s.set("k", "0"), b"1", _state("k"), b"0"),
    "barrier": (lambda s: s.barrier("b", 1), lambda s: s.add("b/num_members", 4), None, _state("b/num_members"), b"5"),
    "delete_key": (lambda s: s.delete_key("k"), lambda s: s.set("k", "2"), True, _state("k"), b"2"),
    "queue_push": (lambda s: s.queue_push("q", "9"), lambda s: s.queue_pop("q"), None, lambda s: s.queue_len("q"), 2),
    "queue_pop": (lambda s: s.queue_pop("q"), lambda s: s.queue_push("q", "9"), b"7", lambda s: s.queue_len("q"), 2),
}


@pytest.fixture
def proxy(server: RedisServer, client: redis.Redis) -> Iterator[FaultyProxy]:
    for script in vars(scripts).values():
        if isinstance(script, Script):
            client.script_load(script.text)  # or the first reply that is lost says that there is no such script
    host, _, port = server.endpoint.rpartition(":")
    with FaultyProxy(host, int(port)) as started:
        yield started


@pytest.fixture
def unlucky(server: RedisServer, proxy: FaultyProxy, run_id: str) -> Iterator[RedisStore]:
    """The store through the proxy, with two items in the queue and a 0 in the key."""
    made = RedisStore(server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}"), run_id)
    made.set("k", "0")
    made.queue_push("q", "7")
    made.queue_push("q", "8")
    RedisStore(made._connection, run_id, "warm").barrier("b", 1)  # the first barrier sends its script
    yield made
    made.close()


def _digest(verb: str) -> bytes:
    """The digest of a verb's script, which all its requests contain."""
    names = {"set": "STORE_SET", "multi_set": "STORE_SET", "delete_key": "STORE_DELETE"}
    script = getattr(scripts, names.get(verb, verb.upper() if "queue" in verb else f"STORE_{verb.upper()}"))
    assert isinstance(script, Script)
    return script.digest.encode()


@pytest.mark.parametrize("keep", [0, 1, 3], ids=["no reply", "one byte of it", "some of it"])
@pytest.mark.parametrize("verb", WRITES)
def test_a_lost_reply_has_one_effect(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, verb: str, keep: int
) -> None:
    call, meanwhile, reply, read, found = WRITES[verb]
    fault = proxy.add(Fault(_digest(verb), keep=keep, meanwhile=lambda: meanwhile(store)))
    assert call(unlucky) == reply
    assert fault.fired.is_set()
    assert read(store) == found


@pytest.mark.parametrize("verb", WRITES)
def test_a_lost_request_is_sent_again(unlucky: RedisStore, proxy: FaultyProxy, verb: str) -> None:
    call, _, reply, _, _ = WRITES[verb]
    fault = proxy.add(Fault(_digest(verb), lose_request=True))
    assert call(unlucky) == reply
    assert fault.fired.is_set()


@pytest.mark.parametrize(
    "item", [b"", b" \n", b"7@", bytes(range(256)) * 17], ids=["empty", "blanks", "ends with an @", "kept apart"]
)
def test_a_repeated_reply_is_complete_and_not_kept(
    unlucky: RedisStore, proxy: FaultyProxy, client: redis.Redis, run_id: str, item: bytes
) -> None:
    unlucky.queue_push("one", item)
    fault = proxy.add(Fault(_digest("queue_pop"), keep=0))
    assert unlucky.queue_pop("one") == item
    assert fault.fired.is_set()
    unlucky.set("k", "v")
    keys = RunKeys(run_id).store("default")
    assert [client.strlen(kept) < 10 for kept in client.keys(keys.dedup(b"*"))] == [True]
    assert not client.keys(keys.reply(b"*"))


@pytest.mark.parametrize("later", [False, True], ids=["the last request", "after others"])
@pytest.mark.parametrize("verb", WRITES)
def test_a_copy_that_arrives_late_has_no_effect(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, verb: str, later: bool
) -> None:
    """It is so late that its sender has given up the connection, and has made other calls since."""
    call, meanwhile, reply, read, found = WRITES[verb]
    fault = proxy.add(Fault(_digest(verb), lose_request=True))
    assert call(unlucky) == reply
    assert fault.fired.is_set()
    if later:
        unlucky.set("something else", "v")
    meanwhile(store)
    fault.release()
    assert read(store) == found


def test_a_late_copy_of_a_pop_that_found_nothing_takes_nothing(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy
) -> None:
    fault = proxy.add(Fault(_digest("queue_pop"), lose_request=True))
    with pytest.raises(dist.QueueEmptyError):
        unlucky.queue_pop("empty", block=False)
    store.queue_push("empty", "item")
    fault.release()
    assert store.queue_len("empty") == 1


@pytest.mark.parametrize(
    ("read", "result"),
    [
        (lambda s: s.get("k"), b"0"),
        (lambda s: s.multi_get(["k"]), [b"0"]),
        (lambda s: s.check(["k"]), True),
        (lambda s: s.wait(["k"]), None),
        (lambda s: s.queue_len("q"), 2),
        (lambda s: s.num_keys(), 1),
        (lambda s: s.list_keys(), ["k"]),
    ],
)
def test_a_lost_read_is_repeated(
    unlucky: RedisStore, proxy: FaultyProxy, run_id: str, read: Callable[[RedisStore], Any], result: object
) -> None:
    fault = proxy.add(Fault(run_id.encode(), keep=1))
    assert read(unlucky) == result
    assert fault.fired.is_set()


def test_a_blocked_wait_whose_connection_is_cut_goes_on(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy
) -> None:
    """The wake-up itself is lost: the next read finds it, for a stream keeps it."""
    fault = proxy.add(Fault(b"XREAD", keep=1))
    waiting = in_thread(unlucky.get, "awaited")
    until(lambda: fault.taken)
    store.set("awaited", "v")
    assert waiting.result(SOON) == b"v"
    assert fault.fired.is_set()


def test_a_delayed_reply_is_that_of_its_own_request(unlucky: RedisStore, proxy: FaultyProxy) -> None:
    fault = proxy.add(Fault(_digest("add"), keep=None, hold_reply=True))
    slow = in_thread(unlucky.add, "n", 1)
    assert fault.fired.wait(SOON)
    assert [unlucky.add("other", 5), unlucky.get("k")] == [5, b"0"]
    assert not slow.done()
    fault.release()
    assert slow.result(SOON) == 1


def test_a_client_that_retries_by_itself_has_one_effect(server: RedisServer, proxy: FaultyProxy, run_id: str) -> None:
    with redis.Redis.from_url(server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}")) as client:
        unlucky = RedisStore(client, run_id)
        faults = [proxy.add(Fault(_digest("add"))) for _ in range(2)]
        assert [unlucky.add("n", 1), unlucky.add("n", 1)] == [1, 2]
        assert all(fault.fired.is_set() for fault in faults)
        unlucky.close()


# -- the store of a round (I4, I7)

Pair = list[tuple[RedisRendezvousHandler, Any]]


@pytest.fixture
def pair(new_node: NodeFactory) -> Pair:
    """Two nodes and their stores of a complete round."""
    nodes = [new_node(1, 2, last_call_timeout=60) for _ in range(2)]
    infos = [in_thread(node.next_rendezvous) for node in nodes]
    return [(node, info.result(SOON).store) for node, info in zip(nodes, infos, strict=True)]


@pytest.mark.parametrize(
    "wait", [lambda s: s.get("k"), lambda s: s.wait(["k"]), lambda s: s.queue_pop("q"), lambda s: s.barrier("b", 2)]
)
@pytest.mark.parametrize("view", ["store", "prefixed", "PrefixStore"])
def test_a_wait_ends_at_once_when_a_member_leaves(pair: Pair, wait: Callable[[Any], Any], view: str) -> None:
    (gone, _), (_, store) = pair
    seen = {"store": store, "prefixed": store.prefixed("p"), "PrefixStore": dist.PrefixStore("p", store)}[view]
    waiting = in_thread(seen.get, "k") if view == "PrefixStore" else in_thread(wait, seen)
    until(lambda: bool(store._connection.client.exists(store._keys.waits)))
    gone.node.leave(Left(cause="exited"))
    with pytest.raises(RoundBrokenError, match=r"Round 1 .* is broken .*exited"):
        waiting.result(SOON)


def has_waited(store: RedisStore, other: RedisStore) -> None:
    waiting = in_thread(store.get, "earlier")
    until(lambda: bool(store._connection.client.exists(store._keys.waits)))
    other.set("earlier", "v")
    assert waiting.result(SOON) == b"v"


@pytest.mark.parametrize("wait", [lambda s: s.get("k"), lambda s: s.wait(["k"]), lambda s: s.barrier("b", 9)])
@pytest.mark.parametrize("closed", [False, True], ids=["open", "closed"])
def test_a_wait_does_not_begin_when_a_member_has_left(pair: Pair, wait: Callable[[Any], Any], closed: bool) -> None:
    """In a closed run, a member leaves without waking the others."""
    (gone, gone_store), (stays, store) = pair
    if closed:
        stays.set_closed()
    has_waited(store, gone_store)
    gone.node.leave(Left(cause="exited"))
    if closed:
        stays.node.stop()  # so that nothing else ends the reads
        store._connection.max_block = 60
    for _ in range(2):
        started = time.monotonic()
        with pytest.raises(RoundBrokenError, match=r"Round 1 .* is broken"):
            in_thread(wait, store).result(SOON)
        assert time.monotonic() - started < 5  # before the other node's lease is over


def test_a_wait_ends_when_a_lease_runs_out(pair: Pair) -> None:
    (gone, _), (_, store) = pair
    waiting = in_thread(store.get, "k")
    gone.node.stop()
    with pytest.raises(RoundBrokenError, match="lost its lease"):
        waiting.result(SOON)


def test_existing_keys_can_be_read_though_the_round_is_broken(pair: Pair) -> None:
    (gone, gone_store), (_, store) = pair
    gone_store.set("there", "v")
    gone_store.queue_push("q", "item")
    gone.node.leave(Left(cause="exited"))
    store.wait(["there", "q"])
    assert (store.get("there"), store.multi_get(["there"]), store.queue_pop("q")) == (b"v", [b"v"], b"item")
    for call in (lambda: store.get("k"), lambda: store.multi_get(["there", "k"]), lambda: store.queue_pop("q")):
        with pytest.raises(RoundBrokenError):
            in_thread(call).result(SOON)
    assert not store.check(["k"])


def test_nothing_is_written_to_a_superseded_round(pair: Pair, client: redis.Redis, run_id: str) -> None:
    (gone, old), (stays, also_old) = pair
    old.set("k", "0")
    old.queue_push("q", "item")
    gone.node.leave(Left(cause="exited"))
    new = stays.next_rendezvous().store
    assert isinstance(new, RedisStore)
    name = RunKeys(run_id).store(1)
    before = client.dump(name.data), client.dump(name.queue(b"q"))
    for view in (old, also_old, old.prefixed(""), old.clone()):
        for verb, (call, _, _, _, _) in WRITES.items():
            with pytest.raises(RoundBrokenError, match="round 1 is over: the run is at epoch 2"):
                call(view)
            assert (client.dump(name.data), client.dump(name.queue(b"q"))) == before, verb
    assert old.get("k") == b"0"
    assert not new.check(["k"])
    new.set("k", "1")
    assert (old.get("k"), new.get("k")) == (b"0", b"1")


def test_a_write_before_the_fence_gets_its_reply_after_it(
    pair: Pair, proxy: FaultyProxy, server: RedisServer, run_id: str
) -> None:
    """It took effect in time and only its reply was lost: it must not be reported as refused (I8)."""
    (gone, _), (stays, _) = pair
    unlucky = RedisStore(server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}"), run_id, epoch=1)

    def regroup() -> None:
        gone.node.leave(Left(cause="exited"))
        stays.next_rendezvous()

    fault = proxy.add(Fault(_digest("add"), meanwhile=regroup))
    assert unlucky.add("n", 5) == 5
    assert fault.fired.is_set()
    with pytest.raises(RoundBrokenError):
        unlucky.add("n", 1)
    unlucky.close()
