"""The kernel's OOM kills: those of the agent's own cgroup are counted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from worker_processes import DEADLINE, until

from redelastic.agent import warden
from redelastic.agent.processes import oom_kills

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A cgroup of 64 MB."""
    version_2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    parent = Path("/sys/fs/cgroup" if version_2 else "/sys/fs/cgroup/memory")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if ("memory" in controllers.split(",") or (version_2 and not controllers)) and (parent / path[1:]).exists():
            parent /= path[1:]
            break
    cgroup = parent / f"redelastic-{uuid.uuid4().hex[:12]}"
    try:
        cgroup.mkdir()
        (cgroup / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(64 << 20))
    except OSError as e:
        with suppress(OSError):
            cgroup.rmdir()
        pytest.skip(f"no memory cgroup can be made here: {e}")
    yield cgroup
    until(lambda: not (cgroup / "cgroup.procs").read_text(), "the cgroup to be empty")
    cgroup.rmdir()


def test_the_kernels_oom_kills_are_counted(small_cgroup: Path) -> None:
    source = """
import json, os, subprocess, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from redelastic.agent.processes import oom_kills
before = oom_kills()
hog = subprocess.run([sys.executable, "-I", "-S", "-c", "kept = [bytearray(b'x' * (1 << 20)) for _ in range(256)]"])
print(json.dumps([before, hog.returncode, oom_kills()]))
"""
    elsewhere = oom_kills()
    command = [sys.executable, "-c", source, str(small_cgroup / "cgroup.procs")]
    done = subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)
    assert json.loads(done.stdout) == [0, -signal.SIGKILL, 1]
    assert oom_kills() == elsewhere  # that was another cgroup


@pytest.mark.parametrize(
    ("files", "count"),
    [
        ({"/proc/self/cgroup": "0::/job", "/sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 3\n"}, 3),
        ({"/proc/self/cgroup": "0::/of/the/host", "/sys/fs/cgroup/memory.events": "oom 9\noom_kill 4\n"}, 4),
        ({"/proc/self/cgroup": "4:cpu,memory:/", "/sys/fs/cgroup/memory/memory.oom_control": "oom_kill 5"}, 5),
        ({"/proc/self/cgroup": "0::/", "/proc/vmstat": "nr_free_pages 1\noom_kill 6\n"}, 6),
        ({}, 0),
    ],
    ids=["v2", "v2-in-a-container", "v1", "host", "nothing"],
)
def test_where_the_number_of_oom_kills_is_read(
    monkeypatch: pytest.MonkeyPatch, files: dict[str, str], count: int
) -> None:
    monkeypatch.setattr(warden, "read", lambda path: files.get(path, "").encode())
    assert oom_kills() == count
