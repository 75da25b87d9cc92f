"""RedisStore against the contract of torch's own stores: the same tests over HashStore, TCPStore and RedisStore.

Where torch's stores differ from each other, or RedisStore from them, a class attribute of the contract says so.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis
import torch.distributed as dist
from conftest import NodeFactory
from faulty_proxy import Fault, FaultyProxy

from redelastic import scripts
from redelastic import store as store_module
from redelastic.connection import Connection
from redelastic.handler import RedisRendezvousHandler
from redelastic.keys import RunKeys
from redelastic.scripts import Script
from redelastic.server import RedisServer
from redelastic.store import RedisStore, RoundBrokenError

SHORT = timedelta(milliseconds=30)
LONG = timedelta(seconds=20)
SOON = 5.0  # within which what is due at once has to happen on a busy machine, in seconds


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args))
        except BaseException as e:  # noqa: BLE001
            future.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return future


def until(condition: Callable[[], bool]) -> None:
    """Wait until a server or a thread has got so far: a state of theirs, which wakes nobody."""
    deadline = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < deadline, "it never came so far"
        threading.Event().wait(0.002)


class Contract:
    """What ``torch.distributed.Store`` promises; the attributes are the differences.

    Who blocks has a clone of its own: another call on the same TCPStore would have to wait for the first.
    """

    wakers: tuple[str, ...] = ("set", "add", "append", "compare_set", "multi_set")
    zero_is_no_limit = False  # a wait of no time at all never ends
    queues = True
    lists_keys = True
    counts_all = False  # num_keys counts the keys outside of the prefix too
    get_takes_queue = False  # get finds a queue, and gives b""
    mismatch: type[Exception] | None = dist.DistStoreError  # multi_set with too few values; None: it reads past the end
    corrupt: type[Exception] | None = ValueError  # add to what is no number; None: not to be tried, the server dies

    @pytest.fixture
    def store(self) -> Any:
        raise NotImplementedError

    # -- values and keys

    @pytest.mark.parametrize("value", ["text", "", "ключ ✓", b"bytes", b"", b"\x00\xff\r\n\x80", "1"])
    def test_get_gives_exactly_the_bytes_that_were_set(self, store: Any, value: str | bytes) -> None:
        store.set("k", value)
        got = store.get("k")
        assert type(got) is bytes
        assert got == (value.encode() if isinstance(value, str) else value)

    def test_a_value_may_be_a_bytearray(self, store: Any) -> None:
        store.set("k", bytearray(b"\x00a"))
        assert store.get("k") == b"\x00a"

    @pytest.mark.parametrize("key", ["", "k", "a/b:c {d}*", "ключ ✓", b"bytes", "x" * 1000])
    def test_any_text_is_a_key(self, store: Any, key: str | bytes) -> None:
        store.set(key, "v")
        assert store.get(key) == b"v"
        assert store.check([key])
        store.wait([key], SHORT)

    def test_a_key_is_the_same_as_text_and_as_bytes(self, store: Any) -> None:
        store.set("ключ", "v")
        assert store.get("ключ".encode()) == b"v"

    def test_set_replaces(self, store: Any) -> None:
        store.set("k", "1")
        store.set("k", "2")
        assert store.get("k") == b"2"

    @pytest.mark.parametrize("value", [1, None, 1.5, ["v"]])
    def test_a_value_of_another_type_is_refused(self, store: Any, value: object) -> None:
        with pytest.raises(TypeError):
            store.set("k", value)
        assert not store.check(["k"])

    def test_a_key_of_another_type_is_refused(self, store: Any) -> None:
        with pytest.raises(TypeError):
            store.set(1, "v")

    # -- waiting

    def test_what_is_missing_times_out(self, store: Any) -> None:
        store.set_timeout(SHORT)
        for call in (
            lambda: store.get("missing"),
            lambda: store.wait(["missing"]),
            lambda: store.multi_get(["missing"]),
        ):
            started = time.monotonic()
            with pytest.raises(dist.DistStoreError, match=r"(?i)wait timeout") as caught:
                call()
            assert 0.02 < time.monotonic() - started < SOON
            assert not isinstance(caught.value, RoundBrokenError)

    def test_wait_takes_a_time_of_its_own(self, store: Any) -> None:
        store.set_timeout(LONG)
        store.set("there", "v")
        store.wait(["there"], SHORT)
        with pytest.raises(dist.DistStoreError):
            store.wait(["there", "missing"], SHORT)

    def test_wait_of_no_time_ends_at_once(self, store: Any) -> None:
        if not self.zero_is_no_limit:
            with pytest.raises(dist.DistStoreError, match=r"wait timeout after \d+ms, keys: .*missing"):
                store.wait(["missing"], timedelta(0))

    @pytest.mark.parametrize("setter", ["set", "add", "append", "compare_set", "multi_set"])
    @pytest.mark.parametrize("waiter", ["get", "wait", "multi_get"])
    def test_what_writes_a_key_wakes_who_waits_for_it(self, store: Any, setter: str, waiter: str) -> None:
        store.set_timeout(LONG)
        peer = store.clone()
        woken = in_thread(getattr(peer, waiter), "k" if waiter == "get" else ["k"])
        write: dict[str, Callable[[], object]] = {
            "set": lambda: store.set("k", "1"),
            "add": lambda: store.add("k", 1),
            "append": lambda: store.append("k", "1"),
            "compare_set": lambda: store.compare_set("k", "", "1"),
            "multi_set": lambda: store.multi_set(["other", "k"], ["0", "1"]),
        }
        write[setter]()
        if setter not in self.wakers:
            store.set("k", "1")
        assert woken.result(SOON) == {"get": b"1", "wait": None, "multi_get": [b"1"]}[waiter]

    def test_wait_needs_every_key(self, store: Any) -> None:
        store.set_timeout(LONG)
        keys = [f"k{i}" for i in range(5)]
        waits = [in_thread(store.clone().wait, keys), in_thread(store.clone().multi_get, keys)]
        for key in (keys[2], keys[0], keys[4], keys[1]):
            store.set(key, key)
        assert not any(wait.done() for wait in waits)
        store.set(keys[3], keys[3])
        assert [wait.result(SOON) for wait in waits] == [None, [key.encode() for key in keys]]

    def test_timeout_is_what_was_set(self, store: Any) -> None:
        store.set_timeout(timedelta(seconds=7.5))
        assert store.timeout == timedelta(seconds=7.5)

    # -- check

    def test_check_wants_every_key(self, store: Any) -> None:
        store.set("a", "")
        assert store.check(["a"])
        assert not store.check(["a", "b"])
        assert not store.check(["b"])
        assert store.check([])
        assert not store.check(["b"]), "a check changes nothing"

    def test_one_key_is_not_a_list_of_keys(self, store: Any) -> None:
        for call in (store.check, store.wait, store.multi_get):
            with pytest.raises(TypeError):
                call("abc")

    # -- numbers

    def test_add_counts_from_zero(self, store: Any) -> None:
        assert [store.add("n", amount) for amount in (3, -5, 0)] == [3, -2, -2]
        assert store.get("n") == b"-2"

    def test_add_goes_on_from_a_number_that_was_set(self, store: Any) -> None:
        store.set("n", "41")
        assert store.add("n", 1) == 42

    def test_add_has_64_bits(self, store: Any) -> None:
        assert store.add("n", 2**63 - 1) == 2**63 - 1
        assert store.add("n", -(2**63 - 1)) == 0
        assert store.add("n", -(2**63)) == -(2**63)
        assert store.get("n") == str(-(2**63)).encode()

    @pytest.mark.parametrize("amount", [2**63, -(2**63) - 1, 1.5, "1", None])
    def test_add_of_what_is_no_64_bit_number_is_refused(self, store: Any, amount: object) -> None:
        with pytest.raises(TypeError):
            store.add("n", amount)

    def test_add_to_what_is_no_number_is_an_error(self, store: Any) -> None:
        if self.corrupt is not None:
            store.set("n", "some text")
            with pytest.raises(self.corrupt):
                store.add("n", 1)
            assert store.get("n") == b"some text"

    def test_adds_of_many_threads_all_count(self, store: Any) -> None:
        with ThreadPoolExecutor(8) as pool:
            numbers = list(pool.map(lambda _: store.add("n", 1), range(200)))
        assert sorted(numbers) == list(range(1, 201))

    # -- compare_set, append, delete

    def test_compare_set_writes_only_over_what_is_expected(self, store: Any) -> None:
        store.set("k", "a")
        assert store.compare_set("k", "b", "c") == b"a"
        got = store.compare_set("k", b"a", b"\x00\xff")
        assert type(got) is bytes
        assert got == b"\x00\xff" == store.get("k")

    def test_compare_set_of_an_absent_key(self, store: Any) -> None:
        assert store.compare_set("k", "expected", "v") == b"expected"
        assert not store.check(["k"])
        assert store.compare_set("k", "", "v") == b"v"
        assert store.get("k") == b"v"

    def test_compare_set_lets_one_of_many_win(self, store: Any) -> None:
        with ThreadPoolExecutor(8) as pool:
            seen = set(pool.map(lambda i: store.compare_set("k", "", f"v{i}"), range(16)))
        assert seen == {store.get("k")}

    def test_append_begins_with_nothing(self, store: Any) -> None:
        for part in ("a", b"\x00", "", "ж"):
            store.append("k", part)
        assert store.get("k") == b"a\x00" + "ж".encode()

    def test_delete_tells_whether_there_was_one(self, store: Any) -> None:
        store.set("k", "v")
        assert store.delete_key("k") is True
        assert store.delete_key("k") is False
        assert not store.check(["k"])

    # -- many at once

    def test_multi_set_and_multi_get(self, store: Any) -> None:
        keys = [f"k{i}" for i in range(50)]
        store.multi_set(keys, [f"v{i}" for i in range(50)])
        got = store.multi_get([*reversed(keys), keys[0]])
        assert got == [f"v{i}".encode() for i in reversed(range(50))] + [b"v0"]
        assert {type(value) for value in got} == {bytes}

    def test_many_of_nothing_is_nothing(self, store: Any) -> None:
        store.multi_set([], [])
        store.wait([])
        assert store.multi_get([]) == []

    def test_multi_set_wants_a_value_for_each_key(self, store: Any) -> None:
        if self.mismatch is not None:
            with pytest.raises(self.mismatch):
                store.multi_set(["a", "b"], ["1"])
            assert not store.check(["a"])

    def test_it_has_the_extended_calls(self, store: Any) -> None:
        assert store.has_extended_api() is True

    # -- the keys

    def test_num_keys_counts_keys(self, store: Any) -> None:
        before = store.num_keys()
        store.multi_set(["a", "b", "c"], ["1", "2", "3"])
        store.set("a", "4")
        assert store.num_keys() == before + 3
        store.delete_key("b")
        assert store.num_keys() == before + 2

    def test_list_keys_gives_text(self, store: Any) -> None:
        if self.lists_keys:
            store.multi_set(["a", "ключ", b"c"], ["1", "2", "3"])
            assert sorted(store.list_keys()) == ["a", "c", "ключ"]
        else:
            with pytest.raises(NotImplementedError):
                store.list_keys()

    # -- barrier and clone

    def test_barrier_waits_for_everybody(self, store: Any) -> None:
        store.set_timeout(LONG)
        first = in_thread(store.clone().barrier, "b", 2, LONG)
        until(lambda: store.check(["b/num_members"]) or store.num_keys() > 0)
        assert not first.done()
        store.barrier("b", 2, LONG)
        first.result(SOON)

    def test_barrier_of_too_few_times_out(self, store: Any) -> None:
        with pytest.raises(dist.DistStoreError):
            store.barrier("b", 2, SHORT)

    def test_a_clone_is_the_same_store(self, store: Any) -> None:
        other = store.clone()
        other.set("k", "v")
        assert store.get("k") == b"v"
        assert other.timeout == store.timeout

    # -- queues

    def test_a_queue_keeps_the_order(self, store: Any) -> None:
        if not self.queues:
            with pytest.raises(NotImplementedError):
                store.queue_push("q", "1")
            return
        for item in ("1", b"\x00\xff", ""):
            store.queue_push("q", item)
        assert store.queue_len("q") == 3
        got = [store.queue_pop("q") for _ in range(3)]
        assert got == [b"1", b"\x00\xff", b""]
        assert {type(item) for item in got} == {bytes}
        assert store.queue_len("q") == 0

    def test_a_pop_of_an_empty_queue(self, store: Any) -> None:
        if self.queues:
            with pytest.raises(dist.QueueEmptyError):
                store.queue_pop("q", False)
            store.set_timeout(SHORT)
            with pytest.raises(dist.DistStoreError) as caught:
                store.queue_pop("q")
            assert not isinstance(caught.value, dist.QueueEmptyError)

    def test_a_push_wakes_a_pop(self, store: Any) -> None:
        if self.queues:
            store.set_timeout(LONG)
            pops = [in_thread(store.clone().queue_pop, "q") for _ in range(4)]
            for i in range(4):
                store.queue_push("q", str(i))
            assert sorted(pop.result(SOON) for pop in pops) == [b"0", b"1", b"2", b"3"]

    def test_queues_and_keys_are_apart(self, store: Any) -> None:
        if self.queues:
            before = store.num_keys()
            store.queue_push("q", "item")
            assert store.num_keys() == before
            assert store.delete_key("q") is False
            assert store.queue_len("q") == 1
            store.set("q", "value")
            assert (store.get("q"), store.queue_pop("q")) == (b"value", b"item")
            assert store.queue_len("q") == 0

    def test_a_pop_is_not_satisfied_by_a_key_of_that_name(self, store: Any) -> None:
        if self.queues:
            store.set("q", "value")
            store.set_timeout(SHORT)
            popped = in_thread(store.queue_pop, "q")
            with pytest.raises(dist.DistStoreError):
                popped.result(SOON)

    def test_items_satisfy_a_wait(self, store: Any) -> None:
        if self.queues:
            store.set_timeout(LONG)
            waiting = in_thread(store.clone().wait, ["q"])
            store.queue_push("q", "item")
            waiting.result(SOON)
            assert store.check(["q"])
            store.queue_pop("q")
            assert not store.check(["q"])

    def test_items_are_no_value(self, store: Any) -> None:
        if self.queues:
            store.queue_push("q", "item")
            store.set_timeout(SHORT)
            if self.get_takes_queue:
                assert store.get("q") == b""
            else:
                with pytest.raises(dist.DistStoreError):
                    store.get("q")


@contextlib.contextmanager
def opened(server: RedisServer, run_id: str, **options: Any) -> Iterator[RedisStore]:
    made = RedisStore(server.url, run_id, **options)
    yield made
    made.close()


class TestHashStore(Contract):
    wakers = ("set", "compare_set", "multi_set")
    zero_is_no_limit = True
    mismatch = None

    @pytest.fixture
    def store(self) -> Any:
        return dist.HashStore()


@pytest.fixture(scope="module")
def shared_tcp_store() -> Any:
    """One for all tests: where no name server answers, each new one looks up a name for five seconds, now and then."""
    return dist.TCPStore("127.0.0.1", 0, 1, is_master=True)


@pytest.fixture
def tcp_store(shared_tcp_store: Any) -> Any:
    """The shared store, empty."""
    shared_tcp_store.set_timeout(timedelta(minutes=5))
    for key in shared_tcp_store.list_keys():
        shared_tcp_store.delete_key(key)
    for queue in ("q", "p/q"):
        while shared_tcp_store.queue_len(queue):
            shared_tcp_store.queue_pop(queue)
    return shared_tcp_store


class TestTCPStore(Contract):
    get_takes_queue = True
    corrupt = None

    @pytest.fixture
    def store(self, tcp_store: Any) -> Any:
        return tcp_store


class TestRedisStore(Contract):
    mismatch = ValueError

    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            yield made


class TestRedisStoreOfAClient(TestRedisStore):
    """Made with a redis-py client as it comes: with its own retries, pool and protocol."""

    @pytest.fixture
    def store(self, client: redis.Redis, run_id: str) -> Iterator[Any]:
        made = RedisStore(client, run_id)
        yield made
        made.close()


class TestRedisStorePrefixed(TestRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            made.set("outside", "v")
            yield made.prefixed("outer").prefixed(b"inner")

    def test_prefixes_stand_before_the_keys(self, server: RedisServer, run_id: str) -> None:
        with opened(server, run_id) as made:
            view = made.prefixed("outer").prefixed("inner")
            view.set("k", "v")
            view.queue_push("q", "item")
            assert made.list_keys() == ["outer/inner/k"]
            assert made.queue_len("outer/inner/q") == 1
            assert dist.PrefixStore("inner", dist.PrefixStore("outer", made)).get("k") == b"v", "as in torch's own"
            assert (made.prefixed("other").num_keys(), view.num_keys()) == (0, 1)


class TestPrefixStoreOfHashStore(TestHashStore):
    @pytest.fixture
    def store(self) -> Any:
        return dist.PrefixStore("p", dist.HashStore())


class TestPrefixStoreOfTCPStore(TestTCPStore):
    @pytest.fixture
    def store(self, tcp_store: Any) -> Any:
        return dist.PrefixStore("p", tcp_store)


class TestPrefixStoreOfRedisStore(TestRedisStore):
    queues = lists_keys = False

    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            yield dist.PrefixStore("p", made)


class TestNestedPrefixStores(TestPrefixStoreOfRedisStore):
    @pytest.fixture
    def store(self, server: RedisServer, run_id: str) -> Iterator[Any]:
        with opened(server, run_id) as made:
            yield dist.PrefixStore("inner", dist.PrefixStore("outer", made.prefixed("own")))


# -- RedisStore alone


@pytest.fixture
def store(server: RedisServer, run_id: str) -> Iterator[RedisStore]:
    with opened(server, run_id) as made:
        yield made


def blocked_clients(client: redis.Redis) -> int:
    return int(client.info("clients")["blocked_clients"])


def test_many_threads_block_at_once_on_one_handle(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waits = [in_thread(store.get, f"k{i % 10}") for i in range(40)]
        until(lambda: blocked_clients(client) == 40)
        store.multi_set([f"k{i}" for i in range(10)], ["v"] * 10)
        assert [wait.result(SOON) for wait in waits] == [b"v"] * 40


def test_a_thousand_waits_leak_no_connection(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        store.set("there", "v")
        for i in range(500):
            store.wait(["there"])
            with pytest.raises(dist.DistStoreError):
                store.wait(["missing"], timedelta(milliseconds=1 if i % 50 == 0 else 0))
        assert len(client.client_list()) <= 3


def test_a_blocked_wait_asks_nothing(own_server: RedisServer, run_id: str) -> None:
    """It is woken; it does not poll."""
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waiting = in_thread(store.wait, ["k"])
        until(lambda: blocked_clients(client) == 1)
        before = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        for _ in range(50):
            store.check(["other"])
        after = client.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert after - before == 50, "only this thread's own checks"
        store.set("k", "v")
        waiting.result(SOON)


@pytest.mark.parametrize("what", ["get", "wait", "queue_pop"])
def test_a_wait_survives_the_loss_of_all_data(own_server: RedisServer, run_id: str, what: str) -> None:
    with opened(own_server, run_id) as store, own_server.get_client() as client:
        waiting = in_thread(getattr(store, what), ["k"] if what == "wait" else "k")
        until(lambda: blocked_clients(client) == 1)
        client.flushall()
        client.script_flush()
        if what == "queue_pop":
            store.queue_push("k", "v")
        else:
            store.set("k", "v")
        assert waiting.result(SOON) == (None if what == "wait" else b"v")


def test_a_wait_survives_a_restart(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store:
        with own_server.get_client() as client:
            waiting = in_thread(store.get, "k")
            until(lambda: blocked_clients(client) == 1)
        own_server.kill()
        own_server.start()
        store.set("k", "v")
        assert waiting.result(2 * SOON) == b"v"


def test_a_wait_ends_in_time_while_redis_is_away(own_server: RedisServer, run_id: str) -> None:
    with opened(own_server, run_id) as store:
        own_server.kill()
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="could not be reached"):
            store.wait(["k"], timedelta(seconds=0.3))
        store.set_timeout(timedelta(seconds=0.3))
        for call in (lambda: store.get("k"), lambda: store.set("k", "v"), lambda: store.add("k", 1)):
            with pytest.raises(dist.DistNetworkError, match="could not be reached"):
                call()
        assert time.monotonic() - started < 2 * SOON


def test_all_keys_have_a_time_to_live(client: redis.Redis, server: RedisServer, run_id: str) -> None:
    with opened(server, run_id, ttl=100) as store:
        store.set_timeout(SHORT)
        for miss in (lambda: store.get("missing"), lambda: store.queue_pop("missing")):
            with pytest.raises(dist.DistStoreError):
                miss()
        with pytest.raises(dist.QueueEmptyError):
            store.prefixed("p").queue_pop("q", block=False)
        pops = in_thread(store.clone().queue_pop, "woken")
        store.set("k", "v")
        store.append("k", "v")
        store.add("n", 1)
        store.compare_set("c", "", "v")
        store.queue_push("q", "v")
        store.queue_push("woken", "v")
        with contextlib.suppress(dist.DistStoreError):
            pops.result(SOON)
        store.delete_key("n")
        names = list(client.scan_iter(f"*{run_id}*"))
        assert len(names) >= 4
        assert all(0 < client.ttl(name) <= 100 for name in names)
        client.expire(RunKeys(run_id).store("default").base, 5)
        store.set("k", "w")
        assert client.ttl(RunKeys(run_id).store("default").base) > 90


def test_stores_of_other_names_and_runs_are_apart(server: RedisServer, run_id: str, store: RedisStore) -> None:
    store.set("k", "v")
    for options in ({"name": "other"}, {"epoch": 1}, {"key_prefix": "other"}):
        with opened(server, run_id, **options) as other:
            assert not other.check(["k"])
    with opened(server, run_id + "x") as other:
        assert not other.check(["k"])
    with opened(server, run_id) as same:
        assert same.get("k") == b"v"


@pytest.mark.parametrize(
    ("suffix", "type_of_ours", "call"),
    [
        ("", "hash", lambda s: s.get("k")),
        ("", "hash", lambda s: s.set("k", "v")),
        ("", "hash", lambda s: s.num_keys()),
        ("", "hash", lambda s: s.check(["k"])),
        (":waits", "hash", lambda s: s.get("k")),
        (":waits", "hash", lambda s: s.set("k", "v")),
        (":once", "hash", lambda s: s.add("k", 1)),
        (":wake:k", "stream", lambda s: s.get("k")),
        (":queue:k", "list", lambda s: s.queue_push("k", "v")),
        (":queue:k", "list", lambda s: s.queue_pop("k")),
        (":queue:k", "list", lambda s: s.queue_len("k")),
    ],
)
def test_a_key_of_a_wrong_type_is_named(
    client: redis.Redis, store: RedisStore, suffix: str, type_of_ours: str, call: Callable[[RedisStore], Any]
) -> None:
    base = store._keys.base
    client.set(base + suffix, "not ours", ex=60)
    with pytest.raises(dist.DistStoreError, match="holds a string, not the") as caught:
        call(store)
    assert f"'{base}{suffix}'" in str(caught.value)
    assert f"not the {type_of_ours}" in str(caught.value)
    assert client.get(base + suffix) == b"not ours"


@pytest.mark.parametrize("text", ["no number", "1.5", str(2**63), "", " 1"])
def test_add_to_a_corrupt_number_names_the_key(store: RedisStore, text: str) -> None:
    store.set("the-key", text)
    with pytest.raises(ValueError, match="the-key"):
        store.add("the-key", 1)
    assert store.get("the-key") == text.encode()


def test_add_past_64_bits_changes_nothing(store: RedisStore) -> None:
    store.add("n", 2**63 - 1)
    with pytest.raises(ValueError, match="overflow"):
        store.add("n", 1)
    assert store.get("n") == str(2**63 - 1).encode()


def test_a_value_of_16_megabytes(store: RedisStore) -> None:
    value = bytes(range(256)) * (16 * 2**20 // 256)
    store.set("big", value)
    assert store.get("big") == value
    assert store.compare_set("big", value, value[::-1]) == value[::-1]
    store.append("big", b"tail")
    store.queue_push("q", value)
    assert store.queue_pop("q") == value
    assert store.multi_get(["big"]) == [value[::-1] + b"tail"]


def test_ten_thousand_keys(store: RedisStore) -> None:
    keys = [f"k{i}" for i in range(10_000)]
    got = in_thread(store.multi_get, keys)
    store.multi_set(keys, [key.upper() for key in keys])
    assert got.result(SOON) == [key.upper().encode() for key in keys]
    assert store.num_keys() == len(store.list_keys()) == 10_000
    assert store.check(keys)
    store.wait(keys, SHORT)


def test_a_client_that_decodes_is_refused(server: RedisServer, run_id: str) -> None:
    with server.get_client(decode_responses=True) as client, pytest.raises(ValueError, match="decode_responses=True"):
        RedisStore(client, run_id)


@pytest.mark.parametrize("name", ["", "a:b", "a b", "{x}", "*", "x" * 201])
def test_a_name_that_is_no_part_of_a_key_is_refused(server: RedisServer, run_id: str, name: str) -> None:
    with server.get_client() as client, pytest.raises(ValueError, match="store name"):
        RedisStore(client, run_id, name)


# -- how long a store lives


def test_a_closed_store_may_be_collected(connection: Connection, run_id: str) -> None:
    store = RedisStore(connection, run_id)
    gone = weakref.ref(store)
    store.close()
    del store
    gc.collect()
    assert gone() is None


def test_a_store_that_only_torch_knows_stays_alive(connection: Connection, run_id: str) -> None:
    prefixed = dist.PrefixStore("p", RedisStore(connection, run_id))
    copy: Any = prefixed.clone()  # type: ignore[attr-defined]
    view = dist.PrefixStore("p", RedisStore(connection, run_id).prefixed("v"))
    gc.collect()
    prefixed.set("k", "v")
    view.set("k", "w")
    assert (copy.get("k"), view.get("k")) == (b"v", b"w")
    underlying = copy.underlying_store
    assert isinstance(underlying, RedisStore)
    for store in [each for each in store_module._alive if each._run.run_id == run_id]:
        store.close()


def test_closing_ends_the_connections_of_a_store_that_opened_them(own_server: RedisServer, run_id: str) -> None:
    with own_server.get_client() as client:
        store = RedisStore(own_server.url, run_id)
        store.set("k", "v")
        assert len(client.client_list()) == 2
        store.close()
        until(lambda: len(client.client_list()) == 1)


# -- one effect, however often a request is sent (I8)

Writes = dict[
    str, tuple[Callable[[RedisStore], Any], Callable[[RedisStore], Any], Any, Callable[[RedisStore], Any], Any]
]


def _state(key: str) -> Callable[[RedisStore], Any]:
    return lambda s: s.get(key) if s.check([key]) else None


# Each: what is lost; what somebody else does before it is sent again; its reply; what is read at the end, and found.
WRITES: Writes = {
    "set": (lambda s: s.set("k", "1"), lambda s: s.set("k", "2"), None, _state("k"), b"2"),
    "multi_set": (lambda s: s.multi_set(["k"], ["1"]), lambda s: s.set("k", "2"), None, _state("k"), b"2"),
    "add": (lambda s: s.add("n", 1), lambda s: s.add("n", 10), 1, _state("n"), b"11"),
    "append": (lambda s: s.append("a", "x"), lambda s: s.append("a", "y"), None, _state("a"), b"xy"),
    "compare_set": (lambda s: s.compare_set("k", "0", "1"), lambda s: s.set("k", "0"), b"1", _state("k"), b"0"),
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
    yield made
    made.close()


def _digest(verb: str) -> bytes:
    """What every request of a verb contains."""
    names = {"set": "STORE_SET", "multi_set": "STORE_SET", "delete_key": "STORE_DELETE"}
    script = getattr(scripts, names.get(verb, verb.upper() if "queue" in verb else f"STORE_{verb.upper()}"))
    assert isinstance(script, Script)
    return script._digest.encode()


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


@pytest.mark.parametrize("later", [False, True], ids=["the last request", "after others"])
@pytest.mark.parametrize("verb", WRITES)
def test_a_copy_that_arrives_late_has_no_effect(
    unlucky: RedisStore, store: RedisStore, proxy: FaultyProxy, verb: str, later: bool
) -> None:
    """It was on its way for so long that its sender gave its connection up, and has done other things since."""
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
def test_what_reads_is_asked_again(
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
    nodes = [new_node(1, 2), new_node(1, 2)]
    infos = [in_thread(node.next_rendezvous) for node in nodes]
    return [(node, info.result(SOON).store) for node, info in zip(nodes, infos, strict=True)]


@pytest.mark.parametrize("wait", [lambda s: s.get("k"), lambda s: s.wait(["k"]), lambda s: s.queue_pop("q")])
@pytest.mark.parametrize("view", ["store", "prefixed", "PrefixStore"])
def test_a_wait_ends_at_once_when_a_member_leaves(pair: Pair, wait: Callable[[Any], Any], view: str) -> None:
    (gone, _), (_, store) = pair
    seen = {"store": store, "prefixed": store.prefixed("p"), "PrefixStore": dist.PrefixStore("p", store)}[view]
    waiting = in_thread(seen.get, "k") if view == "PrefixStore" else in_thread(wait, seen)
    until(lambda: bool(store._call(lambda client: client.exists(store._keys.waits))))
    started = time.monotonic()
    gone._membership.leave("test")
    with pytest.raises(RoundBrokenError, match=r"Round 1 .* is broken .*test"):
        waiting.result(SOON)
    assert time.monotonic() - started < 1


def test_a_wait_ends_when_a_lease_runs_out(pair: Pair) -> None:
    (gone, _), (_, store) = pair
    waiting = in_thread(store.get, "k")
    gone._membership.stop()
    with pytest.raises(RoundBrokenError, match="lost its lease"):
        waiting.result(SOON)


def test_what_is_there_is_read_though_the_round_is_broken(pair: Pair) -> None:
    (gone, theirs), (_, store) = pair
    theirs.set("there", "v")
    theirs.queue_push("q", "item")
    gone._membership.leave("test")
    store.wait(["there", "q"])
    assert (store.get("there"), store.multi_get(["there"]), store.queue_pop("q")) == (b"v", [b"v"], b"item")
    started = time.monotonic()
    for call in (lambda: store.get("k"), lambda: store.multi_get(["there", "k"]), lambda: store.queue_pop("q")):
        with pytest.raises(RoundBrokenError):
            call()
    assert time.monotonic() - started < 1
    assert not store.check(["k"])


def test_nothing_is_written_to_a_superseded_round(pair: Pair, client: redis.Redis, run_id: str) -> None:
    (gone, old), (stays, also_old) = pair
    old.set("k", "0")
    old.queue_push("q", "item")
    gone._membership.leave("test")
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


def test_the_reply_of_a_write_before_the_fence_is_still_had(
    pair: Pair, proxy: FaultyProxy, server: RedisServer, run_id: str
) -> None:
    """The effect came in time, only its reply was lost: to say that it was refused would be a lie (I8)."""
    (gone, _), (stays, _) = pair
    unlucky = RedisStore(server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}"), run_id, epoch=1)

    def regroup() -> None:
        gone._membership.leave("test")
        stays.next_rendezvous()

    fault = proxy.add(Fault(_digest("add"), meanwhile=regroup))
    assert unlucky.add("n", 5) == 5
    assert fault.fired.is_set()
    with pytest.raises(RoundBrokenError):
        unlucky.add("n", 1)
    unlucky.close()
