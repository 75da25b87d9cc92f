"""The folder of temporary files."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


def make_temporary_files_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do what TMPDIR does, which Python reads only once."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
