"""A worker that keeps saving a checkpoint, unless a later round has: REDELASTIC_EPOCH is its fencing token.

Usage: frozen_saver.py DIRECTORY. There: `checkpoint`, the epoch and number of the last save; `NODE-EPOCH-saves`, once
it has saved; `NODE-EPOCH-refused`, once it has been refused; `finish` ends it.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from pathlib import Path
from typing import Final

EPOCH: Final = int(os.environ["REDELASTIC_EPOCH"])


def save(checkpoint: Path, step: int) -> bool:
    """Write the checkpoint, unless one of a later epoch is there."""
    with checkpoint.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # compare and write are one step
        if checkpoint.exists() and json.loads(checkpoint.read_text())[0] > EPOCH:
            return False
        new = checkpoint.with_suffix(".new")
        new.write_text(json.dumps([EPOCH, step]))
        new.replace(checkpoint)
    return True


def main(directory: Path) -> None:
    me = f"{os.environ['TEST_NODE']}-{EPOCH}"
    (directory / f"{me}-pid").write_text(str(os.getpid()))
    step = 0
    while not (directory / "finish").exists():
        saved = save(directory / "checkpoint", step)
        (directory / f"{me}-{'saves' if saved else 'refused'}").touch()
        step += 1
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
