"""The checks of disks and memory, against real file systems and cgroups."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from redelastic.host import checks
from redelastic.host.cgroups import memory_room
from redelastic.host.checks import Node, disk, memory
from tests.support import check_fixtures
from tests.support.servers import wait_until

node = check_fixtures.node


# -- disks


@contextlib.contextmanager
def file_system(at: Path, options: str) -> Iterator[Path]:
    at.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(at)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def test_disk_makes_the_log_directory_and_leaves_nothing_in_it(node: Node) -> None:
    deep = Node(node.log_dir / "of" / "the" / "run", 1)
    assert disk(deep) is None
    assert list(deep.log_dir.iterdir()) == []


def test_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDELASTIC_MIN_DISK", "0")
    with file_system(tmp_path / "small", "size=1m") as small:
        assert disk(Node(small, 1)) is None
        with pytest.raises(OSError, match="No space left"):
            (small / "filler").write_bytes(bytes(2 << 20))
        assert disk(Node(small, 1)) == f"the log directory {small} cannot be written: No space left on device"
        assert [path.name for path in small.iterdir()] == ["filler"]


def test_disk_with_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with file_system(tmp_path / "small", "size=1m") as small:
        reason = disk(Node(small, 1))
        assert reason is not None
        assert reason.startswith(f"the log directory {small} has 1 MiB left, less than 100 MiB: ")
        monkeypatch.setenv("REDELASTIC_MIN_DISK", "512K")
        assert disk(Node(small, 1)) is None


def test_disk_with_too_few_inodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDELASTIC_MIN_DISK", "0")
    with file_system(tmp_path / "small", "size=1m,nr_inodes=20") as small:
        reason = disk(Node(small, 1))
        assert reason is not None
        assert re.search(r" has \d+ inodes left, fewer than 100: remove some files$", reason)


def test_disk_that_is_read_only(tmp_path: Path) -> None:
    with file_system(tmp_path / "small", "ro") as small:
        assert disk(Node(small, 1)) == f"the log directory {small} cannot be written: Read-only file system"


def test_disk_where_the_log_directory_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()
    assert disk(Node(tmp_path / "logs", 1)) == f"the log directory {tmp_path}/logs cannot be written: Not a directory"


def test_disk_checks_the_temporary_directory_too(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", f"{tmp_path}/none")
    assert disk(node) == f"the temporary directory {tmp_path}/none cannot be written: No such file or directory"


# -- memory


def test_memory_that_is_too_little(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDELASTIC_MIN_MEMORY", "1000T")
    reason = memory(node)
    assert reason is not None
    assert re.match(r"[\d,]+ MiB of memory is available to .*, less than 1,048,576,000 MiB: free some", reason)
    monkeypatch.setenv("REDELASTIC_MIN_MEMORY", "1M")
    assert memory(node) is None


def test_memory_needs_more_for_more_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDELASTIC_MIN_MEMORY", raising=False)
    assert memory(Node(tmp_path, 1)) is None
    reason = memory(Node(tmp_path, 1 << 20))
    assert reason is not None
    assert f"less than {256 << 20:,} MiB" in reason


@pytest.mark.parametrize(
    ("value", "size"),
    [("", 7), ("123", 123), ("4G", 4 << 30), ("1.5k", 1536), ("512 MiB", 512 << 20), ("2TB", 2 << 40), ("9b", 9)],
)
def test_sizes(monkeypatch: pytest.MonkeyPatch, value: str, size: int) -> None:
    monkeypatch.setenv("REDELASTIC_MIN_MEMORY", value)
    assert checks._bytes_from_environment("REDELASTIC_MIN_MEMORY", 7) == size


@pytest.mark.parametrize("value", ["much", "-1", "4X", "4 G B", "1e9"])
def test_an_invalid_size_is_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("REDELASTIC_MIN_MEMORY", value)
    with pytest.raises(ValueError, match=f"REDELASTIC_MIN_MEMORY='{value}' is not a number of bytes; use 4G"):
        checks._bytes_from_environment("REDELASTIC_MIN_MEMORY", 7)


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ("memory.max", "memory.current", "inactive_file")


def cgroup(folder: Path, files: tuple[str, str, str], limit: str, usage: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{files[2]} {inactive}\nslab 3\n")


def mount(root: Path) -> Path:
    return root / "sys/fs/cgroup"


def room(tmp_path: Path, membership: str) -> dict[str, int]:
    process = tmp_path / "proc/self"
    process.mkdir(parents=True)
    (process / "cgroup").write_text(membership)
    return {name.removeprefix(f"cgroup {mount(tmp_path)}"): size for size, name in memory_room(tmp_path)}


def test_memory_of_a_cgroup_v2_and_of_its_parents(tmp_path: Path) -> None:
    cgroup(mount(tmp_path) / "a", V2, "1000", 700, 0)
    cgroup(mount(tmp_path) / "a/b", V2, "max", 600, 0)
    cgroup(mount(tmp_path) / "a/b/c", V2, "900", 600, 50)
    assert room(tmp_path, "0::/a/b/c\n") == {"/a/b/c": 350, "/a": 300}


def test_memory_of_a_cgroup_v1_beside_others(tmp_path: Path) -> None:
    cgroup(mount(tmp_path) / "memory/a", V1, "1000", 1200, 100)
    cgroup(mount(tmp_path) / "cpu/a", V1, "1", 1, 0)
    cgroup(mount(tmp_path), V1, "1", 1, 0)  # above the mount: not read
    assert room(tmp_path, "5:cpu,cpuacct:/a\n4:memory:/a\n0::/\n") == {"/memory/a": 0}


def test_memory_of_a_container_that_has_the_hosts_path(tmp_path: Path) -> None:
    cgroup(mount(tmp_path) / "memory", V1, "1000", 400, 0)
    assert room(tmp_path, "4:memory:/docker/0123456789ab\n") == {"/memory": 600}


def test_memory_where_there_are_no_cgroups(tmp_path: Path) -> None:
    assert room(tmp_path, "0::/\n") == {}
    assert list(memory_room(tmp_path / "absent")) == []


@contextlib.contextmanager
def limited_cgroup(limit: int) -> Iterator[Path]:
    """A real cgroup under this process's own, for a process of the test."""
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    paths = {controllers: path for _, controllers, path in (line.split(":", 2) for line in lines)}
    root = Path("/sys/fs/cgroup")
    own, file = (
        (root / "memory" / paths["memory"].lstrip("/"), V1[0])
        if "memory" in paths
        else (root / paths.get("", "").lstrip("/"), V2[0])
    )
    group = own / f"redelastic-test-{os.getpid()}-{threading.get_ident()}"
    try:
        group.mkdir()
        try:
            (group / file).write_text(str(limit))
        except OSError:
            group.rmdir()
            raise
    except OSError as e:
        pytest.skip(f"no cgroup can be made here: {e}")
    try:
        yield group
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text(), f"{group} is empty")
        group.rmdir()


def test_memory_in_a_real_cgroup(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from redelastic.host.checks import Node, memory\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "print(memory(Node(Path(), int(sys.argv[2]))))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "REDELASTIC_MIN_MEMORY"}
    with limited_cgroup(300 << 20) as group:

        def answer(workers: int) -> str:
            argv = [sys.executable, "-c", program, str(group), str(workers)]
            return subprocess.run(
                argv, capture_output=True, text=True, check=True, timeout=60, env=environment, cwd=tmp_path
            ).stdout.strip()

        assert answer(1) == "None"
        assert re.match(rf"\d+ MiB of memory is available to cgroup {group}, less than 512 MiB", answer(2))
