"""What the tests of checks share: a node, and whether a process is gone."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil
import pytest

from redelastic.host.checks import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "logs", local_world_size=2, timeout=30)


def gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True
