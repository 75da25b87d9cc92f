"""The last collectives of workers, from torch's flight recorder."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final

from redelastic.monitoring.collectives import MAX_WORD, Collective

from .board import ProgressBoard

MAX_BYTES: Final = 16 << 20  # of what one recorder holds; by default some 1 MB
MAX_COLLECTIVES: Final = 64  # of all workers of a node, in each process group
EACH: Final = 4  # of one worker, in each process group
GROUPS: Final = 3  # process groups of one worker
POLL_INTERVAL: Final = 0.02  # in seconds
# Operations whose input has the same shape on all ranks.
ALIKE: Final = frozenset({"all_reduce", "reduce", "broadcast", "_all_gather_base", "_reduce_scatter_base"})


def last_collectives(
    board: ProgressBoard, running: Callable[[], Collection[int]], since: float, timeout: float
) -> dict[int, tuple[Collective, ...] | None]:
    """The last collectives of workers that have reported progress; None for one that does not answer in time.

    Args:
        board: of the workers.
        running: local ranks of the workers that have not ended: these are asked, until they do.
        since: leaves out older collectives, such as those of an earlier round; in seconds since 1970.
        timeout: the longest this may take, in seconds.
    """
    deadline = time.monotonic() + timeout
    found: dict[int, tuple[Collective, ...] | None] = {}
    with contextlib.suppress(ValueError):  # the board is closed: the workers have been replaced meanwhile
        waiting = {local_rank for local_rank in running() if board.read(local_rank).pid}
        each = max(1, min(EACH, MAX_COLLECTIVES // max(1, len(waiting))))
        for local_rank in waiting:
            found[local_rank] = None
            board.ask_for_records(local_rank)
        while waiting and time.monotonic() < deadline:
            for local_rank in waiting.difference(running()):
                waiting.remove(local_rank)
                del found[local_rank]
            for local_rank in list(waiting):
                if (records := board.records(local_rank, MAX_BYTES)) is not None:
                    waiting.remove(local_rank)
                    found[local_rank] = tuple(reduce_records(records, since, each))
            time.sleep(POLL_INTERVAL if waiting else 0)
    return found


def reduce_records(records: bytes, since: float, each: int = EACH) -> Iterator[Collective]:
    """The last collectives of the groups that were used last, and the oldest one that has not ended.

    Args:
        records: a JSON list of flight recorders' documents.
        since: as in :func:`last_collectives`.
        each: how many collectives of each group.
    """
    groups: dict[str, list[Collective]] = {}
    for one in _collectives(json.loads(records), 1e9 * since):
        groups[one.group] = [*groups.pop(one.group, ()), one]  # the group that was used last comes last
    used = sorted(groups.values(), key=lambda own: not all(one.is_done for one in own))[-GROUPS:]
    for own in used:
        unfinished = next((place for place, one in enumerate(own) if not one.is_done), len(own))
        first = max(0, len(own) - each)
        yield from own[unfinished : min(unfinished + 1, first)]
        yield from own[first:]


def _collectives(documents: Iterable[Any], since_ns: float) -> Iterator[Collective]:
    for entry in (entry for document in documents for entry in document.get("entries", ())):
        if entry.get("is_p2p") or entry.get("time_created_ns", 0) < since_ns:
            continue
        name, description = entry["process_group"]
        operation = str(entry["profiling_name"]).rpartition(":")[2]
        inputs = zip(entry["input_dtypes"], entry["input_sizes"], strict=False) if operation in ALIKE else ()
        shape = ", ".join(f"{kind}{size}" for kind, size in inputs)
        is_done = bool(entry.get("retired")) or entry.get("state") == "completed"
        name, description, operation, shape = (str(word)[:MAX_WORD] for word in (name, description, operation, shape))
        yield Collective(name, description, int(entry["collective_seq_id"]), operation, shape, is_done)
