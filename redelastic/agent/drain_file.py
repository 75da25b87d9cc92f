"""DrainFile: a file whose appearance drains this node, for schedulers that cannot send a signal."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger(__name__)


class DrainFile:
    """Watches for one file.

    Args:
        path: of the file; it may hold the Unix time by which this node must be gone.
        timeout: how long workers may take to save, in seconds.
        drain: called with a reason and a timeout in seconds each time a look finds the file.
    """

    def __init__(self, path: Path, timeout: float, drain: Callable[[str, float], None]) -> None:
        self._path, self._timeout, self._drain = path, timeout, drain
        self._complaint = ""  # why the last look failed

    def look(self) -> None:
        """Look once. A failure is logged unless the last look failed the same way; the next call tries again."""
        try:
            self._path.stat()
        except (FileNotFoundError, NotADirectoryError):
            self._complaint = ""
            return
        except OSError as e:
            if str(e) != self._complaint:
                self._complaint = str(e)
                log.warning("The drain file cannot be checked: %s. Retrying every second.", e)
            return
        timeout = self._timeout
        with contextlib.suppress(ValueError, OSError):
            timeout = min(timeout, max(0.0, float(self._path.read_text()) - time.time()))
        self._drain(f"the file {self._path} exists", timeout)
