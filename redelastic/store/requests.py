"""A store's requests to Redis, numbered where they must take effect once, and their errors."""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from redelastic.redis.connection import Connection, Timeout, require_keys_of_types, text
from redelastic.redis.errors import CorruptStateError, FencedError, RedelasticError, UnavailableError
from redelastic.redis.keys import RunKeys, StoreKeys
from redelastic.redis.scripts import Script
from redelastic.redis.sockets import Command


class RoundBrokenError(dist.DistStoreError):
    """A wait on a round's store can no longer succeed: a member is gone, or a later round is complete (I7)."""


class Requests(dist.Store):
    """Sends a store's requests; the base of :class:`RedisStore`.

    Args:
        connection: to Redis.
        run, keys: names of the keys of the run, and of the store.
        epoch: of the round that the store belongs to, if any.
        ttl: how long the store outlives its last change, in seconds.
    """

    timeout: timedelta  # an attribute of torch's, which its type stubs lack

    def __init__(self, connection: Connection, run: RunKeys, keys: StoreKeys, epoch: int | None, ttl: float) -> None:
        super().__init__()
        self._connection, self._run, self._keys, self._epoch, self._ttl = connection, run, keys, epoch, ttl
        self._wake, self._data, self._streams = run.wake.encode(), keys.data.encode(), keys.streams
        self._fixed_keys = run.of_store(keys)
        self._first_keys = [key.encode() for key in self._fixed_keys]
        self._first_args = [b"" if epoch is None else b"%d" % epoch, b"%d" % round(1000 * ttl)]
        self._senders: deque[_Sender] = deque()

    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    def _once(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """Run a script that takes effect once, however often it is sent."""
        sender = self._borrowed_sender()
        try:
            return self._script(script, keys, [sender.name, b"%d" % sender.request, *args])
        finally:
            self._senders.append(sender)

    def _borrowed_sender(self) -> _Sender:
        """A sender that no other thread uses now, with the number of its next request."""
        try:
            sender = self._senders.pop()
        except IndexError:
            sender = _Sender()
        if sender.pid != os.getpid():  # a forked child must not continue its parent's numbers
            sender = _Sender()
        sender.request += 1
        return sender

    def _script(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes], timeout: Timeout = None) -> Any:
        """Run a script that has the same effect when it is repeated; returns its reply."""
        seconds = self._seconds if timeout is None else timeout
        try:
            return script(self._connection, [*self._first_keys, *keys], [*self._first_args, *args], seconds)
        except RedelasticError as e:
            raise self._to_torch_error(e, keys) from e

    def _ask(self, *commands: Command, keys: Sequence[bytes] = (), timeout: Timeout = None) -> list[Any]:
        """Send commands that have the same effect when they are repeated.

        Args:
            commands: what to send.
            keys: of this request, for an error's text.
            timeout: for how long to retry, in seconds; None for the store's.

        Returns:
            Their replies.
        """
        seconds = self._seconds if timeout is None else timeout
        try:
            return self._connection.exchange(*commands, timeout=seconds)
        except RedelasticError as e:
            raise self._to_torch_error(e, keys) from e

    def _to_torch_error(self, error: RedelasticError, keys: Sequence[bytes]) -> Exception:
        """The error that torch's own stores would raise."""
        if isinstance(error, UnavailableError):
            return dist.DistNetworkError(str(error))
        if isinstance(error, CorruptStateError):
            return dist.DistStoreError(f"{self!r}: {self._naming_the_key(error, keys)}")
        return (RoundBrokenError if isinstance(error, FencedError) else dist.DistStoreError)(f"{self!r}: {error}")

    def _naming_the_key(self, error: CorruptStateError, keys: Sequence[bytes]) -> RedelasticError:
        fixed = dict(zip(self._fixed_keys, ("hash", "hash", "hash", "hash", "set"), strict=True))
        queues = self._keys.queues
        own = {text(key): "list" if key.startswith(queues) else "stream" for key in keys}
        try:
            require_keys_of_types(self._connection, fixed | own, error)
        except RedelasticError as named:
            return named


class _Sender:
    """Sends requests one after the other, and numbers them, so that Redis recognizes a repeated one.

    Each call borrows one: a sender cannot belong to a thread, since torch's threads are new to Python at each call.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = uuid.uuid4().bytes
        self.request = 0
