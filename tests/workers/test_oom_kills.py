"""The kernel's OOM kills in the agent's own cgroup are counted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from redelastic.host.cgroups import oom_kills
from tests.support.cgroups import limited_memory
from tests.support.worker_processes import DEADLINE


def test_the_kernels_oom_kills_are_counted() -> None:
    source = """
import json, os, subprocess, sys
open(sys.argv[1], "w").write(str(os.getpid()))
from redelastic.host.cgroups import oom_kills
before = oom_kills()
hog = subprocess.run([sys.executable, "-I", "-S", "-c", "kept = [bytearray(b'x' * (1 << 20)) for _ in range(256)]"])
print(json.dumps([before, hog.returncode, oom_kills()]))
"""
    elsewhere = oom_kills()
    with limited_memory(64) as members:
        command = [sys.executable, "-c", source, str(members)]
        done = subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE)
    assert json.loads(done.stdout) == [0, -signal.SIGKILL, 1]
    assert oom_kills() == elsewhere  # the kill was in another cgroup


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
def test_where_the_number_of_oom_kills_is_read(tmp_path: Path, files: dict[str, str], count: int) -> None:
    for path, text in files.items():
        file = tmp_path / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert oom_kills(tmp_path) == count
