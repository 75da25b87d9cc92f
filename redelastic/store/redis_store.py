"""RedisStore: torch's key-value store in Redis, for one run or for one round of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, Final, Literal

import torch.distributed as dist

from redelastic.redis import scripts
from redelastic.redis.client import DirectClient, pack_bytes
from redelastic.redis.connection import Connection, entries_of, text
from redelastic.redis.keys import DEFAULT_PREFIX, DEFAULT_TTL, RunKeys

from .line import PATIENCE, Line
from .requests import LARGE, Request, Requests, RoundBrokenError, Text, Told

if TYPE_CHECKING:
    from redelastic.redis.endpoint import Client

LONGEST_TTL: Final = 1e9  # in seconds
_LONGEST: Final = 2**29  # bytes; the most that Redis accepts, unless its proto-max-bulk-len was changed

# torch's C++ keeps only its own half of a store: once Python's half is gone, every call dies in an assertion. So a
# store lives until it is closed; see `RedisStore.close`.
_alive: Final[set[RedisStore]] = set()


class RedisStore(Requests):
    """A ``torch.distributed.Store`` in Redis.

    Contract: ``torch.distributed.Store`` and ``TCPStore`` of torch 2.13. Every write takes effect exactly once, even
    when a reply is lost and the request is sent again, or a copy arrives late (I8). A blocked ``get``, ``wait`` or
    ``queue_pop`` is woken by the ``set`` that satisfies it.

    A store stays usable until :meth:`close`, even if only torch's C++ still knows it. All objects for one store are the
    same store; each is safe to use from several threads and after a fork.

    Args:
        client: an endpoint or URL, a redis-py client of bytes, or a :class:`Connection`.
        run_id: id of the run.
        name: distinguishes this store from the run's others.
        epoch: epoch of the round that the store belongs to, if any; the name is then unused. A wait on such a store
            ends at once when the round is broken, and it refuses writes once a later round is complete (I4).
        key_prefix: prefix of all keys in Redis.
        timeout: of blocking calls, in seconds. The error may come up to 0.1 s later, however short the timeout: Redis
            checks blocked clients ten times a second. A value that comes in time is returned at once.
        ttl: how long the store outlives its last change, in seconds, or up to a hundredth less; a round's members keep
            its store alive, except for unused queues.
        acknowledge: whether ``set``, ``multi_set``, ``append`` and ``queue_push`` return only when Redis has made them.
            If not, they return when they are sent, as TCPStore's do: each is made once, in the order in which this
            process sent them, even if the connection is lost, and before any other call of this object, its views or
            clones. If one fails, the next such call raises an error that names it and has no effect of its own,
            and those sent after it are not made. A process that exits or forks, or closes the store, waits for up to
            5 s until all are made; one that is killed may lose them. ``set`` and ``multi_set`` wait for values of 32 kB
            and more; with redis-py's own client, or a Cluster, all are waited for.

    Raises:
        RendezvousConnectionError: Redis does not answer, or refuses the connection.
        ValueError: the endpoint, run id, name, prefix or ttl is invalid.
    """

    def __init__(
        self,
        client: str | Client | Connection,
        run_id: str,
        name: str = "default",
        *,
        epoch: int | None = None,
        key_prefix: str = DEFAULT_PREFIX,
        timeout: float | timedelta = 300.0,
        ttl: float = DEFAULT_TTL,
        acknowledge: bool = True,
    ) -> None:
        if not 0.001 <= ttl <= LONGEST_TTL:
            raise ValueError(f"The store's ttl={ttl:g} is out of range: give 0.001 to {LONGEST_TTL:g} s.")
        run = RunKeys(run_id, key_prefix)
        keys = run.store(name if epoch is None else epoch)
        self._opened = isinstance(client, str)
        if isinstance(client, str):
            client = Connection.open(client)
        connection = client if isinstance(client, Connection) else Connection(client)
        super().__init__(connection, run, keys, epoch, ttl)
        self._name = name
        self._prefix, self._is_view = b"", False
        if not acknowledge and isinstance(connection.client, DirectClient):
            self._line = Line(connection)
        self._views: list[RedisStore] = []  # torch's C++ may hold a clone: it lives as long as this does
        self.set_timeout(timedelta(seconds=_seconds_of(timeout)))
        _alive.add(self)

    def __repr__(self) -> str:
        return f"RedisStore({self._keys.base!r} at {self._connection.name})"

    def close(self) -> None:
        """Release this object and its views: they may be collected once nothing in Python refers to them.

        The stored data stays.
        """
        try:
            self._settle(min(PATIENCE, self._seconds()))
        finally:
            self._release()
            try:
                if self._line and not self._is_view:
                    self._line.close()
            finally:
                if self._opened:
                    self._connection.close()

    def _release(self) -> None:
        _alive.discard(self)
        while self._views:
            self._views.pop()._release()  # noqa: SLF001

    def clone(self) -> RedisStore:
        """Another object for the same store, with its own timeout."""
        return self.prefixed(b"")

    def prefixed(self, prefix: Text) -> RedisStore:
        """A view in which ``prefix`` and a slash precede every key, as in torch's ``PrefixStore``.

        Queues and ``list_keys`` work on it too.
        """
        view = RedisStore(
            self._connection,
            self._run.run_id,
            self._name,
            epoch=self._epoch,
            key_prefix=self._run.prefix,
            timeout=self.timeout,
            ttl=self._ttl,
        )
        view._line, view._calls, view._both, view._is_view = self._line, self._calls, self._both, True
        view._prefix = self._prefix + _bytes("prefix", prefix) + (b"/" if prefix else b"")
        self._views.append(view)
        return view

    # -- reading and writing

    def set(self, key: Text, value: Text) -> None:
        """Write a value."""
        full, written = self._key(key), _bytes("value", value)
        if len(written) < LARGE:
            self._write("set", scripts.STORE_SET, [self._streams + full], [full, written])
        else:
            self._set("set", [full], [full, written], len(written))

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Write several values at once."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values; give one value for each key.")
        full = self._all(keys)
        if full:
            pairs = [b""] * (2 * len(full))
            pairs[::2], pairs[1::2] = full, [_bytes("value", value) for value in values]
            self._set("multi_set", full, pairs, max(map(len, pairs[1::2])))

    def get(self, key: Text) -> bytes:
        """Read a value; block until it is set.

        Raises:
            DistStoreError: it was not set within ``timeout``.
            RoundBrokenError: it can no longer be set, because the store's round is broken.
        """
        full, started = self._key(key), time.monotonic()
        packed = self._hget % (len(full), full)
        value: bytes | None = self._ask(packed)[0]
        while value is None:
            seconds = self._seconds()
            value = self._block([full], "get", started, seconds)
            if value is None:
                value = self._ask(packed, timeout=started + seconds - time.monotonic())[0]
        return value

    def multi_get(self, keys: Sequence[Text]) -> list[bytes]:
        """Read several values; block until all are set. Raises like :meth:`get`."""
        full, started, seconds = self._all(keys), time.monotonic(), self._seconds()
        values = self._read(full, seconds)
        while missing := [i for i, value in enumerate(values) if value is None]:
            absent = [full[i] for i in missing]
            self._block(absent, "get", started, seconds)
            for i, value in zip(missing, self._read(absent, started + seconds - time.monotonic()), strict=True):
                values[i] = value
        return values

    def peek(self, keys: Sequence[Text]) -> list[bytes | None]:
        """Read several values as they are now; None for a missing key."""
        return self._read(self._all(keys), self._seconds())

    def add(self, key: Text, amount: int) -> int:
        """Add to the number in a key, 0 at first; returns the new number.

        Raises:
            ValueError: the value is not a number, or the new one would not fit 64 bits.
        """
        number = index(amount)
        if not -(2**63) <= number < 2**63:
            raise TypeError(f"add takes a 64-bit integer, not {amount!r}.")
        full = self._key(key)
        try:
            return int(self._once(scripts.STORE_ADD, [self._streams + full], [full, b"%d" % number]))
        except dist.DistStoreError as e:
            _raise_if_not_addable(e, full, amount)
            raise

    def append(self, key: Text, value: Text) -> None:
        """Add bytes to the end of a value, empty at first."""
        full = self._key(key)
        self._write("append", scripts.STORE_APPEND, [self._streams + full], [full, _bytes("value", value)])

    def compare_set(self, key: Text, expected: Text, desired: Text) -> bytes:
        """Write ``desired`` if the value is ``expected``, or if there is none and ``expected`` is empty.

        Returns:
            The value afterwards; ``expected`` if there is none.
        """
        full = self._key(key)
        args = [full, _bytes("value", expected), _bytes("value", desired)]
        return bytes(self._once(scripts.STORE_COMPARE_SET, [self._streams + full], args))

    def delete_key(self, key: Text) -> bool:
        """Remove a key; returns whether there was one."""
        return bool(self._once(scripts.STORE_DELETE, [], [self._key(key)]) == b"1")

    def check(self, keys: Sequence[Text]) -> bool:
        """Whether all keys are there now; a queue with items counts, as in TCPStore."""
        full = self._all(keys)
        if len(full) != 1:
            script, names, args = self._look(full, "check")
            return bool(self._script(script, names, [*args, b""])[0] == 0)
        key, queue = full[0], self._keys.queue(full[0])
        both = self._hexists % (len(key), key) + pack_bytes([b"EXISTS", queue])  # a script takes a fifth longer
        return any(self._ask(both, [queue], count=2))

    def wait(self, keys: Sequence[Text], timeout: timedelta | float | None = None) -> None:
        """Block until all keys are set. Raises like :meth:`get`."""
        full, started = self._all(keys), time.monotonic()
        seconds = self._seconds if timeout is None else partial(_seconds_of, timeout)
        if len(full) != 1 or not self._ask(self._hexists % (len(full[0]), full[0]), timeout=seconds)[0]:
            self._block(full, "wait", started, seconds())

    def barrier(self, key: Text, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Block until ``world_size`` callers have reached the barrier ``key``; raises like :meth:`get`.

        In one round trip, with one wake-up for all. Torch's ``PrefixStore`` takes three, with the same keys.
        """
        started, full = time.monotonic(), self._key(key)
        count, last = full + b"/num_members", full + b"/last_member"
        stream = self._streams + last
        callers, seconds = b"%d" % index(world_size), self._seconds() if timeout is None else _seconds_of(timeout)
        sender = self._borrowed_sender()
        try:
            args = [sender.name, b"%d" % sender.request, count, last, callers]
            request = scripts.STORE_BARRIER, [self._wake, self._streams + count, stream], args
            if not self._ask_and_read(request, stream, started + seconds):
                self._await([last], request, started, seconds)
        except dist.DistStoreError as e:
            _raise_if_not_addable(e, count, 1)
            raise
        finally:
            self._senders.append(sender)

    def num_keys(self) -> int:
        """The number of keys."""
        if self._prefix:
            return len(self.list_keys())
        return int(self._ask(pack_bytes([b"HLEN", self._data]))[0])

    def list_keys(self) -> list[str]:
        """The names of all keys."""
        keys: list[bytes] = self._ask(pack_bytes([b"HKEYS", self._data]))[0]
        n = len(self._prefix)
        return [key[n:].decode("utf-8", "surrogateescape") for key in keys if key.startswith(self._prefix)]

    # -- queues

    def queue_push(self, key: Text, value: Text) -> None:
        """Append an item to a queue."""
        full = self._key(key)
        streams = [self._streams + full, self._keys.queue(full)]
        self._write("queue_push", scripts.QUEUE_PUSH, streams, [full, _bytes("value", value)])

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Remove and return the first item of a queue.

        Raises:
            QueueEmptyError: there is none, and ``block`` is False.
            DistStoreError: there was none within ``timeout``.
        """
        full, started, seconds = self._key(key), time.monotonic(), self._seconds()
        while True:
            item = self._once(scripts.QUEUE_POP, [self._keys.queue(full)], [])
            if item is not None:
                return bytes(item)
            if not block:
                raise dist.QueueEmptyError(f"The queue {full!r} is empty.")
            self._block([full], "pop", started, seconds)

    def queue_len(self, key: Text) -> int:
        """The number of items in a queue."""
        queue = self._keys.queue(self._key(key))
        return int(self._ask(pack_bytes([b"LLEN", queue]), [queue])[0])

    # -- under the names that torch's C++ calls

    def has_extended_api(self) -> bool:
        """Append, multi_get and multi_set are single calls."""
        return True

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # -- below

    def _key(self, key: Text) -> bytes:
        if isinstance(key, str) and len(key) < LARGE:  # this spares the common case a call
            return self._prefix + key.encode("utf-8", "surrogateescape")
        return self._prefix + _bytes("key", key)

    def _read(self, keys: list[bytes], timeout: float) -> list[Any]:
        return self._ask(pack_bytes([b"HMGET", self._data, *keys]), timeout=timeout)[0] if keys else []

    def _all(self, keys: Sequence[Text]) -> list[bytes]:
        if isinstance(keys, str | bytes):
            raise TypeError(f"Give a list of keys, not the single key {keys!r}.")
        prefix = self._prefix
        return [prefix + _bytes("key", key) for key in keys]

    def _look(self, keys: list[bytes], asked: Literal["get", "pop", "wait", "check"]) -> Request:
        """Whether all keys are there: ``lua/store_wait.lua`` without its last argument."""
        both = [name for key in keys for name in (self._streams + key, self._keys.queue(key))]
        return scripts.STORE_WAIT, [self._wake, *both], [asked.encode(), *keys]

    def _block(
        self, keys: list[bytes], asked: Literal["get", "pop", "wait"], started: float, timeout: float
    ) -> bytes | None:
        """Block until all keys are there, for ``timeout`` seconds after ``started`` on the monotonic clock.

        Returns:
            The value that a single key was set to, if the wake-up carried it.
        """
        request = self._look(keys, asked)
        told = None
        if len(keys) == 1 and asked != "pop":
            told = self._ask_and_read(request, self._streams + keys[0], started + timeout)
        told = told or self._await(keys, request, started, timeout)
        return told[1] if told and told[0] == b"value" else None

    def _await(self, keys: list[bytes], request: Request, started: float, timeout: float) -> Told | None:
        """As :meth:`_block`, by a request whose reply is that of ``lua/store_wait.lua``; returns what woke it."""
        script, names, args = request
        deadline = started + timeout
        while keys:
            reply = self._script(script, names, [*args, b""], deadline - time.monotonic())
            if reply[0] == 0:
                break
            if reply[0] < 0:
                raise RoundBrokenError(
                    f"Round {self._epoch} of run {self._run.run_id!r} is broken ({text(reply[1])}); "
                    f"the keys {_listed(keys)} will not be set any more. Join the next round."
                )
            self._woken = reply[2]
            stream, left = self._streams + keys[reply[0] - 1], deadline - time.monotonic()
            if left <= 0:
                limit = round(1000 * timeout)  # as TCPStore says it; how much later it is by now depends on Redis
                raise dist.DistStoreError(f"wait timeout after {limit}ms, keys: {_listed(keys)} of {self!r}")
            read = self._ask(self._reading(stream, reply[1], reply[2], left), [stream], left)
            told: list[Told] = [said for _, said in entries_of(read[0]).get(stream, ()) if said[0] != b"over"]
            if told and len(keys) == 1:
                return told[-1]
        return None

    def _reading(self, stream: bytes, after: bytes, wake_after: bytes, seconds: float) -> bytes:
        """What to send to block until a key's own stream, or that of the round's run, has an entry after an id."""
        block = b"%d" % max(1, round(1000 * min(seconds, self._connection.max_block)))
        words = (len(block), block, len(stream), stream, len(after), after)
        return self._xread % (words if self._epoch is None else (*words, len(wake_after), wake_after))


def _seconds_of(timeout: timedelta | float) -> float:
    return timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)


def _raise_if_not_addable(error: dist.DistStoreError, key: bytes, amount: int) -> None:
    if any(words in str(error.__cause__) for words in ("value is not an integer", "would overflow")):
        raise ValueError(f"Cannot add {amount} to the key {key!r}: {error}") from error


def _bytes(what: str, value: Text) -> bytes:
    if isinstance(value, str):
        value = value.encode("utf-8", "surrogateescape")
    elif type(value) is not bytes:
        if not isinstance(value, bytes | bytearray):
            raise TypeError(f"A {what} of a store must be str or bytes, not {type(value).__name__}.")
        value = bytes(value)
    if len(value) > _LONGEST:  # Redis drops a client that sends more, without a reason
        raise ValueError(f"A {what} of a store must have at most {_LONGEST:,} bytes, not {len(value):,}: split it.")
    return value


def _listed(keys: list[bytes]) -> str:
    shown = ", ".join(text(key) for key in keys[:8])
    return shown + (f", … ({len(keys)} in all)" if len(keys) > 8 else "")
