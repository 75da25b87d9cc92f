"""A store's requests to Redis, numbered where they must take effect once, and their errors."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist

from redelastic.redis.connection import Connection, Timeout, require_keys_of_types, text
from redelastic.redis.errors import CorruptStateError, FencedError, RedelasticError, UnavailableError
from redelastic.redis.keys import RunKeys, StoreKeys
from redelastic.redis.scripts import Script
from redelastic.redis.sockets import Command

# In seconds, for which a copy of a request may still come: Linux gives up sending what nobody confirms after 924 s.
REPEATABLE: Final = 1000.0


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
        self._senders: deque[Sender] = deque()

    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    def _once(self, script: Script, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """Run a script that takes effect once, however often it is sent."""
        sender = self._borrowed_sender()
        try:
            return self._numbered(sender, script, keys, args)
        finally:
            self._senders.append(sender)

    def _numbered(self, sender: Sender, script: Script, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """Run a script as the next request of a sender."""
        sender.request += 1
        return self._script(script, [sender.dedup, *keys], self._args_of(sender, args))

    def _args_of(self, sender: Sender, args: Sequence[bytes]) -> Callable[[], Sequence[bytes]]:
        """The arguments of a script that takes effect once, as each attempt at a request sends them."""
        repeatable = min(max(REPEATABLE, 2 * self._seconds()), self._ttl)
        words = [*self._first_args, b"%d" % sender.request, b"%d" % (1000 * repeatable), *args]

        def of_attempt() -> Sequence[bytes]:
            sender.attempts += 1
            return words

        return of_attempt

    def _borrowed_sender(self) -> Sender:
        """A sender that no other thread uses now."""
        try:
            sender = self._senders.pop()
        except IndexError:
            return Sender(self._keys)
        return (
            sender if sender.pid == os.getpid() else Sender(self._keys)
        )  # a child must not continue its parent's numbers

    def list_sender_keys(self) -> list[bytes]:
        """Names of the keys in which Redis keeps the last effects of this object's idle senders."""
        return [sender.dedup for sender in self._senders]

    def _forget_senders(self) -> None:
        """Have Redis forget the effects of idle senders that never repeated a request: no copy is on its way."""
        keys = []
        while self._senders:
            sender = self._senders.pop()
            if sender.pid == os.getpid() and sender.attempts == sender.request:
                keys.append(sender.dedup)
        if keys and self._connection.sends_once and self._connection.is_up:
            with contextlib.suppress(RedelasticError):
                self._connection.exchange((b"DEL", *keys), timeout=0)

    def _script(
        self,
        script: Script,
        keys: Sequence[bytes],
        args: Sequence[bytes] | Callable[[], Sequence[bytes]],
        timeout: Timeout = None,
    ) -> Any:
        """Run a script that has the same effect when it is repeated; returns its reply."""
        seconds = self._seconds if timeout is None else timeout
        try:
            return script(self._connection, [*self._first_keys, *keys], args, seconds)
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
        fixed = dict(zip(self._fixed_keys, ("hash", "zset", "hash", "set"), strict=True))
        own = {text(key): self._keys.type_of(key) for key in keys if key != self._wake}
        try:
            require_keys_of_types(self._connection, fixed | own, error)
        except RedelasticError as named:
            return named


class Sender:
    """Sends requests one after the other, and numbers them, so that Redis recognizes a repeated one.

    Each call borrows one: a sender cannot belong to a thread, since torch's threads are new to Python at each call.

    Attributes:
        request: number of the last request.
        attempts: how often requests were sent.
        dedup, reply: names of the keys with its effect, and with a long item that it popped.
    """

    def __init__(self, keys: StoreKeys) -> None:
        self.pid = os.getpid()
        self.name = uuid.uuid4().hex.encode()
        self.dedup, self.reply = keys.dedup(self.name), keys.reply(self.name)
        self.request = self.attempts = 0
