"""The node on which tests run health checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from redelastic.host.checks import Node


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "logs", local_world_size=2, timeout=30)
