"""Where temporary files are made."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


def make_temporary_files_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As TMPDIR does, which Python reads only once."""
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
