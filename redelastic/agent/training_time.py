"""How long a node has trained: its effective training time, which ``/metrics`` reports."""

from __future__ import annotations

import time
from typing import Any


class TrainingTime:
    """Adds up a node's time since its agent began; for use by one thread, now and then."""

    def __init__(self) -> None:
        self._looked_at = time.monotonic()
        self._training = self._whole = 0.0

    def look(self, *, trains: bool) -> None:
        """Attribute the time since the last look to what the node is doing now."""
        now = time.monotonic()
        passed, self._looked_at = now - self._looked_at, now
        self._whole += passed
        self._training += passed if trains else 0.0

    def told(self) -> dict[str, Any]:
        """Both times in seconds, and their ratio if there is one, for the health endpoint."""
        told = {"training_time": self._training, "node_time": self._whole}
        return told | ({"ettr": self._training / self._whole} if self._whole else {})
