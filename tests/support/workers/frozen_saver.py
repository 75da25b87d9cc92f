"""A worker that saves a checkpoint again and again, with REDELASTIC_EPOCH as its fencing token.

Usage: frozen_saver.py DIRECTORY. Files there: `checkpoint` has the epoch and the number of the last save,
`NODE-EPOCH-pid` the worker's pid; it makes `NODE-EPOCH-saves` when it saves, and `NODE-EPOCH-refused` when it may not;
`finish` ends it.
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
    """Write the checkpoint, unless there is one of a later epoch; returns whether it was written."""
    with checkpoint.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # compare and write atomically
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
