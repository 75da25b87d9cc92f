"""Waiting for what wakes nobody: a state of another process or thread."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Within:
    """Polls until a condition holds, for so many seconds."""

    seconds: float

    def __call__(
        self, condition: Callable[[], Any], what: str = "it never came so far", seconds: float | None = None
    ) -> Any:
        """Wait; returns the condition's value."""
        limit = self.seconds if seconds is None else seconds
        deadline = time.monotonic() + limit
        while not (value := condition()):
            assert time.monotonic() < deadline, f"not within {limit:g} s: {what}"
            time.sleep(0.005)
        return value
