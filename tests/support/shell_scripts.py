"""Shell scripts that stand in for a server's binary."""

from __future__ import annotations

from pathlib import Path


def make_script(path: Path, *lines: str) -> Path:
    """Write an executable script of these lines; returns its path."""
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path
