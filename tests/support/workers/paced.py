"""Runs a recipe's unmodified training script; its calls of `redelastic.progress` are recorded and held back.

Usage: paced.py DIRECTORY HOLD SCRIPT ARGUMENTS… No worker gets past step HOLD before DIRECTORY/finish is there, unless
its agent has asked for a checkpoint: then it makes one more step. Rank 0 hears of that request only from other ranks.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from record import Recorder  # type: ignore[import-not-found]  # beside this script

import redelastic
from redelastic import worker


def end_with_an_error_if_the_process_group_is_left() -> None:
    """Its threads may need the interpreter after it is gone, which sometimes aborts the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        sys.stderr.write("The script has not ended its process group.\n")
        sys.stderr.flush()
        os._exit(1)


def main(directory: Path, hold: int, script: str, *arguments: str) -> None:
    record, report, ask = Recorder(directory), redelastic.progress, redelastic.should_checkpoint
    record("start")
    atexit.register(end_with_an_error_if_the_process_group_is_left)  # called after everything the script registers
    last = -1

    def asked() -> bool:
        return worker._slot[worker.REQUESTED] > 0

    def progress(step: Any) -> None:
        nonlocal last
        report(step)
        if step > last:  # calls during evaluation repeat the step
            last = step
            record("step", step=step)
        while step >= hold and not (directory / "finish").exists() and not (step == hold and asked()):
            time.sleep(0.02)

    def should_checkpoint() -> bool:
        return ask() and os.environ["RANK"] != "0"

    redelastic.progress, redelastic.should_checkpoint = progress, should_checkpoint
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")
    record("end", step=last)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
