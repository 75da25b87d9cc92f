"""Checkpoints of trainers: which of them are complete, and which of them could not be loaded."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

from redelastic.workers.deaths import names_a_peer

MARK: Final = ".redelastic-failed.json"  # in the folder: the checkpoints that could not be loaded in a run
RUN: Final = "TORCHELASTIC_RUN_ID"
SAVED_BY_TORCH: Final = {".ckpt", ".pt", ".pth", ".bin"}


class CheckpointError(RuntimeError):
    """There are checkpoints, but none can be loaded: a training that starts over would overwrite them."""


def newest_complete(
    folder: Path, candidates: Iterable[Path], problem_of: Callable[[Path], str] | None = None
) -> str | None:
    """Find the first complete checkpoint that has not failed to load in this run.

    Args:
        folder: that holds them.
        candidates: checkpoints, the newest first.
        problem_of: what a checkpoint lacks, or ""; raises OSError or ValueError if it is broken.

    Returns:
        Its path; None if there are no candidates.

    Raises:
        CheckpointError: there are some, but none is complete and can be loaded.
    """
    problems, failed = [], _failed(folder)
    for path in candidates:
        try:
            if failed and _identity(path) in failed:
                problem = "it could not be loaded"
            else:
                problem = (problem_of or problem_of_file_or_folder)(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as e:  # its files may hold anything
            problem = f"{type(e).__name__}: {e}"
        if not problem:
            return str(path)
        if os.path.lexists(path):  # else another node has just removed it
            problems.append(f"{path.name}: {problem}")
    if problems:
        raise CheckpointError(
            f"No checkpoint in {folder} can be loaded. {'; '.join(problems)}. To start over, remove them."
        )
    return None


# -- what a complete checkpoint has


def problem_of_file_or_folder(path: Path) -> str:
    """What a checkpoint lacks: a file of ``torch.save``, or a folder of DCP (FSDP) or DeepSpeed; "" if it is complete.

    Raises:
        OSError, ValueError: it is broken.
    """
    if path.is_file():
        return problem_of_file(path)
    if (path / "latest").is_file():
        return problem_of_deepspeed(path)
    if (path / "meta.pt").is_file():  # Lightning writes it after all parts
        dcp = problem_of_dcp(path) if (path / ".metadata").exists() else ""
        return dcp or problem_of_file(path / "meta.pt")
    return "meta.pt is missing" if path.is_dir() else "the file that it links to is missing"


def problem_of_file(path: Path) -> str:
    """Say whether a file of ``torch.save`` or ``safetensors`` is cut off; "" if not, or if it is of another kind.

    Raises:
        OSError, ValueError: it cannot be read.
    """
    size = path.stat().st_size
    whole = size > 0
    if path.suffix == ".safetensors":
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            if whole := 0 < header <= size - 8:
                entries = json.loads(file.read(header))
                ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
                whole = size >= 8 + header + max(ends, default=0)
    elif path.suffix in SAVED_BY_TORCH:
        whole = zipfile.is_zipfile(path)  # torch.save's format ends with its table of contents
    return "" if whole else f"{path.name} is cut off"


def problem_of_dcp(folder: Path) -> str:
    """What a folder of ``torch.distributed.checkpoint`` lacks: its coordinator writes ``.metadata`` last."""
    from torch.distributed.checkpoint import FileSystemReader  # noqa: PLC0415  # slow, and rarely needed

    try:
        parts: dict[Any, Any] = FileSystemReader(folder).read_metadata().storage_data or {}
    except Exception as e:  # noqa: BLE001  # it is a pickle: anything may be raised
        return f"{folder.name}/.metadata cannot be read ({type(e).__name__})"
    for part in parts.values():
        if (folder / part.relative_path).stat().st_size < part.offset + part.length:
            return f"{part.relative_path} is cut off"
    return ""


def problem_of_deepspeed(folder: Path) -> str:
    """What a folder of DeepSpeed lacks: ``latest``, which is written last, names a folder in it."""
    states = sorted((folder / (folder / "latest").read_text(encoding="utf-8").strip()).glob("*_states.pt"))
    if not any("model_states" in path.name for path in states):
        return "the weights are missing"
    return next((problem for path in states if (problem := problem_of_file(path))), "")


# -- which ones could not be loaded

_loading: Path | None = None  # the checkpoint that this process is loading


def begin_loading(path: Path) -> None:
    """Note for the next rounds of this run if this process ends with an exception before :func:`end_loading`."""
    global _loading  # noqa: PLW0603  # one process loads one checkpoint
    if RUN in os.environ and sys.excepthook is not _note_failure:
        _before.append(sys.excepthook)
        sys.excepthook = _note_failure
    _loading = path


def end_loading() -> None:
    """The checkpoint has been loaded, if there is one."""
    global _loading  # noqa: PLW0603
    _loading = None


_before: list[Callable[..., Any]] = []


def _note_failure(kind: type[BaseException], error: BaseException, *traceback: Any) -> None:
    if _loading is not None and isinstance(error, Exception) and not names_a_peer(f"{kind.__name__}: {error}"):
        with contextlib.suppress(OSError):
            _note_failed(_loading)
    _before[-1](kind, error, *traceback)


def _note_failed(path: Path) -> None:
    identity = _identity(path)
    failed = [*(one for one in _failed(path.parent) if one != identity), identity]
    new = path.parent / f"{MARK}.{os.environ.get('RANK', '0')}"
    new.write_text(json.dumps({"run": os.environ[RUN], "failed": failed}), encoding="utf-8")
    new.replace(path.parent / MARK)  # other ranks may write it too, and the next round reads it
    sys.stderr.write(f"redelastic: {path} could not be loaded: the next round gets the checkpoint before it.\n")


def _failed(folder: Path) -> set[tuple[str, int]]:
    try:
        mark = json.loads((folder / MARK).read_text(encoding="utf-8"))
        return {(str(name), int(at)) for name, at in mark["failed"]} if mark["run"] == os.environ.get(RUN) else set()
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _identity(path: Path) -> tuple[str, int]:
    """Name and time: one that is written anew is another checkpoint."""
    return path.name, path.stat().st_mtime_ns
