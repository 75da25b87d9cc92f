"""Histories: what chaos did and what each node saw, one JSON object a line, by this host's monotonic clock."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class Writer:
    """Appends to a file, each event in one write: the events of a killed process are there."""

    def __init__(self, path: Path, by: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._by = by

    def __call__(self, what: str, **more: Any) -> None:
        event = {"t": time.monotonic(), "by": self._by, "what": what} | more
        os.write(self._file, json.dumps(event).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


class Tail:
    """Reads what was added to a file since the last read."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset = path, 0

    def read(self) -> Iterator[Event]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield json.loads(line)


def read(paths: Iterable[Path]) -> list[Event]:
    """All events of several files, in the order in which they happened."""
    return sorted((event for path in paths for event in Tail(path).read()), key=lambda event: event["t"])
