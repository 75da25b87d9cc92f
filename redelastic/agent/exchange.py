"""Exchanges between agents through the round's store: their workers' roles, and that their workers have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, DistNetworkError, DistStoreError

from redelastic.rendezvous.keeper import RETRY_PAUSE
from redelastic.store import RedisStore, RoundBrokenError

log = logging.getLogger(__name__)

RESEND_INTERVAL: Final = 2.0  # between checks that sent values are still there, in seconds
ENDS_TIMEOUT: Final = timedelta(seconds=1)  # of one wait for the other nodes' ends


class RoleExchange:
    """A round's store for torch's exchange of roles, which resends values that a failover has lost.

    torch's agent sends each value only once: if it is lost, all nodes wait out the store's timeout, and exit. So a
    waiting node resends its own values if they were lost. Rank 0 moves on while the others still wait for its values,
    so it resends them in a thread, for as long as the others may wait.
    """

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._reader = store.clone()  # its reads end early: a value may be lost before it is read
        self._reader.set_timeout(min(store.timeout, timedelta(seconds=RESEND_INTERVAL)))
        self._sent: dict[str, bytes | str] = {}
        self._over = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        """Send one value."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Send several values."""
        self._sent.update(zip(keys, values, strict=True))
        self._store.multi_set(keys, values)

    def get(self, key: str) -> bytes:
        """Wait for another node's value."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all nodes' values.

        Raises:
            DistNetworkError: Redis was away for longer than the store's timeout.
            DistStoreError: they did not arrive within the store's timeout.
            RoundBrokenError: they can no longer arrive.
        """
        limit = self._store.timeout.total_seconds()
        started = time.monotonic()
        while True:
            try:
                return self._reader.multi_get(keys)
            except RoundBrokenError:
                raise
            except DistStoreError as e:  # not yet
                if time.monotonic() - started >= limit:
                    raise DistStoreError(f"Not all agents reported within {limit:g} s; the last {e}") from e
            except DistNetworkError:
                if time.monotonic() - started >= limit:
                    raise
            self._resend_lost()

    def _resend_lost(self) -> None:
        # A promoted replica has a prefix of its master's writes: if it has the last value sent, it has them all.
        if not self._store.check(list(self._sent)[-1:]):
            self._store.multi_set(list(self._sent), list(self._sent.values()))

    def keep_resending(self) -> None:
        """Resend lost values for as long as the other nodes may wait, or until :meth:`close`."""
        threading.Thread(target=self._keep_resending, name="redelastic-roles", daemon=True).start()

    def _keep_resending(self) -> None:
        until = time.monotonic() + self._store.timeout.total_seconds()
        with contextlib.suppress(DistError):  # the round is broken, or Redis is away for longer than the nodes wait
            while not self._over.wait(RESEND_INTERVAL) and time.monotonic() < until:
                self._resend_lost()

    def close(self) -> None:
        """Stop :meth:`keep_resending`: there is a new round."""
        self._over.set()


class EndExchange:
    """Waits, in a thread, until the workers of all nodes of a round have ended with 0.

    The thread keeps writing that this node's workers have ended, in case the server has lost it, until :attr:`done`,
    the round is broken, or :meth:`close` is called.

    Args:
        store: of the round.
        rank: of this node.
        size: number of nodes.
        is_patient: whether to keep trying while Redis is away, or refuses writes.
        notify: called when it is done.

    Attributes:
        done: whether all have ended, or Redis was away for so long that it cannot be known.
    """

    def __init__(
        self, store: RedisStore, rank: int, size: int, *, is_patient: Callable[[], bool], notify: Callable[[], None]
    ) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._is_patient, self._notify = is_patient, notify
        self._over = threading.Event()
        self.done = False

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._learn, name="redelastic-ends", daemon=True).start()

    def close(self) -> None:
        """Stop it."""
        self._over.set()

    def _learn(self) -> None:
        ended = [f"redelastic/exit/{r}" for r in range(self._size)]
        awaited = ended if self._rank == 0 else ["redelastic/exited"]
        while not (self.done or self._over.is_set()):
            try:
                self._store.set(ended[self._rank], b"")
                if _wait(self._store, awaited):
                    if self._rank == 0:
                        self._store.set("redelastic/exited", b"")
                    self.done = True
            except RoundBrokenError:  # noqa: PERF203  # this node regroups with the others
                return
            except DistNetworkError as e:
                if not self._is_patient():
                    log.warning(
                        "This node's workers have finished; whether the other nodes' workers have is unknown: %s", e
                    )
                    self.done = True
                self._over.wait(RETRY_PAUSE)  # Redis may refuse at once
        self._notify()


def _wait(store: RedisStore, keys: list[str]) -> bool:
    try:
        store.wait(keys, ENDS_TIMEOUT)
    except RoundBrokenError:
        raise
    except DistStoreError:  # not yet
        return False
    return True
