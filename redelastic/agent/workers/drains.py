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
from redelastic.rendezvous.view import Drain
from redelastic.store import RedisStore, RoundBrokenError

from .group import Workers

log = logging.getLogger(__name__)

SOON: Final = 0.01  # in seconds
ANEW: Final = 10.0  # seconds after which another drain has the workers save again: the first has come to nothing
SHOWN: Final = 8  # of the nodes that drain in one round, how many the log names
SAVED: Final = "redelastic/saved"  # in the round's store: how many nodes have saved


class Drains:
    """The drains of one round, from the side of one of its nodes.

    The first drain of a round has all its workers save, and each node counts itself in the round's store when its own
    have. A node that drains leaves when all have, or its time is up, or the round is broken anyway. One save is for all
    that drain in a round, however many: with the first that leaves the round is over, for the others too.

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
        self._began = -math.inf  # when the first drain was heard of, on the monotonic clock
        self._until: dict[str, float] = {}  # node -> when its drain's time is up, on the monotonic clock
        self._asked = -math.inf  # when the workers were last asked to save, on the same clock
        self._told = False  # whether no drain waits for us any more
        self._saved = 0  # how many nodes have saved
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
        drains = self._membership.view.drains
        for drain in drains:
            if drain.node not in self._until:
                self._hear_of(drain)
        if not drains:
            return
        first = drains[0].node
        over = time.monotonic() >= min(self._until.values())
        if not self._told and (over or self._workers.have_saved()):
            self._told = True
            others = f" and {len(drains) - 1} more" if len(drains) > 1 else ""
            self._note(
                "saved", f"{'not in time ' if over else ''}for {first}{others}, which drain{'' if others else 's'}"
            )
            self._courier.send(partial(self._add, 1))
        for drain in drains:
            if drain.node == self._membership.node:
                self._leave_if_done(drain)

    def _hear_of(self, drain: Drain) -> None:
        if len(self._until) < SHOWN or drain.node == self._membership.node:
            log.warning(
                "Node %s drains (%s): the workers may save for %g s.", *(drain.node, drain.reason, drain.timeout)
            )
        elif len(self._until) == SHOWN:
            log.warning("More nodes drain; `redelastic events %s` names them.", self._membership.run_id)
        now = time.monotonic()
        self._began = self._began if self._until else now
        if now - self._asked > ANEW:
            self._asked = now
            self._workers.ask_to_save()
        self._until[drain.node] = now + drain.timeout

    def _leave_if_done(self, drain: Drain) -> None:
        over = time.monotonic() >= self._until[drain.node]
        saved = self._size if self._size == 1 and self._told else self._saved
        if over or self._membership.view.nodes_waiting > 0 or saved >= self._size:
            raise DrainedError(drain.node, self._membership.run_id, drain.reason)
        if not self._counting:  # while Redis is away that takes long
            self._counting = True
            self._courier.send(self._count)

    def _count(self) -> None:
        try:
            self._saved = self._add(0)
        finally:
            self._counting = False

    def _add(self, amount: int) -> int:
        try:
            return self._store.add(SAVED, amount)
        except RoundBrokenError:  # the members regroup: nobody waits for this
            return 0
