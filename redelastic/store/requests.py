"""How a store's requests get to Redis, numbered or as they are, waited for or in line; and their errors."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

import torch.distributed as dist
from redis.exceptions import NoScriptError, ResponseError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)

from redelastic.redis import scripts
from redelastic.redis.client import WORD, DirectClient, fixed, packed_uncopied
from redelastic.redis.connection import Connection, Timeout, require_keys_of_types, text
from redelastic.redis.errors import ERRORS, FencedError
from redelastic.redis.keys import RunKeys, StoreKeys

from .line import Line, Write, WriteFailedError

T = TypeVar("T")
Text = str | bytes
Request = tuple[scripts.Script, list[bytes], list[bytes]]  # to run a script with these keys and arguments
Told = Sequence[bytes]  # by an entry of a wake-up stream: 'value' and a key's value, or 'set' (store_write.lua)
_SET: Final = (b"set",)

LARGE: Final = 2**15  # bytes: below this, three copies by a script take less time than a transaction
_REGISTERED: Final = b":1\r\n"  # a script's reply when it has registered a caller; its others, and errors, are longer
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
        self._wake, self._data, self._streams = run.wake.encode(), keys.data.encode(), keys.streams
        self._fixed_keys = run.of_store(keys)
        self._fixed_args = ["" if epoch is None else str(epoch), str(round(1000 * ttl))]
        self._woken = b""  # id of the last entry of the run's wake stream, as far as it is known
        self._calls: dict[scripts.Script, scripts.Call] = {}
        self._both: dict[scripts.Script, bytes] = {}  # templates to ask and read together
        self._hget, self._hexists = (b"*3\r\n" + fixed([verb, self._data]) + WORD for verb in (b"HGET", b"HEXISTS"))
        wake = [] if epoch is None else [self._wake]
        first = b"*%d\r\n" % (6 + 2 * len(wake)) + fixed([b"XREAD", b"BLOCK"]) + WORD + fixed([b"STREAMS"])
        self._xread = first + WORD + fixed(wake) + WORD * (1 + len(wake))
        self._senders: deque[_Sender] = deque()

    def _seconds(self) -> float:
        return self.timeout.total_seconds()

    def _set(self, verb: str, keys: list[bytes], pairs: list[bytes], longest: int) -> None:
        first = self._streams
        streams = [first + key for key in keys]
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
                self._script(scripts.STORE_SET, streams, [sender.name, b"%d" % sender.request, *pairs])
        finally:
            self._senders.append(sender)

    def _write(self, verb: str, script: scripts.Script, keys: Sequence[bytes], args: Sequence[bytes]) -> None:
        """As :meth:`_once`, for a request without a reply, which need not be waited for."""
        if self._line is not None:
            try:
                call = self._calls.get(script) or self._call_of(script)
                write = Write(verb, call, keys, args, sum(map(len, args)))
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

    def _once(self, script: scripts.Script, keys: Sequence[bytes], args: Sequence[bytes]) -> Any:
        """Run a script that has its effect once, however often it is sent."""
        sender = self._borrowed_sender()
        try:
            return self._script(script, keys, [sender.name, b"%d" % sender.request, *args])
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
        self, script: scripts.Script, keys: Sequence[bytes], args: Sequence[bytes], timeout: Timeout = None
    ) -> Any:
        """Run a script that has the same effect when it is repeated; returns its reply."""
        call, started, known = self._calls.get(script) or self._call_of(script), time.monotonic(), True
        try:
            reply = self._ask(call.packed(keys, args), keys, timeout)[0]
        except NoScriptError:
            known = False
        if not known:  # outside of the handler, whose error keeps the request, and a large value with it
            limit = self._seconds() if timeout is None else timeout() if callable(timeout) else timeout
            left = limit - (time.monotonic() - started)
            reply = self._ask(call.packed(keys, args, whole=True), keys, left)[0]
        self._connection.served = True
        return reply

    def _call_of(self, script: scripts.Script) -> scripts.Call:
        if script not in self._calls:
            self._calls[script] = scripts.Call(script, self._fixed_keys, self._fixed_args)
        return self._calls[script]

    def _ask(
        self,
        packed: bytes,
        keys: Sequence[bytes] = (),
        timeout: Timeout = None,
        count: int = 1,
    ) -> list[Any]:
        """Send packed commands that have the same effect when they are repeated.

        Args:
            packed: one or more commands, one after the other.
            keys: those of this request, for an error's text.
            timeout: for how long it may be tried again, in seconds; None for the store's.
            count: how many commands.

        Returns:
            Their replies.

        Raises:
            NoScriptError: the server does not know a script.
        """
        if self._line is not None:
            self._settle(timeout)
        connection, started = self._connection, time.monotonic()
        try:
            try:
                return connection.exchange(packed, count)
            except NoScriptError:
                raise
            except ERRORS as error:
                seconds = connection.seconds_left(error, started, self._seconds if timeout is None else timeout)
            return connection.again(partial(connection.exchange, packed, count), started, seconds)
        except RendezvousError as e:
            raise self._as_torchs(e, keys) from e

    def _ask_and_read(self, request: Request, stream: bytes, deadline: float) -> Told | None:
        """Ask for a key that may be missing, and block in the same round trip until it is set.

        Over plain TCP, the process is woken once, by what ends the block: it sleeps through the reply that it has been
        registered.

        Args:
            request: of a script with the reply of ``lua/store_wait.lua``; its last argument is added here.
            stream: the key's wake-up stream. It is read from the beginning, since its last id is not known.
            deadline: on the monotonic clock.

        Returns:
            What the wake-up told. None if the request has to be repeated without the read: the round is broken, there
            were older entries, the time of one read is over, or something has failed.
        """
        if deadline <= time.monotonic() or (self._epoch is not None and not self._woken):
            return None
        if self._line is not None:
            self._settle(deadline - time.monotonic())  # its errors are not this request's
        script, names, args = request
        connection, started = self._connection, time.monotonic()
        template = self._both.get(script) if script in connection.known else None
        block = b"%d" % max(1.0, 1000.0 * min(deadline - started, connection.max_block))
        after = (b"0-0",) if self._epoch is None else (b"0-0", self._woken)
        words: list[int | bytes] = []  # as by `counted`, without a call
        for word in (*names, *args, b"1", block, stream, *after):
            words.append(len(word))
            words.append(word)
        packed = (template or self._template_of_both(request)) % tuple(words)
        try:
            reply, read = connection.exchange(packed, 2, len(_REGISTERED) + 1)
        except ResponseError:  # the repeated request raises it, or sends a script that is unknown there
            return None
        except ERRORS as e:
            try:
                connection.seconds_left(e, started, deadline - started)
            except RendezvousError as final:
                raise self._as_torchs(final, names) from final
            return None
        connection.known.add(script)
        connection.served = True
        if reply != 1:
            return _SET if reply[0] == 0 else None
        entries = dict(read or ()).get(stream)
        told: Told | None = entries[-1][1] if entries else None
        return told if told and told[0] != b"over" else None

    def _template_of_both(self, request: Request) -> bytes:
        """What :meth:`_ask_and_read` sends: with the whole script for a server that may not have it."""
        script, names, args = request
        call, known = self._call_of(script), script in self._connection.known
        self._both[script] = call.template(len(names), len(args) + 1, whole=False) + self._xread
        return self._both[script] if known else call.template(len(names), len(args) + 1, whole=True) + self._xread

    def _call(self, operation: Callable[[Any], Any], keys: Sequence[bytes] = ()) -> Any:
        if self._line is not None:
            self._settle()
        try:
            return self._connection.call(operation, self._seconds)
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


class _Sender:
    """Sends requests one after the other, and numbers them, so that Redis recognizes one that comes again.

    A thread of torch's own is new to Python at each call: senders are lent for one call, not bound to threads.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.name = uuid.uuid4().bytes
        self.request = 0
