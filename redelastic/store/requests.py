"""How a store's requests get to Redis, numbered or as they are, waited for or in line; and their errors."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

from redelastic.redis import scripts
from redelastic.redis.client import DirectClient, pack_bytes, packed_uncopied
from redelastic.redis.connection import Connection, Timeout, require_keys_of_types, text
from redelastic.redis.errors import FencedError
from redelastic.redis.keys import RunKeys, StoreKeys

from .line import Line, Write, WriteFailedError

T = TypeVar("T")
Text = str | bytes
Then = Callable[[], Sequence[bytes]] | None

LARGE: Final = 2**15  # bytes: below this, three copies by a script take less time than a transaction
MOST_QUEUED: Final = 3 * 2**28  # bytes: Redis drops a client whose queue is over client-query-buffer-limit, 2**30


class RoundBrokenError(dist.DistStoreError):
    """A wait on a round's store can no longer succeed: a member is gone, or a later round is complete (I7)."""


class Requests(dist.Store):
    """What a store's verbs are made of.

    Args:
        connection: to Redis.
        run, keys: names of the keys of the run, and of the store.
        epoch: of the round that the store belongs to, if any.
        ttl: how long it outlives its last change, in seconds.
    """

    timeout: timedelta  # torch's own, which its type stubs lack

    def __init__(self, connection: Connection, run: RunKeys, keys: StoreKeys, epoch: int | None, ttl: float) -> None:
        super().__init__()
        self._connection, self._run, self._keys, self._epoch, self._ttl = connection, run, keys, epoch, ttl
        self._line: Line | None = None  # of the writes that are not waited for, if any
        self._wake, self._data = run.wake.encode(), keys.data.encode()
        self._fixed_keys = run.of_store(keys)
        self._fixed_args = ["" if epoch is None else str(epoch), str(round(1000 * ttl))]
        self._calls: dict[scripts.Script, scripts.Call] = {}
        self._senders: deque[_Sender] = deque()

    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    def _set(self, verb: str, keys: list[bytes], pairs: list[bytes], longest: int) -> None:
        first_part = self._keys.streams
        streams = [first_part + key for key in keys]
        if longest >= LARGE and sum(map(len, pairs)) <= MOST_QUEUED and self._transacts():
            self._set_large(keys, streams, pairs)
        else:
            self._write(verb, scripts.STORE_SET, streams, pairs)

    def _transacts(self) -> bool:
        """Whether large values can bypass Lua; a user without that permission sees no error."""
        if not isinstance(self._connection.client, DirectClient):
            return False
        if self._connection.transacts is None:
            self._connection.transacts = self._call(lambda client: client.may_transact())
        return self._connection.transacts

    def _set_large(self, keys: list[bytes], streams: list[bytes], pairs: list[bytes]) -> None:
        """Set them by an HSET between two scripts; see ``lua/store_before.lua``."""
        sender = self._borrowed_sender()
        args = [sender.name, b"%d" % sender.request, *keys]
        commands = [
            self._call_of(scripts.STORE_BEFORE).packed([], args, whole=True),  # its digest may be unknown there
            packed_uncopied([b"HSET", self._data, *pairs], LARGE),
            self._call_of(scripts.STORE_AFTER).packed(streams, args, whole=True),
        ]
        try:
            if self._call(lambda client: client.transact(commands), streams):
                self._connection.served = True
            else:  # the user's rules have changed; if it has had its effect, it has no other under the same number
                self._connection.transacts = False
                self._script(scripts.STORE_SET, streams, [sender.name, b"%d" % sender.request, *pairs], None)
        finally:
            self._senders.append(sender)

    def _write(self, verb: str, script: scripts.Script, keys: Sequence[bytes], args: Sequence[bytes]) -> None:
        """As :meth:`_once`, for a request without a reply, which need not be waited for."""
        if self._line is not None:
            try:
                write = Write(verb, self._call_of(script), keys, args, sum(map(len, args)))
                if self._line.send(write, self._seconds):
                    return
            except (RendezvousError, WriteFailedError) as e:
                raise self._of_earlier_writes(e) from e
        self._once(script, keys, args)

    def _settle(self, timeout: Timeout = None) -> None:
        """Return when all writes that were not waited for have been made."""
        if self._line is not None and (self._line.under_way or self._line.failure):
            try:
                self._line.settle(self._seconds if timeout is None else timeout)
            except (RendezvousError, WriteFailedError) as e:
                raise self._of_earlier_writes(e) from e

    def _of_earlier_writes(self, error: RendezvousError | WriteFailedError) -> Exception:
        if isinstance(error, RendezvousError):
            return self._as_torchs(error, [])
        write, cause = error.write, error.__cause__
        why = self._as_torchs(cause, write.keys) if isinstance(cause, RendezvousError) else dist.DistStoreError(cause)
        later = f", and {error.later} more sent after it were not made" if error.later else ""
        return type(why)(f"An earlier {write.verb} of the key {write.args[0]!r} has failed{later}: {why}")

    def _once(
        self,
        script: scripts.Script,
        keys: Sequence[bytes],
        args: Sequence[bytes],
        timeout: Timeout = None,
        then: Then = None,
    ) -> Any:
        """Run a script that has its effect once, however often it is sent."""
        sender = self._borrowed_sender()
        try:
            return self._script(script, keys, [sender.name, b"%d" % sender.request, *args], timeout, then)
        finally:
            self._senders.append(sender)

    def _borrowed_sender(self) -> _Sender:
        """One that nobody else uses now, with the number of its next request."""
        try:
            sender = self._senders.pop()
        except IndexError:
            sender = _Sender()
        if sender.pid != os.getpid():  # a forked child's requests are not its parent's
            sender = _Sender()
        sender.request += 1
        return sender

    def _script(
        self,
        script: scripts.Script,
        keys: Sequence[bytes],
        args: Sequence[bytes],
        timeout: Timeout,
        then: Then = None,
    ) -> Any:
        if self._line is not None:
            self._settle(timeout)
        limit = self._seconds if timeout is None else timeout
        try:
            return self._call_of(script)(self._connection, keys, args, limit, then)
        except RendezvousError as e:
            raise self._as_torchs(e, keys) from e

    def _call_of(self, script: scripts.Script) -> scripts.Call:
        try:
            return self._calls[script]
        except KeyError:
            call = self._calls[script] = scripts.Call(script, self._fixed_keys, self._fixed_args)
            return call

    def _query(self, *command: bytes, keys: Sequence[bytes] = (), timeout: Timeout = None) -> Any:
        """Run a command that only reads; returns its reply."""
        return self._call(partial(answer, command), keys, timeout)

    def _call(self, operation: Callable[[Any], Any], keys: Sequence[bytes] = (), timeout: Timeout = None) -> Any:
        if self._line is not None:
            self._settle(timeout)
        try:
            return self._connection.call(operation, self._seconds if timeout is None else timeout)
        except RendezvousError as e:
            raise self._as_torchs(e, keys) from e

    def _as_torchs(self, error: RendezvousError, keys: Sequence[bytes]) -> Exception:
        """The error in terms of torch's own stores: its callers catch those, and none of the rendezvous."""
        if isinstance(error, RendezvousConnectionError):
            return dist.DistNetworkError(str(error))
        if isinstance(error, RendezvousStateError):
            return dist.DistStoreError(f"{self!r}: {self._naming_the_key(error, keys)}")
        return (RoundBrokenError if isinstance(error, FencedError) else dist.DistStoreError)(f"{self!r}: {error}")

    def _naming_the_key(self, error: RendezvousStateError, keys: Sequence[bytes]) -> RendezvousError:
        fixed = dict(zip(self._fixed_keys, ("hash", "hash", "hash", "hash", "set"), strict=True))
        queues = self._keys.queues
        own = {text(key): "list" if key.startswith(queues) else "stream" for key in keys}
        try:
            require_keys_of_types(self._connection, fixed | own, error)
        except RendezvousError as named:
            return named


def answer(command: Sequence[bytes], client: Any) -> Any:
    """The reply to a command."""
    if isinstance(client, DirectClient):
        return client.exchange(pack_bytes(command))[0]
    return client.execute_command(text(command[0]), *command[1:])  # redis-py's own Cluster knows no name of bytes


class _Sender:
    """Sends requests one after the other, and numbers them, so that Redis recognizes one that comes again.

    A thread of torch's own is new to Python at each call: senders are lent for one call, not bound to threads.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = uuid.uuid4().bytes
        self.request = 0
