"""The memory cgroups of this process, version 1 or 2: the room they leave, and the processes killed in them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path("/")  # of the file system


def memory_room(root: Path = ROOT) -> Iterator[tuple[int, str]]:
    """Bytes left in each limited cgroup of this process, from its own up to the mount, and the cgroup's name."""
    for folder, version in _memory_cgroups(root):
        limit, usage, reclaimable = (
            ("memory.max", "memory.current", "inactive_file")
            if version == 2
            else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        )
        with contextlib.suppress(OSError, ValueError):  # no such cgroup, or it has no limit: "max"
            room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            yield max(0, room + int(statistics.get(reclaimable, 0))), f"cgroup {folder}"


def oom_kills(root: Path = ROOT) -> int:
    """How many processes the kernel has killed for lack of memory in this process' cgroup so far.

    If no cgroup counts that, it is the whole host's number, or 0 if the kernel does not say.
    """
    counted = [
        folder / ("memory.events" if version == 2 else "memory.oom_control")
        for folder, version in _memory_cgroups(root)
    ]
    for path in (*counted, root / "proc/vmstat"):
        for line in _lines(path):
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    return 0


def _memory_cgroups(root: Path) -> Iterator[tuple[Path, int]]:
    """The folder of each cgroup that this process is in, its own first, and the version of its interface.

    In a container, its path may be the host's, which does not exist there; the right files are then at the mount.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            tops, version = [mount, mount / "unified"], 2
        elif "memory" in controllers.split(","):
            tops, version = [mount / "memory"], 1
        else:
            continue
        for top in tops:
            own = top / path.lstrip("/")
            for folder in (own, *(parent for parent in own.parents if parent.is_relative_to(top))):
                yield folder, version


def _lines(path: Path) -> list[str]:
    """Lines of a kernel file; none if it is missing, or not readable."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
