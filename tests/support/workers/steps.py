"""A training script whose steps and faults have known times, for tests of training time.

Usage: steps.py DIRECTORY. Rank 0 saves a checkpoint there at every twentieth step. `record.jsonl` has two times of each
step: before it is reported (`reports`) and after (`step`). Files there steer it:
  begin-EPOCH    without it, the workers of that round, if it is not the first one, make no step
  go-EPOCH-STEP  without it, they report this step again and again: a round's first step, and the step after FAILS_AFTER
  faults         the first round's workers fail after a pause, and the second round's workers hang
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Final

from group import Group  # type: ignore[import-not-found]  # beside this script
from record import Recorder  # type: ignore[import-not-found]

import redelastic

PACE: Final = 0.1  # of a step, in seconds
PAUSE: Final = 6.0  # before the failure, in seconds
FAILS_AFTER, HANGS_AFTER, LAST = 39, 69, 89  # steps


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def main(directory: Path) -> None:
    group = Group()
    group.connect(directory)
    record, checkpoint, epoch = Recorder(directory), directory / "checkpoint", int(os.environ["REDELASTIC_EPOCH"])
    [first] = group.maximum(json.loads(checkpoint.read_text()) if checkpoint.exists() else 0)
    record("start", step=first)
    if epoch > 1:
        wait_for(directory / f"begin-{epoch}")
    has_faults = (directory / "faults").exists()
    for step in range(first, LAST + 1):
        time.sleep(PACE)
        group.maximum(step)  # so that no rank is ahead
        record("reports", step=step)
        redelastic.progress(step)
        record("step", step=step)
        if group.rank == 0 and step % 20 == 9:
            checkpoint.write_text(json.dumps(step + 1))
        while (step == first or step == FAILS_AFTER + 1) and not (directory / f"go-{epoch}-{step}").exists():
            time.sleep(0.02)
            redelastic.progress(step)
        if has_faults and step == FAILS_AFTER and epoch == 1:
            time.sleep(PAUSE)
            sys.exit(3)
        if has_faults and step == HANGS_AFTER and epoch == 2:
            threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
