"""Hangs: which workers of this node hang, and where; and which have never reported progress."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.distributed.elastic.agent.server.api import RunResult, Worker

from redelastic.monitoring.collectives import LastCollectives, may_wait
from redelastic.monitoring.events import MAX_TEXT, Collectives, Event, Failed, Unwatched
from redelastic.monitoring.sentences import sentence

from .blame import failed_alive
from .group import Workers
from .stacks import merged

log = logging.getLogger(__name__)


class Hangs:
    """Finds hangs in one group of workers after another, and reports them.

    A worker hangs if it has called ``progress`` before, in this round or an earlier one of this agent, and no longer
    does. One that never has may hang, or run a script that does not report: it gets one warning, and is left alone.

    Args:
        note: records an event of this node.
    """

    def __init__(self, note: Callable[[Event], None]) -> None:
        self._note = note
        self._has_warned = False

    def find(self, workers: Workers, group: Sequence[Worker]) -> RunResult | None:
        """Look at the workers; returns the failure of the hung workers, or None.

        Args:
            workers: the running ones.
            group: torch's, by local rank.
        """
        hung, silent = workers.find_hung()
        if silent and not self._has_warned:
            self._has_warned = True
            quiet = [group[local_rank] for local_rank in silent]
            # Stacks may take a while, and the agent's loop does not need them.
            threading.Thread(target=self._warn, args=(workers, quiet), name="redelastic-silent", daemon=True).start()
        if not hung:
            return None
        last = self.explain(workers)
        waits = {worker.local_rank: may_wait(last.get(worker.global_rank, ())) for worker in group}
        hung = workers.find_awaited(waits)
        stacks = workers.stacks(hung)
        for local_rank in hung:
            rank, where = group[local_rank].global_rank, stacks[local_rank]
            log.error("Stacks of worker %s (rank %s), which hangs:\n%s", local_rank, rank, where)
        self._note(replace(workers.hang(group[hung[0]]), hung=len(hung), stacks=merged(stacks, MAX_TEXT)))
        others = group[0].world_size > len(group)
        described = {r: workers.hang(group[r]).of_worker() for r in hung}
        return failed_alive({group[r]: Failed(**how, follows=others and waits[r]) for r, how in described.items()})

    def explain(self, workers: Workers) -> LastCollectives:
        """Report the last collectives of workers that make no progress, before they are ended; once in a round.

        The nodes stop making progress together. The first one that finds a hang ends the round, and only the
        collectives of all of them show which rank the others wait for.

        Returns:
            The collectives, by rank; empty if they have been reported before.
        """
        if last := workers.collectives_of_stalled():
            event = Collectives(last=last)
            log.error("The last collectives of this node's workers: %s.", sentence(event))
            self._note(event)
        return last

    def _warn(self, workers: Workers, silent: Sequence[Worker]) -> None:
        """Warn that workers have never reported; runs in a thread of its own."""
        stacks = workers.stacks([worker.local_rank for worker in silent])
        ranks = tuple(str(worker.global_rank) for worker in silent)
        waited_ms = round(1000 * workers.start_timeout)
        event = Unwatched(ranks=ranks, waited_ms=waited_ms, stacks=stacks[silent[0].local_rank])
        for worker in silent:
            local_rank, rank = worker.local_rank, worker.global_rank
            log.warning("Stacks of worker %s (rank %s):\n%s", local_rank, rank, stacks[local_rank])
        log.warning("This node's workers %s.", sentence(event))
        self._note(event)
