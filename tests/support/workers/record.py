"""The record of a job's workers: a line of JSON for each thing that a worker does."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


class Recorder:
    """Appends lines to `record.jsonl`, each in one write, so that the lines of several workers stay whole."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / "record.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._worker = {
            "node": os.environ["TEST_NODE"],
            "pid": os.getpid(),
            "epoch": int(os.environ["REDELASTIC_EPOCH"]),
            "rank": int(os.environ["RANK"]),
            "world": int(os.environ["WORLD_SIZE"]),
            "group_rank": int(os.environ["GROUP_RANK"]),
            "restart": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        }

    def __call__(self, event: str, **more: Any) -> None:
        line = {"event": event, "time": time.time(), **self._worker, **more}
        os.write(self._file, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)
