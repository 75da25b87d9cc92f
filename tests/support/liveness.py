"""Whether a process lives. A zombie does not: whoever has to reap it may be slow, or never do it."""

from __future__ import annotations

import psutil


def lives(process: psutil.Process | int) -> bool:
    """Whether a process, or the one that has this pid now, has not ended."""
    try:
        found = psutil.Process(process) if isinstance(process, int) else process
        return found.is_running() and found.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
