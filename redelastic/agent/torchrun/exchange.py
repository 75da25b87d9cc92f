"""What agents tell each other through the round's store: the roles of their workers, and that these have ended."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, DistNetworkError, DistStoreError

from redelastic.rendezvous.heartbeat import RETRY_PAUSE
from redelastic.store import RedisStore, RoundBrokenError

log = logging.getLogger(__name__)

LOOK: Final = 2.0  # between checks that what we sent is still there, in seconds
EXIT_LOOK: Final = timedelta(seconds=1)  # how long one wait for the other nodes' ends lasts


class RoleExchange:
    """The store of a round as torch's agent uses it in the exchange.

    A failover may lose what a node has sent, and torch's agent sends it only once: all would wait out the store's
    timeout, and then exit. So a node that waits resends its own part if it was lost; and rank 0, which moves on while
    the others still wait for it, does so in a thread for as long as they may wait.
    """

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._soon = store.clone()  # its reads end soon: what was there may be lost before it is read
        self._soon.set_timeout(min(store.timeout, timedelta(seconds=LOOK)))
        self._told: dict[str, bytes | str] = {}
        self._over = threading.Event()

    def set(self, key: str, value: bytes | str) -> None:
        """Send one value."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Send several values."""
        self._told.update(zip(keys, values, strict=True))
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
                return self._soon.multi_get(keys)
            except RoundBrokenError:
                raise
            except DistStoreError as e:  # not yet
                if time.monotonic() - started >= limit:
                    raise DistStoreError(f"Not all agents reported within {limit:g} s; the last {e}") from e
            except DistNetworkError:
                if time.monotonic() - started >= limit:
                    raise
            self._tell_again()

    def _tell_again(self) -> None:
        # A promoted replica has a prefix of what its master wrote: all of it, if it has what we sent last.
        if not self._store.check(list(self._told)[-1:]):
            self._store.multi_set(list(self._told), list(self._told.values()))

    def keep_telling(self) -> None:
        """Keep resending for as long as the others may wait, or until :meth:`close`."""
        threading.Thread(target=self._keep_telling, name="redelastic-roles", daemon=True).start()

    def _keep_telling(self) -> None:
        until = time.monotonic() + self._store.timeout.total_seconds()
        with contextlib.suppress(DistError):  # the round is broken, or Redis is away for longer than anyone waits
            while not self._over.wait(LOOK) and time.monotonic() < until:
                self._tell_again()

    def close(self) -> None:
        """Stop :meth:`keep_telling`: there is a new round."""
        self._over.set()


class EndExchange:
    """Learns, in a thread, that the workers of all nodes of a round have ended with 0.

    The thread keeps repeating that this node's have, in case the server has lost it, until it knows, the round is
    broken, or :meth:`close` is called.

    Args:
        store: of the round.
        rank: of this node.
        size: number of nodes.
        is_patient: whether to keep trying while Redis is away, or refuses writes.
        notify: called when it knows.

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
                    log.warning("This node's workers have finished; whether the others have is unknown: %s", e)
                    self.done = True
                self._over.wait(RETRY_PAUSE)  # Redis may refuse at once
        self._notify()


def _wait(store: RedisStore, keys: list[str]) -> bool:
    try:
        store.wait(keys, EXIT_LOOK)
    except RoundBrokenError:
        raise
    except DistStoreError:  # not yet
        return False
    return True
