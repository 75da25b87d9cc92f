"""The note of checkpoints that could not be loaded: when a process writes it, and how long it is valid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from redelastic.integrations.checkpoints import CheckpointError, newest_complete


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two checkpoints, the newest first."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a run")
    paths = [tmp_path / "second.ckpt", tmp_path / "first.ckpt"]
    for path in paths:
        torch.save({}, path)
    return paths


def end(path: Path, code: str) -> str:
    """Run a worker that begins to load a checkpoint and goes on with `code`; returns its stderr."""
    begin = f"from redelastic.integrations.checkpoints import *\nbegin_loading(Path({str(path)!r}))\n"
    done = subprocess.run([sys.executable, "-c", begin + code], capture_output=True, text=True, timeout=60, check=False)
    return done.stderr


def test_a_checkpoint_that_could_not_be_loaded_is_skipped_until_written_again(
    checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, first = checkpoints
    said = end(second, "raise ValueError('nonsense')")
    assert f"{second} could not be loaded: the next round gets the checkpoint before it.\n" in said
    assert said.endswith("ValueError: nonsense\n"), "the traceback is there too"
    assert newest_complete(tmp_path, checkpoints) == str(first)
    end(first, "raise ValueError('nonsense')")
    with pytest.raises(
        CheckpointError, match=r"second\.ckpt: it could not be loaded; first\.ckpt: it could not be loaded"
    ):
        newest_complete(tmp_path, checkpoints)
    torch.save({}, first)
    os.utime(first, (1, 1))
    assert newest_complete(tmp_path, checkpoints) == str(first)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another run")
    assert newest_complete(tmp_path, checkpoints) == str(second), "another run's script may load it"


@pytest.mark.parametrize(
    "code",
    [
        "end_loading(); raise ValueError('of the training')",
        "raise ConnectionResetError('Connection reset by peer')",
        "raise KeyboardInterrupt",
        "raise SystemExit(1)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_other_ends_do_not_blame_the_checkpoint(checkpoints: list[Path], tmp_path: Path, code: str) -> None:
    assert "could not be loaded" not in end(checkpoints[0], code)
    assert newest_complete(tmp_path, checkpoints) == str(checkpoints[0])


@pytest.mark.parametrize("note", ["", "[]", "{}", '{"run": "a run", "failed": [1]}'])
def test_a_note_that_cannot_be_read_is_ignored(checkpoints: list[Path], tmp_path: Path, note: str) -> None:
    (tmp_path / ".redelastic-failed.json").write_text(note)
    assert newest_complete(tmp_path, checkpoints) == str(checkpoints[0])
