"""Polling for states of other processes and threads that nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_SHORTEST, _LONGEST = 0.005, 0.03  # pauses between two looks, in seconds
_GROWTH = 1.1  # from one pause to the next


@dataclass(frozen=True)
class Within:
    """Polls until a condition holds; fails after so many seconds."""

    seconds: float

    def __call__(
        self, condition: Callable[[], Any], what: str = "the condition holds", seconds: float | None = None
    ) -> Any:
        """Wait until the condition is true; returns its value."""
        limit = self.seconds if seconds is None else seconds
        deadline, pause = time.monotonic() + limit, _SHORTEST
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
            time.sleep(pause)
            pause = min(_LONGEST, pause * _GROWTH)
        return value
