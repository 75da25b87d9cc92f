"""Runs a training script of examples/, unmodified; records its calls of `redelastic.progress`, and holds them.

Usage: paced.py DIRECTORY HOLD SCRIPT ARGUMENTS… No worker gets past step HOLD before there is DIRECTORY/finish, unless
its agent has asked for a checkpoint: then it makes one more step. Rank 0 learns of that request only from other ranks.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from record import Recorder  # type: ignore[import-not-found]  # beside this script

import redelastic
from redelastic import worker

KEEPS_GROUP: Final = {"train_dcp.py"}  # DTensor's caches keep it


def has_gloo_threads() -> bool:
    """Whether a process group of gloo is left, whose thread may need the interpreter's lock after its last collective.

    If the interpreter is ending, the process is aborted (https://github.com/pytorch/pytorch/pull/179291). If the main
    thread has the lock and waits for that thread, both hang (https://github.com/pytorch/pytorch/issues/56297).
    """
    for file in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # the thread has ended
            if file.read_text() == "pt_gloo_runloop\n":
                return True
    return False


def main(directory: Path, hold: int, script: str, *arguments: str) -> None:
    record, report, ask = Recorder(directory), redelastic.progress, redelastic.should_checkpoint
    record("start")
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
    if has_gloo_threads():
        assert Path(script).name in KEEPS_GROUP, "The script leaves a process group of gloo."
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
