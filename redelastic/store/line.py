"""Writes that nobody waits for: sent at once, in order, and acknowledged later."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from multiprocessing import util
from types import FrameType
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import redis.exceptions as rx
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.redis.client import pack_bytes, receive, send
from redelastic.redis.connection import ATTEMPT_TIMEOUT, Connection
from redelastic.redis.errors import ERRORS, UnreachableError, may_pass
from redelastic.redis.scripts import Call

log = logging.getLogger(__name__)

Limit = float | Callable[[], float]  # in seconds

MOST: Final = 64  # writes under way, before it waits for the first half of them
MOST_BYTES: Final = 2**20  # of values under way, before it waits for all
TRUSTED: Final = 1.0  # how long a connection counts as alive after a reply, in seconds
_PING: Final = pack_bytes([b"PING"])
PATIENCE: Final = 5.0  # of a process that exits or forks, in seconds; then each line has one more attempt


class Write(NamedTuple):
    """A request to run a script.

    Attributes:
        verb: of the store.
        call: of a script.
        keys, args: of this request; the first of ``args`` is the store's key.
        size: of ``args``, in bytes.
    """

    verb: str
    call: Call
    keys: Sequence[bytes]
    args: Sequence[bytes]
    size: int


class WriteFailedError(Exception):
    """A write that nobody waited for has failed; its cause says why.

    Attributes:
        write: the write.
        later: how many were sent after it. None of them was made.
    """

    def __init__(self, write: Write, later: int) -> None:
        super().__init__(write.verb)
        self.write, self.later = write, later


class Line:
    """The writes of one process to one store, on a connection of their own.

    They are numbered without gaps, and Redis makes none whose predecessor it has not made (``lua/store_write.lua``). So
    they are made in order; if the connection is lost, all unacknowledged ones are sent again, and none is made twice;
    and if one fails, so do those that were sent after it.

    A forked child has a line of its own, with nothing under way.

    Args:
        connection: to Redis.

    Attributes:
        under_way: the writes that may not have been made yet, each with its number.
        failure: one that no call has raised yet, since it occurred while the process forked.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.unlock()
        self._begin()
        _lines.add(self)

    def unlock(self) -> None:
        """Unlock in a forked child, which has none of the threads that may have used the line."""
        self._lock = threading.RLock()  # reentrant for a signal handler, which finds the line busy
        self._busy = False

    def _begin(self) -> None:
        self._pid = os.getpid()
        if self._pid not in _settling:
            _settling.add(self._pid)
            util.Finalize(None, _settle_all, exitpriority=100)  # as `atexit`, and in a child of multiprocessing too
        self.under_way: deque[tuple[int, Write]] = deque()
        self.failure: WriteFailedError | None = None
        self._bytes = 0
        self._wire: Any = None  # redis-py's connection
        self._heard = 0.0  # when it last brought a reply, on the monotonic clock
        self._refusal: rx.ResponseError | None = None  # the last reply to the first write under way, if it was an error
        self._sent = 0  # how many of those under way were sent on it
        self._known: set[Call] = set()  # those whose scripts were sent on it
        self._begin_anew()

    def _begin_anew(self) -> None:
        """Become a new sender. A number never sent, because of an interruption, is a gap, and leads here too."""
        self._sender, self._numbers = uuid.uuid4().bytes, count(1)
        self.under_way = deque((next(self._numbers), write) for _, write in self.under_way)

    def send(self, write: Write, timeout: Limit) -> bool:
        """Send a write; raises as :meth:`settle`.

        Args:
            write: what to send.
            timeout: how long it may take while Redis cannot be reached, in seconds.

        Returns:
            Whether the line has taken it. It takes none from a signal handler that interrupts another call.
        """
        held = self._enter(timeout)
        try:
            if held:
                if self.failure is not None:
                    self._tell_of_failure()
                full, heavy = len(self.under_way) >= MOST, self._bytes > MOST_BYTES
                idle = self._wire is not None and time.monotonic() - self._heard > TRUSTED
                if full or heavy or idle:
                    self._call(0 if heavy or idle else MOST // 2, timeout)
                if idle:  # else only the next call, perhaps much later, notices that the connection is gone
                    self._ping()
                self.under_way.append((next(self._numbers), write))
                self._bytes += write.size
                try:
                    if self._wire is not None:
                        self._put()
                except BaseException as e:
                    self._drop()
                    if not isinstance(e, ERRORS):
                        raise
                if self._wire is None:
                    self._call(len(self.under_way), timeout)
            return held
        finally:
            self._leave(held)

    def settle(self, timeout: Limit) -> None:
        """Return when all writes under way have been made.

        Raises:
            WriteFailedError: one of them was refused.
            RendezvousError: Redis could not be reached, or refused us; they are sent again by the next call.
        """
        held = self._enter(timeout)
        try:
            if held:
                self._tell_of_failure()
                if self.under_way:
                    self._call(0, timeout)
        finally:
            self._leave(held)

    def close(self) -> None:
        """Return the connection to its pool; what is under way is given up."""
        held = self._enter(PATIENCE)
        try:
            if held:
                self._drop()
                self.under_way.clear()
                self._bytes = 0
                self._begin_anew()
        finally:
            self._leave(held)

    def _enter(self, timeout: Limit) -> bool:
        """Keep other threads out until :meth:`_leave`; False for a signal handler that interrupts another call.

        Waits for as long as one attempt of another thread may take: that is no outage yet.
        """
        if not self._lock.acquire(False) and not self._lock.acquire(
            timeout=min(threading.TIMEOUT_MAX, max(ATTEMPT_TIMEOUT, timeout() if callable(timeout) else timeout))
        ):
            raise UnreachableError(f"Another thread waits for Redis at {self._connection.name} to take earlier writes.")
        if self._busy and not self._is_in_a_call():  # an exception of a signal handler has left it so
            self._busy, self._lock = False, threading.RLock()
            self._lock.acquire()
            self._drop()
        held, self._busy = not self._busy, True
        if held and self._pid != os.getpid():  # a forked child: all else is its parent's
            self._begin()
        return held

    def _is_in_a_call(self) -> bool:
        """Whether a signal handler in this thread has interrupted a call that goes on once it has returned."""
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001  # of the call that wants to enter
        while frame := frame.f_back if frame else None:
            if frame.f_code in _CALLS and frame.f_locals.get("self") is self:
                return True
        return False

    def _leave(self, held: bool) -> None:
        self._busy = not held
        self._lock.release()

    def _tell_of_failure(self) -> None:
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def _call(self, keep: int, timeout: Limit) -> None:
        try:
            self._connection.call(partial(self._exchange, keep=keep), timeout)
        except RendezvousError as e:
            # Any other error, such as that of a login that is refused now, says nothing about the writes.
            if (refusal := e.__cause__) is self._refusal and refusal is not None and self._is_final(refusal):
                failed = WriteFailedError(self.under_way[0][1], len(self.under_way) - 1)
                self.under_way.clear()
                self._bytes = 0
                self._begin_anew()
                raise failed from e
            raise
        finally:
            self._refusal = None

    def _is_final(self, error: BaseException) -> bool:
        return not may_pass(error, fail_over=self._connection.served)

    def _exchange(self, client: Any, keep: int) -> None:
        """Send what has not been sent on this connection, and read the replies to all but the last ``keep``."""
        while True:
            try:
                if self._wire is None:
                    self._wire, self._heard = client.connection_pool.get_connection(), time.monotonic()
                while self._sent < len(self.under_way):
                    self._put()
                while len(self.under_way) > keep:
                    self._read()
            except rx.ResponseError as e:  # noqa: PERF203  # at most once or twice
                self._drop()
                if "a gap before request" in str(e):  # the server has forgotten what this sender has done
                    self._begin_anew()
                elif not isinstance(e, rx.NoScriptError):
                    raise
            except BaseException:
                self._drop()
                raise
            else:
                return

    def _put(self) -> None:
        number, write = self.under_way[self._sent]
        args = [self._sender, b"%d" % -number, *write.args]
        send(self._wire, write.call.packed(write.keys, args, whole=write.call not in self._known))
        self._known.add(write.call)
        self._sent += 1

    def _ping(self) -> None:
        try:
            send(self._wire, _PING)
            receive(self._wire)
        except BaseException as e:
            if not isinstance(e, rx.ResponseError):  # a refusal is a reply
                self._drop()
            if not isinstance(e, ERRORS):
                raise
        self._heard = time.monotonic()

    def _read(self) -> None:
        try:
            receive(self._wire)
        except rx.ResponseError as e:
            if "a late copy of request" not in str(e):  # else it was made, like a later one, and its reply was lost
                self._refusal = e
                raise
        self._connection.served, self._heard = True, time.monotonic()
        _, write = self.under_way.popleft()  # an interruption after this drops the connection; no number is reused
        self._sent -= 1
        self._bytes -= write.size

    def _drop(self) -> None:
        wire, self._wire, self._sent = self._wire, None, 0
        self._known.clear()
        if wire is not None:
            wire.disconnect()
            client: Any = self._connection.client
            client.connection_pool.release(wire)


_CALLS: Final = {call.__code__ for call in (Line.send, Line.settle, Line.close)}
_lines: Final[WeakSet[Line]] = WeakSet()
_settling: Final[set[int]] = set()  # processes that settle all lines when they exit


def _settle_all() -> None:
    """Make sure that what a process has written is there when it exits, and for the child that it forks."""
    deadline = time.monotonic() + PATIENCE
    for line in list(_lines):
        if line.under_way:
            try:
                line.settle(max(0.0, deadline - time.monotonic()))
            except WriteFailedError as e:
                log.error("A %s to a store has failed: %s", e.write.verb, e.__cause__)  # noqa: TRY400
                line.failure = e
            except RendezvousError as e:
                log.error("Not all writes to a store are known to have been made: %s", e)  # noqa: TRY400


def _unlock_all() -> None:
    for line in list(_lines):
        line.unlock()


os.register_at_fork(before=_settle_all, after_in_child=_unlock_all)
