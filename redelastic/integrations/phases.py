"""The phase that a trainer is in: all that is not a training step may take longer than ``--hang-timeout``."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar, Final

import redelastic

PHASE_TIMEOUT: Final = 1800.0  # in seconds, as for a worker's first report


class CurrentPhase:
    """The phase that a callback has entered last, and has not left; it outlives the trainer and its callback.

    Args:
        timeout: how long each phase may go without a report of progress, in seconds.
    """

    _entered: ClassVar = ExitStack()

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout

    def enter(self, name: str) -> None:
        """Leave the phase, if there is one, and enter another."""
        self.leave()
        self._entered.enter_context(redelastic.phase(name, timeout=self._timeout))

    def leave(self) -> None:
        """Leave the phase, if there is one: ``--hang-timeout`` counts again."""
        self._entered.close()
