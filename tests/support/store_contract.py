"""The contract of ``torch.distributed.Store`` as tests, which run on HashStore, TCPStore and RedisStore.

Where these stores differ, a class attribute of the contract says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from redelastic.store import RoundBrokenError
from tests.support.stores import LONG, SHORT, SOON, in_thread, until

NEEDS_BARRIER = pytest.mark.skipif(
    not hasattr(dist.Store, "barrier"), reason="torch's stores have barrier from 2.12 on"
)


class Contract:
    """What ``torch.distributed.Store`` promises; the attributes say where stores differ.

    A call that blocks is made on a clone, since other calls on the same TCPStore would wait for it.
    """

    wakers: tuple[str, ...] = ("set", "add", "append", "compare_set", "multi_set")  # verbs that wake a wait for a key
    zero_is_no_limit = False  # a timeout of 0 never ends
    queues = True
    serves_each_pop = True  # n pushes wake n pops that wait
    lists_keys = True
    counts_all = False  # num_keys counts keys without the prefix too
    get_takes_queue = False  # get of a queue's name returns b""
    mismatch: type[Exception] | None = dist.DistStoreError  # of multi_set with too few values; None: it reads on
    corrupt: type[Exception] | None = ValueError  # of add to what is no number; None: it ends the server

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
        store.wait([key], LONG)

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
        with pytest.raises(dist.DistStoreError):
            store.wait(["there", "missing"], SHORT)

    def test_wait_of_no_time_ends_at_once(self, store: Any) -> None:
        if not self.zero_is_no_limit:
            with pytest.raises(dist.DistStoreError, match=r"wait timeout after \d+ms, keys: .*/missing\b"):
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

    @NEEDS_BARRIER
    def test_barrier_waits_for_everybody(self, store: Any) -> None:
        store.set_timeout(LONG)
        first = in_thread(store.clone().barrier, "b", 2, LONG)
        until(lambda: store.check(["b/num_members"]) or store.num_keys() > 0)
        assert not first.done()
        store.barrier("b", 2, LONG)
        first.result(SOON)

    @NEEDS_BARRIER
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
            count = 4 if self.serves_each_pop else 1
            pops = [in_thread(store.clone().queue_pop, "q") for _ in range(count)]
            for i in range(count):
                store.queue_push("q", str(i))
            assert sorted(pop.result(SOON) for pop in pops) == [b"0", b"1", b"2", b"3"][:count]

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
            if self.get_takes_queue:
                assert store.get("q") == b""
            else:
                store.set_timeout(SHORT)
                with pytest.raises(dist.DistStoreError):
                    store.get("q")


class HashContract(Contract):
    """What differs in a HashStore."""

    wakers = ("set", "compare_set", "multi_set")
    zero_is_no_limit = True
    mismatch = None


class TCPContract(Contract):
    """What differs in a TCPStore."""

    serves_each_pop = False  # several pops are woken, and to all but the first the queue is empty
    get_takes_queue = True
    corrupt = None


class RedisContract(Contract):
    """What differs in a RedisStore."""

    mismatch = ValueError
