"""The folders for workers' output: no round overwrites an earlier one's logs, and a torn error file stops nothing."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

COUNT: Final = "TORCHELASTIC_RESTART_COUNT"  # torch names a folder by it


class FolderPerRound(LogsSpecs):
    """Torch's folders, with one of its own for each round.

    Torch deletes the folder of the same number of restarts, which regrouping does not raise: after ``attempt_0`` come
    ``attempt_0.1``, ``attempt_0.2``, …

    Args:
        given: what names and makes the folders; contract: torch's ``LogsSpecs``.
    """

    def __init__(self, given: LogsSpecs) -> None:
        self._given, self._made = given, Counter[str]()

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the folders for a group of workers, whose environments get their error files."""
        count = envs[0].get(COUNT, "0") if envs else "0"
        number = self._made[count]
        self._made[count] += 1
        for env in envs.values() if number else ():
            env[COUNT] = f"{count}.{number}"
        try:
            return self._given.reify(envs)
        finally:
            for env in envs.values() if number else ():
                env[COUNT] = count

    @property
    def root_log_dir(self) -> str:
        """Where all of them are."""
        return self._given.root_log_dir


def remove_torn_errors(context: Any) -> None:
    """Remove the error files that torch cannot read, since it raises for one: a worker may have been ended writing it.

    Args:
        context: the ``PContext`` of workers that have ended.
    """
    for path in map(Path, context.error_files.values()):
        with contextlib.suppress(OSError):
            if path.is_file() and not _is_whole(path.read_bytes()):
                path.unlink()


def _is_whole(error: bytes) -> bool:
    try:
        data = json.loads(error)
        message = data["message"]
        int(data.get("timestamp", 0) if isinstance(message, str) else message["extraInfo"]["timestamp"])
    except (ValueError, LookupError, TypeError, AttributeError):
        return False
    return True
