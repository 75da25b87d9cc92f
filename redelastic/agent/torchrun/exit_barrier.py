"""The exit barrier: a node whose workers have ended waits for those of the other nodes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Final

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from redelastic.rendezvous.heartbeat import RETRY_PAUSE
from redelastic.store import RedisStore, RoundBrokenError

log = logging.getLogger(__name__)

LOOK: Final = timedelta(seconds=1)  # how long one wait lasts


def wait_for_others(
    store: RedisStore,
    rank: int,
    size: int,
    timeout: float,
    *,
    each_second: Callable[[], None],
    is_patient: Callable[[], bool],
) -> None:
    """Return when the workers of all nodes have ended, or waiting for them is no longer possible.

    Each node keeps repeating that its workers have ended, in case the server has lost it.

    Args:
        store: of the round.
        rank: of this node.
        size: number of nodes.
        timeout: how long to wait, in seconds.
        each_second: called about once a second; an exception from it ends the wait.
        is_patient: whether to keep waiting while Redis is away, or refuses writes.
    """
    ended = [f"redelastic/exit/{r}" for r in range(size)]
    awaited = ended if rank == 0 else ["redelastic/exited"]
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            each_second()
            try:
                store.set(ended[rank], b"")
                if _wait(store, awaited):
                    if rank == 0:
                        store.set("redelastic/exited", b"")
                    return
            except DistNetworkError:
                if not is_patient():
                    raise
                time.sleep(RETRY_PAUSE)  # Redis may refuse at once
        log.warning("Other nodes have not finished within %g s; this one exits anyway.", timeout)
    except RoundBrokenError as e:
        each_second()  # which may know why
        log.warning("This node's workers have finished; the others must go on without it: %s", e)
    except (RendezvousConnectionError, DistNetworkError) as e:
        log.warning("This node's workers have finished; whether the others have is unknown: %s", e)


def _wait(store: RedisStore, keys: list[str]) -> bool:
    try:
        store.wait(keys, LOOK)
    except RoundBrokenError:
        raise
    except DistStoreError:  # not yet
        return False
    return True
