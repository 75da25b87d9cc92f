"""A cgroup with limited memory, for one block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.servers import wait_until


@contextmanager
def limited_memory(megabytes: int) -> Iterator[Path]:
    """Make a cgroup; yields the path of its `cgroup.procs`. The test is skipped where none can be made."""
    unified = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    mount = Path("/sys/fs/cgroup" if unified else "/sys/fs/cgroup/memory")
    errors: list[OSError] = []
    for parent in (_own(mount, unified=unified), mount):
        cgroup = parent / f"redelastic-{uuid4().hex[:12]}"
        try:
            cgroup.mkdir()
            (cgroup / ("memory.max" if unified else "memory.limit_in_bytes")).write_text(str(megabytes << 20))
            break
        except OSError as e:
            errors.append(e)
            with suppress(OSError):
                cgroup.rmdir()
    else:
        pytest.skip(f"no memory cgroup can be made here: {errors}")
    members = cgroup / "cgroup.procs"
    yield members
    wait_until(lambda: not members.read_text(), "the cgroup is empty")
    cgroup.rmdir()


def _own(mount: Path, *, unified: bool) -> Path:
    """This process's own cgroup, or the root where its own is not visible."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",") or (unified and not controllers)) and (mount / path[1:]).exists():
            return mount / path[1:]
    return mount
