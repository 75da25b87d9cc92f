"""Shell scripts that stand in for the binary of a server."""

from __future__ import annotations

from pathlib import Path


def make_script(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return path
