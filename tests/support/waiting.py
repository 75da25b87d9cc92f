"""Polling for states of other processes and threads that nothing announces."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Within:
    """Polls until a condition holds; fails after so many seconds."""

    seconds: float

    def __call__(
        self, condition: Callable[[], Any], what: str = "the condition holds", seconds: float | None = None
    ) -> Any:
        """Wait until the condition is true; returns its value."""
        limit = self.seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
            time.sleep(0.005)
        return value
