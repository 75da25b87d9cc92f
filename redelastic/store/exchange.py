"""An exchange of values between the nodes of a round, which survives a failover of Redis."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, DistNetworkError, DistStoreError

from .redis_store import RedisStore
from .requests import RoundBrokenError

RESEND_INTERVAL: Final = 2.0  # between checks that sent values are still there, in seconds


class Exchange:
    """A round's store for an exchange between its nodes, which resends values that a failover has lost.

    A node sends each value only once: if it is lost, all nodes wait out the store's timeout, and exit. So a
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
        threading.Thread(target=self._keep_resending, name="redelastic-resend", daemon=True).start()

    def _keep_resending(self) -> None:
        until = time.monotonic() + self._store.timeout.total_seconds()
        with contextlib.suppress(DistError):  # the round is broken, or Redis is away for longer than the nodes wait
            while not self._over.wait(RESEND_INTERVAL) and time.monotonic() < until:
                self._resend_lost()

    def close(self) -> None:
        """Stop :meth:`keep_resending`: there is a new round."""
        self._over.set()
