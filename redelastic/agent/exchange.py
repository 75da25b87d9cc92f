"""What agents tell each other through the round's store when their workers have ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch.distributed import DistNetworkError, DistStoreError

from redelastic.rendezvous.keeper import RETRY_PAUSE
from redelastic.store import RedisStore, RoundBrokenError

log = logging.getLogger(__name__)

ENDS_TIMEOUT: Final = timedelta(seconds=1)  # of one wait for the other nodes' ends


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
                self._store.wait(awaited, ENDS_TIMEOUT)
                if self._rank == 0:
                    self._store.set("redelastic/exited", b"")
                self.done = True
            except RoundBrokenError:  # noqa: PERF203  # this node regroups with the others
                return
            except DistStoreError:
                pass  # they have not ended yet
            except DistNetworkError as e:
                if not self._is_patient():
                    log.warning(
                        "This node's workers have finished; whether the other nodes' workers have is unknown: %s", e
                    )
                    self.done = True
                self._over.wait(RETRY_PAUSE)  # Redis may refuse at once
        self._notify()
