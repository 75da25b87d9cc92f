"""Writes that nobody waits for (``acknowledge=False``): in order, once, and reported when they fail."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import redis
import test_store as contract
import torch.distributed as dist

from redelastic.redis import scripts
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore, RoundBrokenError
from redelastic.store import line as line_module
from tests.support import stores
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.nodes import NodeFactory
from tests.support.stores import LONG, SOON, in_thread, opened, until

store = stores.store  # one that acknowledges


class TestUnacknowledged(contract.TestRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id, acknowledge=False) as made:
            yield made


class TestPrefixStoreOfUnacknowledged(contract.TestRedisStore):
    queues = lists_keys = False

    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id, acknowledge=False) as made:
            yield dist.PrefixStore("p", made.prefixed("q"))


class TestUnacknowledgedOfAClient(contract.TestRedisStore):
    """redis-py's own client has no connection to lend: all is acknowledged."""

    @pytest.fixture
    def store(self, client: redis.Redis, run_id: str) -> Iterator[Any]:
        made = RedisStore(client, run_id, acknowledge=False)
        yield made
        made.close()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[FaultyProxy]:
    host, _, port = server.endpoint.rpartition(":")
    with FaultyProxy(host, int(port)) as started:
        yield started


def through(proxy: FaultyProxy, server: RedisServer) -> str:
    return server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}")


@pytest.fixture
def unlucky(server: RedisServer, proxy: FaultyProxy, run_id: str) -> Iterator[RedisStore]:
    """The store through the proxy, with one item in the queue and a 0 in the key."""
    made = RedisStore(through(proxy, server), run_id, acknowledge=False, timeout=LONG)
    made.set("k", "0")
    made.queue_push("q", "7")
    assert made.check(["k"])
    yield made
    made.close()


def under_way(store: RedisStore) -> int:
    assert store._line is not None
    return len(store._line.under_way)


# What is lost; what somebody else does before it is sent again; what is read at the end, and found.
WRITES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any], Callable[[Any], Any], Any]] = {
    "set": (lambda s: s.set("k", "lost"), lambda s: s.set("k", "2"), lambda s: s.get("k"), b"2"),
    "multi_set": (lambda s: s.multi_set(["k"], ["lost"]), lambda s: s.set("k", "2"), lambda s: s.get("k"), b"2"),
    "append": (lambda s: s.append("k", "lost"), lambda s: s.append("k", "2"), lambda s: s.get("k"), b"0lost2"),
    "queue_push": (lambda s: s.queue_push("q", "lost"), lambda s: s.queue_pop("q"), lambda s: s.queue_len("q"), 1),
}


@pytest.mark.parametrize("keep", [0, 1, 3], ids=["no reply", "one byte of it", "some of it"])
@pytest.mark.parametrize("verb", WRITES)
def test_a_lost_reply_has_one_effect(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, verb: str, keep: int
) -> None:
    call, meanwhile, read, found = WRITES[verb]
    fault = proxy.add(Fault(b"lost", keep=keep, meanwhile=lambda: meanwhile(store)))
    call(unlucky)
    unlucky.check(["k"])
    assert fault.fired.is_set()
    assert read(store) == found == read(unlucky)


@pytest.mark.parametrize("verb", WRITES)
def test_a_lost_request_is_sent_again_and_its_late_copy_has_no_effect(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, verb: str
) -> None:
    call, meanwhile, read, found = WRITES[verb]
    fault = proxy.add(Fault(b"lost", lose_request=True))
    call(unlucky)
    unlucky.check(["k"])
    assert fault.fired.is_set()
    meanwhile(store)
    fault.release()
    assert read(store) == found


@pytest.mark.parametrize("lose_request", [False, True])
def test_all_that_are_under_way_are_made_in_order_after_a_loss(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, lose_request: bool
) -> None:
    for turn in range(3):
        fault = proxy.add(Fault(b"[%d:17]" % turn, lose_request=lose_request))
        for i in range(40):
            unlucky.append("log", f"[{turn}:{i}]")
        unlucky.check(["k"])
        assert fault.fired.is_set()
    assert store.get("log") == "".join(f"[{turn}:{i}]" for turn in range(3) for i in range(40)).encode()


def test_a_call_sees_what_was_written_before_through_any_view(unlucky: RedisStore, proxy: FaultyProxy) -> None:
    view, copy = unlucky.prefixed("p"), unlucky.clone()
    prefix: Any = dist.PrefixStore("p", unlucky)
    for i in range(20):
        proxy.add(Fault(b"lost %d" % i, lose_request=True))
        (view, prefix)[i % 2].set("k", f"lost {i}")
        reader = (unlucky, copy)[i // 2 % 2]
        assert in_thread(reader.get, "p/k").result(SOON) == b"lost %d" % i


def test_a_wait_of_another_process_is_woken(unlucky: RedisStore, store: RedisStore) -> None:
    waiting = in_thread(store.get, "awaited")
    until(lambda: bool(store._call(lambda client: client.exists(store._keys.waits))))
    unlucky.set("awaited", "v")
    assert waiting.result(SOON) == b"v"


def test_threads_keep_their_order_each(server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, acknowledge=False) as store:

        def work(name: str) -> bytes:
            for i in range(300):
                store.append(name, f"{i},")
                store.append("all", f"{name}{i},")
            return store.get(name)

        threads = [in_thread(work, name) for name in "abcd"]
        assert [each.result(LONG.total_seconds()) for each in threads] == [
            "".join(f"{i}," for i in range(300)).encode()
        ] * 4
        told = store.get("all").decode().split(",")
        for name in "abcd":
            assert [one for one in told if one.startswith(name)] == [f"{name}{i}" for i in range(300)]


def test_few_are_under_way_and_no_more_than_some_bytes(server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        for i in range(3 * line_module.MOST):
            store.set(f"k{i}", "v")
            assert 1 <= under_way(store) <= line_module.MOST
        for _ in range(10):
            store.set("large", bytes(line_module.MOST_BYTES))
            assert store._line is not None
            assert store._line._bytes < 2 * line_module.MOST_BYTES
        assert store.num_keys() == 3 * line_module.MOST + 1
        assert under_way(store) == 0


# -- errors


def test_a_failure_is_told_once_and_takes_those_after_it_with_it(
    client: redis.Redis, server: RedisServer, run_id: str
) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        store.set("before", "v")
        store.check(["before"])
        client.set(store._keys.queue(b"q"), "not ours", ex=60)
        store.set("earlier", "v")
        store.queue_push("q", "item")
        store.set("later", "v")
        store.append("later still", "v")
        with pytest.raises(dist.DistStoreError, match="is a string, but a run needs a list") as caught:
            store.get("before")
        said = "An earlier queue_push of the key b'q' has failed, and 2 more sent after it were not made: "
        assert str(caught.value).startswith(said)
        assert sorted(store.list_keys()) == ["before", "earlier"]
        store.set("later", "v")
        assert store.get("later") == b"v"


def test_a_full_server_is_told_of_by_the_next_call(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id, acknowledge=False) as store, own_server.get_client() as client:
        store.set("there", "v")
        store.check(["there"])
        client.config_set("maxmemory", 1)
        store.set("k", "v")
        with pytest.raises(dist.DistNetworkError, match=r"An earlier set of the key b'k' has failed: .*out of memory"):
            store.get("there")
        client.config_set("maxmemory", 0)
        store.set("k", "w")
        assert store.get("k") == b"w"


@pytest.mark.parametrize("verb", WRITES)
def test_nothing_is_written_to_a_superseded_round(
    new_node: NodeFactory, server: RedisServer, client: redis.Redis, run_id: str, verb: str
) -> None:
    nodes = [new_node(1, 2), new_node(1, 2)]
    for info in [in_thread(node.next_rendezvous) for node in nodes]:
        info.result(SOON)
    with opened(server, run_id, epoch=1, acknowledge=False) as old:
        old.set("k", "0")
        old.check(["k"])
        nodes[0].membership.leave("test")
        nodes[1].next_rendezvous()
        before = client.dump(old._keys.data), client.dump(old._keys.queue(b"q"))
        WRITES[verb][0](old)
        with pytest.raises(RoundBrokenError, match=f"An earlier {verb} of the key .* is over: the run is at epoch 2"):
            old.check(["k"])
        assert (client.dump(old._keys.data), client.dump(old._keys.queue(b"q"))) == before
        assert old.get("k") == b"0"


def test_the_close_tells_of_a_failure(own_server: RedisServer, run_id: str) -> None:
    store = RedisStore(own_server.url, run_id, acknowledge=False)
    with own_server.get_client() as client:
        client.config_set("maxmemory", 1)
        store.set("k", "v")
        with pytest.raises(dist.DistNetworkError, match="out of memory"):
            store.close()


def test_a_refused_login_is_no_failure_of_what_was_written_before(own_server: RedisServer, run_id: str) -> None:
    with own_server.get_client() as admin:
        rules = {"enabled": True, "categories": ["+@all"], "keys": ["*"]}
        admin.acl_setuser("u", passwords=["+p"], **rules)
        store = RedisStore(f"redis://u:p@{own_server.endpoint}", run_id, acknowledge=False)
        store.append("log", "0")
        assert store.get("log") == b"0"
        assert store._line is not None
        store.append("log", "1")
        store._line._drop()  # the reply is lost
        admin.acl_setuser("u", passwords=["+q", "-p"], **rules)
        admin.client_kill_filter(_type="normal", skipme=True)
        for _ in range(2):
            with pytest.raises(dist.DistNetworkError, match=r"^Redis at .* refused the login"):
                store.get("log")
            assert under_way(store) == 1
        admin.acl_setuser("u", passwords=["+p"], **rules)
        assert store.get("log") == b"01"
        store.close()


def test_a_view_does_not_send_a_script_again(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id, acknowledge=False) as store, own_server.get_client() as admin:
        for i in range(20):
            store.prefixed(f"{i}").set("k", "v")
        store.num_keys()
        stats: Any = admin.info("commandstats")
        assert (stats["cmdstat_eval"]["calls"], stats["cmdstat_evalsha"]["calls"]) == (1, 19)


class Interrupting(int):
    """A size at whose subtraction an interruption comes, as by a signal's handler that raises."""

    def __rsub__(self, other: int) -> int:
        raise KeyboardInterrupt


def test_an_interruption_after_a_reply_loses_no_later_write(server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        assert store._line is not None
        call = store._call_of(scripts.STORE_APPEND)
        store._line.send(line_module.Write("append", call, [b"s"], [b"log", b"0"], Interrupting(4)), 1)
        with pytest.raises(KeyboardInterrupt):
            store._line.settle(1)
        for i in range(1, 4):
            store.append("log", f"{i}")
        assert store.get("log") == b"0123"


class Announced:
    """A lock that tells when somebody asks for it."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.asked, self.release = lock, threading.Event(), lock.release

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self.asked.set()
        return bool(self._lock.acquire(blocking, timeout))


def test_a_short_wait_has_its_own_error_while_another_thread_writes(server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        store.set("k", "v")
        line, entered = store._line, threading.Event()
        assert line is not None

        def write() -> None:
            held = line._enter(1)
            line._lock = announced
            entered.set()
            assert announced.asked.wait(SOON)
            line._leave(held)

        announced: Any = Announced(line._lock)
        writing = in_thread(write)
        assert entered.wait(SOON)
        with pytest.raises(dist.DistStoreError, match="absent"):
            store.wait(["absent"], timedelta(0))
        writing.result(SOON)


def test_a_write_after_a_while_finds_out_that_the_connection_is_gone(
    server: RedisServer, store: RedisStore, client: redis.Redis, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server, run_id, acknowledge=False) as idle:
        idle.append("log", "0")
        assert idle.get("log") == b"0"
        assert idle._line is not None
        host, port = idle._line._wire._sock.getsockname()
        client.client_kill_filter(addr=f"{host}:{port}")
        monkeypatch.setattr(line_module, "TRUSTED", 0.0)
        idle.append("log", "1")
        until(lambda: store.get("log") == b"01")
        assert under_way(idle) == 1, "it is not waited for"


def test_a_close_that_fails_closes_the_connection_too(
    server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = RedisStore(server.url, run_id, acknowledge=False)
    store.set("k", "v")
    assert store._line is not None
    closed = []
    with monkeypatch.context() as broken:
        broken.setattr(store._line, "close", lambda: 1 / 0)
        broken.setattr(store._connection, "close", lambda: closed.append(True))
        with pytest.raises(ZeroDivisionError):
            store.close()
    assert closed
    store.close()


def test_what_is_given_up_by_a_close_counts_no_more(server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        store.set("k", "v")
        assert store._line is not None
        store._line.close()
        assert (under_way(store), store._line._bytes) == (0, 0)


# -- a server that forgets, or is away


@pytest.mark.parametrize("forget", ["flushall", "script_flush"])
def test_a_server_that_has_forgotten(own_server: RedisServer, run_id: str, forget: str) -> None:
    with opened(own_server, run_id, acknowledge=False) as store, own_server.get_client() as client:
        for i in range(3):
            store.append("log", f"{i}")
        assert store.get("log") == b"012"
        getattr(client, forget)()
        for i in range(3, 6):
            store.append("log", f"{i}")
        assert store.get("log") == (b"345" if forget == "flushall" else b"012345")


def test_a_server_that_restarts(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id, acknowledge=False, timeout=LONG) as store:
        store.append("log", "0")
        assert store.get("log") == b"0"
        own_server.kill()
        writing = in_thread(lambda: [store.append("log", f"{i}") for i in range(1, 5)])  # type: ignore[func-returns-value]
        own_server.start()
        writing.result(LONG.total_seconds())
        assert store.get("log") == b"1234"


def test_a_wait_ends_in_time_while_writes_cannot_be_made(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id, acknowledge=False) as store:
        store.set("there", "v")
        store.check(["there"])
        own_server.kill()
        store.set_timeout(timedelta(seconds=0.2))
        with pytest.raises(dist.DistNetworkError, match="could not be reached"):
            store.multi_set(["k"] * 100_000, ["v"] * 100_000)  # more than the kernel takes
        with pytest.raises(dist.DistNetworkError, match="could not be reached"):
            store.wait(["there"], timedelta(seconds=0.2))
        own_server.start()
        store.set_timeout(LONG)
        assert store.get("k") == b"v", "what could not be sent is sent then"


@pytest.mark.parametrize("limit", [timedelta.max, float("inf")])
def test_a_line_that_another_thread_holds_is_waited_for_without_a_limit(
    server: RedisServer, run_id: str, limit: timedelta | float
) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        store.set("k", "v")
        assert store._line is not None
        with store._line._lock:
            waiting = in_thread(store.wait, ["k"], limit)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)
        waiting.result(SOON)


def test_a_handler_of_a_signal_within_a_write_is_acknowledged(
    server: RedisServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(server, run_id, acknowledge=False) as store:
        assert store._line is not None
        store.set("k", "v")
        put = store._line._put

        def handle() -> None:
            monkeypatch.undo()
            store.set("handled", "v")
            assert (store.get("handled"), under_way(store)) == (b"v", 2)
            put()

        monkeypatch.setattr(store._line, "_put", handle)
        store.set("interrupted", "v")
        assert store.peek(["k", "handled", "interrupted"]) == [b"v"] * 3


def test_an_interruption_on_entering_or_leaving_loses_no_write(server: RedisServer, run_id: str) -> None:
    """A handler raises while the line is held, and nothing that would let go of it runs yet, or any more."""
    with opened(server, run_id, acknowledge=False) as store:
        assert store._line is not None
        store.set("before", "v")
        store._line._enter(1)
        store.set("after", "v")
        assert store.peek(["before", "after"]) == [b"v"] * 2
        assert under_way(store) == 0
        in_thread(store.set, "of another thread", "v").result(SOON)
        store._line._enter(1)
        line_module._settle_all()
        assert under_way(store) == 0


@pytest.mark.parametrize("call", ["barrier", "add"])
def test_a_call_that_tries_twice_tells_of_an_earlier_write_that_failed(
    own_server: RedisServer, run_id: str, call: str
) -> None:
    with opened(own_server, run_id, acknowledge=False) as store, own_server.get_client() as client:
        store.barrier("b0", 1)  # from now on a barrier takes one round trip
        client.config_set("maxmemory", 1)
        store.set("k", "v")
        until(lambda: "errorstat_OOM" in client.info("errorstats"))
        client.config_set("maxmemory", 0)
        with pytest.raises(dist.DistNetworkError, match="earlier set of the key b'k' has failed"):
            store.barrier("b1", 1) if call == "barrier" else store.add("n", 1)
        store.barrier("b1", 1)


def test_a_first_write_goes_out_on_a_connection_that_is_alive(own_server: RedisServer, run_id: str) -> None:
    """Not on one that another call has left, which may have died since."""
    with opened(own_server, run_id, acknowledge=False) as store, own_server.get_client() as client:
        for started in [in_thread(store.wait, ["k"], 0.1) for _ in range(10)]:
            assert isinstance(started.exception(SOON), dist.DistStoreError)
        client.client_kill_filter(_type="normal", skipme=True)
        store.set("k", "v")
        until(lambda: client.exists(store._keys.data))
