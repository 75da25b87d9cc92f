"""RedisStore: torch's key-value store in Redis, for one run or for one round of it."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from operator import index
from typing import Any, Final, Literal

import torch.distributed as dist

from redelastic.monitoring.events import decode_cause
from redelastic.monitoring.sentences import cause
from redelastic.redis import scripts
from redelastic.redis.connection import Connection, sanitize, text
from redelastic.redis.errors import RedelasticError
from redelastic.redis.keys import DEFAULT_PREFIX, DEFAULT_TTL, RunKeys
from redelastic.redis.wire import Client
from redelastic.torch_errors import torch_errors

from .requests import Requests, RoundBrokenError, Sender

Text = str | bytes
# A script, its keys beside the ones that each script of a store takes, and its arguments.
Request = tuple[scripts.Script, list[bytes], list[bytes] | Callable[[], Sequence[bytes]]]

LONGEST_TTL: Final = 1e9  # in seconds
LONGEST_BLOCK: Final = 5.0  # in seconds, after which queue_pop looks again: the one that was woken may have died
KEPT_APART: Final = 4096  # in bytes: longer items have a key of their own until they have arrived (lua/queue_pop.lua)
MOST_KEYS: Final = 2**18  # of a call: up to three words each, and Redis 6.2 takes 2**20 words
# Torch's first process group has its addresses there: in 0//<device>//0/<rank> with gloo, in 0//<device>//0 with NCCL.
_OF_FIRST_GROUP: Final = re.compile(rb"(?:^|/)0//[a-z0-9]+//0(?:/[0-9]+)?$")
_LONGEST: Final = 2**29  # in bytes: Redis accepts no more, unless its proto-max-bulk-len was changed

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

    Nothing says when C++ lets go of a store. So one that is never closed stays in memory until its process ends: close
    the stores that your own code makes again and again, with ``contextlib.closing(RedisStore(…))`` for example.

    A store is for one process group, and for one start of a job: a second one is refused, since it would find the
    addresses of the first. Give each start a run id or a name of its own.

    Args:
        client: an endpoint or URL, a redis-py client of bytes, or a :class:`Connection`.
        run_id: id of the run.
        name: distinguishes this store from the run's others.
        epoch: epoch of the round that the store belongs to, if any; the name is then unused. A wait on such a store
            ends at once when the round is broken, and it refuses writes once a later round is complete (I4).
        key_prefix: prefix of all keys in Redis.
        timeout: of connecting and of blocking calls, in seconds. The error may come up to 0.1 s later, however short
            the timeout: Redis checks blocked clients ten times a second. A value in time is returned at once.
        ttl: how long the store outlives its last change, in seconds, or up to a hundredth less; a round's members keep
            its store alive, except for unused queues.

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
    ) -> None:
        if not 0.001 <= ttl <= LONGEST_TTL:
            raise ValueError(f"The store's ttl={ttl:g} is out of range: give 0.001 to {LONGEST_TTL:g} s.")
        run = RunKeys(run_id, key_prefix)
        keys = run.store(name if epoch is None else epoch)
        self._opened = isinstance(client, str)
        if isinstance(client, str):
            with torch_errors():
                client = Connection.open(client, connect_timeout=_seconds_of(timeout))
        connection = client if isinstance(client, Connection) else Connection(client)
        super().__init__(connection, run, keys, epoch, ttl)
        self._name = name
        self._prefix = b""
        self._views: list[RedisStore] = []  # torch's C++ may hold a clone: it lives as long as this does
        self.set_timeout(timedelta(seconds=_seconds_of(timeout)))
        _alive.add(self)

    def __repr__(self) -> str:
        return f"RedisStore({self._keys.base!r} at {self._connection.name})"

    def close(self) -> None:
        """Release this object and its views: they may be collected once nothing in Python refers to them.

        The stored data stays; Redis forgets what it keeps to recognize repeated requests of this object.
        """
        self._release()
        if self._opened:
            self._connection.close()

    def _release(self) -> None:
        _alive.discard(self)
        if self._epoch is None:  # what is kept for a round's store is gone within minutes, and its nodes are in a hurry
            self._forget_senders()
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
        view._prefix = self._prefix + _bytes("prefix", prefix) + (b"/" if prefix else b"")
        self._views.append(view)
        return view

    # -- reading and writing

    def set(self, key: Text, value: Text) -> None:
        """Write a value.

        Raises:
            DistStoreError: a process group begins on this store, which has the addresses of an earlier group, such as
                one of an earlier start of the job: the processes would find its keys. A round's store has none.
        """
        full, encoded = self._key(key), _bytes("value", value)
        if self._epoch is not None or b"//" not in full or not _OF_FIRST_GROUP.search(full):
            self._once(scripts.STORE_SET, [self._streams + full], [full, encoded])
        elif self._once(scripts.STORE_COMPARE_SET, [self._streams + full], [full, b"", encoded]) != encoded:
            raise dist.DistStoreError(
                f"{self!r} has the addresses of an earlier process group, such as one of an earlier start of this job "
                f"(the key {text(full)!r}): give each start a run id or a store name of its own, or delete the key "
                f"{self._keys.base!r} in Redis before the start."
            )

    def multi_set(self, keys: Sequence[Text], values: Sequence[Text]) -> None:
        """Write several values at once."""
        if len(keys) != len(values):
            raise ValueError(f"multi_set got {len(keys)} keys and {len(values)} values; give one value for each key.")
        full = self._all(keys)
        if full:
            streams = [self._streams + key for key in full]
            pairs = [word for key, value in zip(full, values, strict=True) for word in (key, _bytes("value", value))]
            if (size := sum(map(len, pairs))) > _LONGEST:
                raise ValueError(f"multi_set takes at most {_LONGEST:,} bytes at once, not {size:,}: split it.")
            self._once(scripts.STORE_SET, streams, pairs)

    def get(self, key: Text) -> bytes:
        """Read a value; block until it is set.

        Raises:
            DistStoreError: it was not set within ``timeout``.
            RoundBrokenError: it can no longer be set, because the store's round is broken.
        """
        full, started = self._key(key), time.monotonic()
        command = b"HGET", self._data, full
        value: bytes | None = self._ask(command)[0]
        while value is None:
            seconds = self._seconds()
            value = self._block([full], "get", started, seconds)
            if value is None:
                value = self._ask(command, timeout=started + seconds - time.monotonic())[0]
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
        """Add bytes to the end of a value, empty at first.

        Redis copies the whole value, and serves nobody meanwhile: some 30 ms for each MiB.

        Raises:
            ValueError: the value would have more than 16 MiB; nothing was changed.
        """
        full = self._key(key)
        try:
            self._once(scripts.STORE_APPEND, [self._streams + full], [full, _bytes("value", value)])
        except dist.DistStoreError as e:
            if found := re.search("TOO_LONG ([0-9]+)", str(e.__cause__)):
                raise ValueError(
                    f"Cannot append to the key {full!r}: its value would have {int(found[1]):,} bytes, and at most "
                    f"{2**24:,} are allowed. Use several keys, or a queue."
                ) from e
            raise

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
            return bool(self._script(script, names, args)[0] == 0)
        key, queue = full[0], self._keys.queue(full[0])
        both = (b"HEXISTS", self._data, key), (b"EXISTS", queue)  # a script takes a fifth longer
        return any(self._ask(*both, keys=[queue]))

    def wait(self, keys: Sequence[Text], timeout: timedelta | float | None = None) -> None:
        """Block until all keys are set. Raises like :meth:`get`."""
        full, started = self._all(keys), time.monotonic()
        seconds = self._seconds if timeout is None else partial(_seconds_of, timeout)
        if len(full) != 1 or not self._ask((b"HEXISTS", self._data, full[0]), timeout=seconds)[0]:
            self._block(full, "wait", started, seconds())

    def barrier(self, key: Text, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Block until ``world_size`` callers have reached the barrier ``key``; raises like :meth:`get`.

        In two round trips, with one wake-up for all. Torch's ``PrefixStore`` takes three, with the same keys.
        """
        started, full = time.monotonic(), self._key(key)
        count, last = full + b"/num_members", full + b"/last_member"
        stream = self._streams + last
        callers, seconds = b"%d" % index(world_size), self._seconds() if timeout is None else _seconds_of(timeout)
        sender = self._borrowed_sender()
        try:
            sender.request += 1
            args = self._args_of(sender, [count, last, callers])
            request = scripts.STORE_BARRIER, [sender.dedup, self._wake, self._streams + count, stream], args
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
        return int(self._ask((b"HLEN", self._data))[0])

    def list_keys(self) -> list[str]:
        """The names of all keys."""
        keys: list[bytes] = self._ask((b"HKEYS", self._data))[0]
        n = len(self._prefix)
        return [key[n:].decode("utf-8", "surrogateescape") for key in keys if key.startswith(self._prefix)]

    # -- queues

    def queue_push(self, key: Text, value: Text) -> None:
        """Append an item to a queue."""
        full = self._key(key)
        keys = [self._streams + full, self._keys.queue(full), self._keys.poppers(full)]
        popper = self._once(scripts.QUEUE_PUSH, keys, [full, _bytes("value", value)])
        if popper is not None:
            stream = self._keys.popper(popper)
            wake_up = (b"XADD", stream, b"MAXLEN", b"1", b"*", b"set", b"1"), (b"PEXPIRE", stream, b"60000")
            with contextlib.suppress(RedelasticError):  # whoever waits looks again soon in any case
                self._connection.exchange(*wake_up, timeout=0)

    def queue_pop(self, key: Text, block: bool = True) -> bytes:
        """Remove and return the first item of a queue.

        Raises:
            QueueEmptyError: there is none, and ``block`` is False.
            DistStoreError: there was none within ``timeout``.
        """
        sender = self._borrowed_sender()
        try:
            return self._pop(self._key(key), sender, block=block)
        finally:
            self._senders.append(sender)

    def _pop(self, key: bytes, sender: Sender, *, block: bool) -> bytes:
        started, seconds = time.monotonic(), self._seconds()
        stream, arrival = self._keys.popper(sender.name), b""
        keys = [self._keys.queue(key), sender.reply, self._keys.poppers(key), stream, self._wake]
        while True:
            left = started + seconds - time.monotonic() if block else 0
            longest = min(left, self._connection.max_block, LONGEST_BLOCK)
            args = [sender.name, arrival, b"%d" % max(0, round(1000 * longest))]
            reply = self._numbered(sender, scripts.QUEUE_POP, keys, args)
            if reply[0] == 1:
                return self._arrived(reply[1], sender)
            if reply[0] < 0:
                raise self._broken(reply[1], [key])
            if not block:
                raise dist.QueueEmptyError(f"The queue {key!r} is empty.")
            if reply[0] == 0:
                raise self._timed_out(seconds, [key])
            _, after, wake_after, arrival = reply
            self._read_stream(stream, after, wake_after, left, longest)

    def _arrived(self, item: bytes, sender: Sender) -> bytes:
        """Have Redis forget a long item that has arrived."""
        if len(item) > KEPT_APART and self._connection.is_up:
            with contextlib.suppress(RedelasticError):  # Redis forgets it in any case, in some minutes
                self._connection.exchange((b"DEL", sender.reply), timeout=0)
        return item

    def queue_len(self, key: Text) -> int:
        """The number of items in a queue."""
        queue = self._keys.queue(self._key(key))
        return int(self._ask((b"LLEN", queue), keys=[queue])[0])

    # -- under the names that torch's C++ calls

    def has_extended_api(self) -> bool:
        """Append, multi_get and multi_set are single calls."""
        return True

    deleteKey = delete_key  # noqa: N815
    getNumKeys = num_keys  # noqa: N815

    # -- below

    def _key(self, key: Text) -> bytes:
        return self._prefix + _bytes("key", key)

    def _read(self, keys: list[bytes], timeout: float) -> list[Any]:
        return self._ask((b"HMGET", self._data, *keys), timeout=timeout)[0] if keys else []

    def _all(self, keys: Sequence[Text]) -> list[bytes]:
        if isinstance(keys, str | bytes):
            raise TypeError(f"Give a list of keys, not the single key {keys!r}.")
        if len(keys) > MOST_KEYS:  # Redis before 7 would hang up
            raise ValueError(f"A call takes at most {MOST_KEYS:,} keys, not {len(keys):,}: split it.")
        prefix = self._prefix
        return [prefix + _bytes("key", key) for key in keys]

    def _look(self, keys: list[bytes], asked: Literal["get", "wait", "check"]) -> Request:
        """The request that finds out whether all keys are there."""
        both = [name for key in keys for name in (self._streams + key, self._keys.queue(key))]
        return scripts.STORE_WAIT, [self._wake, *both], [*self._first_args, asked.encode(), *keys]

    def _block(self, keys: list[bytes], asked: Literal["get", "wait"], started: float, timeout: float) -> bytes | None:
        """Block until all keys are there, for ``timeout`` seconds after ``started`` on the monotonic clock.

        Returns:
            The value that a single key was set to, if the wake-up carried it.
        """
        wake_up = self._await(keys, self._look(keys, asked), started, timeout)
        return wake_up[1] if wake_up and wake_up[0] == b"value" else None

    def _await(self, keys: list[bytes], request: Request, started: float, timeout: float) -> Sequence[bytes] | None:
        """As :meth:`_block`, by a request with the reply of ``lua/store_wait.lua``.

        Returns:
            The wake-up of a single key: 'value' and the key's value, or 'set' and 1 (``lua/store_write.lua``).
        """
        script, names, args = request
        deadline = started + timeout
        while keys:
            reply = self._script(script, names, args, deadline - time.monotonic())
            if reply[0] == 0:
                break
            if reply[0] < 0:
                raise self._broken(reply[1], keys)
            index, after, wake_after = reply
            stream, left = self._streams + keys[index - 1], deadline - time.monotonic()
            if left <= 0:
                raise self._timed_out(timeout, keys)
            entries = self._read_stream(stream, after, wake_after, left)
            if entries and len(keys) == 1:
                wake_up: Sequence[bytes] = entries[-1][1]
                return wake_up
        return None

    def _broken(self, why: bytes, keys: list[bytes]) -> RoundBrokenError:
        shown = sanitize(cause(decode_cause(text(why)))) or "the run went on"
        return RoundBrokenError(
            f"Round {self._epoch} of run {self._run.run_id!r} is broken ({shown}); "
            f"the keys {_listed(keys)} will not be set any more. Join the next round."
        )

    def _timed_out(self, timeout: float, keys: list[bytes]) -> dist.DistStoreError:
        limit = round(1000 * timeout)  # as in TCPStore's error; the time that has passed depends on Redis
        shown = _listed([b"/" + key for key in keys])  # as TCPStore names a key
        return dist.DistStoreError(f"wait timeout after {limit}ms, keys: {shown} of {self!r}")

    def _read_stream(
        self, stream: bytes, after: bytes, wake_after: bytes, seconds: float, longest: float | None = None
    ) -> Sequence[Any]:
        """Block until a wake-up stream, or the run's, has an entry after an id, for ``longest`` if that is less."""
        longest = min(seconds, self._connection.max_block) if longest is None else longest
        block = b"%d" % max(1, round(1000 * longest))
        streams = (stream, after) if self._epoch is None else (stream, self._wake, after, wake_after)
        read = self._ask((b"XREAD", b"BLOCK", block, b"STREAMS", *streams), keys=[stream], timeout=seconds)[0]
        entries: Sequence[Any] = dict(read or ()).get(stream, ())
        return entries


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
    if len(value) > _LONGEST:  # Redis would close the connection without a reason
        raise ValueError(f"A {what} of a store must have at most {_LONGEST:,} bytes, not {len(value):,}: split it.")
    return value


def _listed(keys: list[bytes]) -> str:
    shown = ", ".join(text(key) for key in keys[:8])
    return shown + (f", … ({len(keys)} in all)" if len(keys) > 8 else "")
