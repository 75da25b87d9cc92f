"""Drains: the workers of the whole job save, then the node that drains leaves."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from redelastic.agent.courier import Courier
from redelastic.rendezvous.membership import DrainedError, Membership
from redelastic.store import RedisStore, RoundBrokenError

from .group import Workers

log = logging.getLogger(__name__)

SOON: Final = 0.01  # in seconds


class Drains:
    """The drains of one round, from the side of one of its nodes.

    The nodes meet in the round's store: each adds one to the drain's key when its workers have saved. The node that
    drains leaves when all have, or the time is up, or the round is broken anyway.

    Args:
        membership: of this node.
        workers: of this node.
        store: of the round.
        size: number of nodes in the round.
        courier: which asks the store in the background.
        note: tells people: an event and its reason.
    """

    def __init__(
        self,
        membership: Membership,
        workers: Workers,
        *,
        store: RedisStore,
        size: int,
        courier: Courier,
        note: Callable[[str, str], None],
    ) -> None:
        self._membership, self._workers, self._store, self._size = membership, workers, store, size
        self._courier, self._note = courier, note
        self._began = -math.inf  # when the last drain was heard of, on the monotonic clock
        self._until: dict[str, float] = {}  # node -> when its drain's time is up, on the monotonic clock
        self._told: set[str] = set()  # nodes whose drain does not wait for us any more
        self._saved = 0  # how many nodes have saved for our own drain
        self._counting = False  # whether the courier is about to ask for that

    @property
    def own(self) -> bool:
        """Whether this node drains."""
        return self._membership.node in self._until

    @property
    def pause(self) -> float:
        """After how many seconds to advance again: at first as soon as workers may have saved, later less often."""
        return max(SOON, (time.monotonic() - self._began) / 10)

    def advance(self) -> None:
        """Take each drain a step further; called at each look at the workers, and as often as :attr:`pause` says.

        Raises:
            DrainedError: this node has drained.
        """
        for drain in self._membership.view.drains:
            if drain.node not in self._until:
                log.warning(
                    "Node %s drains (%s): the workers may save for %g s.", *(drain.node, drain.reason, drain.timeout)
                )
                self._began = time.monotonic()
                self._until[drain.node] = self._began + drain.timeout
                self._workers.ask_to_save()
            over = time.monotonic() >= self._until[drain.node]
            if drain.node not in self._told and (over or self._workers.have_saved()):
                self._told.add(drain.node)
                self._note("saved", f"{'not in time ' if over else ''}for {drain.node}, which drains")
                self._courier.send(partial(self._add, _key(drain.node), 1))
            if drain.node == self._membership.node:
                saved = self._size if self._size == 1 and drain.node in self._told else self._saved
                if over or self._membership.view.nodes_waiting > 0 or saved >= self._size:
                    raise DrainedError(drain.node, self._membership.run_id, drain.reason)
                if not self._counting:  # while Redis is away that takes long
                    self._counting = True
                    self._courier.send(self._count)

    def _count(self) -> None:
        try:
            self._saved = self._add(_key(self._membership.node), 0)
        finally:
            self._counting = False

    def _add(self, key: str, amount: int) -> int:
        try:
            return self._store.add(key, amount)
        except RoundBrokenError:  # the members regroup: nobody waits for this
            return 0


def _key(node: str) -> str:
    return f"redelastic/saved/{node}"
