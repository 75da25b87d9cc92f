"""A training script that uses redelastic: it reports progress, and saves when its agent asks for it.

Usage: aware.py DIRECTORY. Files there steer it:
  finish     all ranks stop together after the step in which rank 0 sees it
  fail-NODE  the worker of that node fails at its next step, and removes the file
  poison     each worker fails at the step that this file names
  limp       each worker fails at the second step of its round, and the next round begins with that step
  hang-NODE  the worker of that node hangs at its next step, and removes the file
  end-after-save  all end with 0 once they have saved on request, and remove the file
  no-save    no rank saves or reports progress
  mute       only rank 0 reports progress
  patient    a worker that has lost a peer hangs, as with NCCL at first; without the file it fails, as with gloo
Files that are there when it starts:
  slow-NODE   the worker of that node takes 3 s to end after SIGTERM
  deaf-NODE   it ignores SIGTERM
  saver-NODE  it ends with 0 on SIGUSR1
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final

from group import Group  # type: ignore[import-not-found]  # beside this script
from record import Recorder  # type: ignore[import-not-found]

import redelastic

PACE: Final = 0.1  # of a step, in seconds


def hang() -> None:
    """Wait for ever, in C."""
    threading.Lock().acquire() and threading.Event().wait()


def exit_with_0(_signal: int, _frame: object) -> None:
    os._exit(0)


def install_signal_handlers(directory: Path, group: Group) -> None:
    """Handle signals as the files for this worker's node say."""

    def end_slowly(_signal: int, _frame: object) -> None:
        group.close()  # so that its peers fail at once
        time.sleep(3)
        os._exit(1)

    handlers: dict[str, tuple[signal.Signals, Any]] = {
        "slow": (signal.SIGTERM, end_slowly),
        "deaf": (signal.SIGTERM, signal.SIG_IGN),
        "saver": (signal.SIGUSR1, exit_with_0),
    }
    for file, (number, handler) in handlers.items():
        if (directory / f"{file}-{os.environ['TEST_NODE']}").exists():
            signal.signal(number, handler)


def fail_on_request(directory: Path, step: int, first: int) -> None:
    """Fail or hang at this step if a file says so; ``first`` is the first step of the round."""
    poison, node = directory / "poison", os.environ["TEST_NODE"]
    if poison.exists() and step == int(poison.read_text()):
        raise RuntimeError(f"all workers were told to fail at step {step}")
    if step > first and (directory / "limp").exists():
        (directory / "step").write_text(json.dumps(step))
        raise RuntimeError(f"all workers were told to fail after a step, at step {step}")
    for what in ("fail", "hang"):
        file = directory / f"{what}-{node}"
        if file.exists():
            file.unlink()
            if what == "hang":
                hang()
            raise RuntimeError(f"the worker of node {node} was told to fail at step {step}")


def main(directory: Path) -> None:
    group = Group()
    install_signal_handlers(directory, group)
    group.connect(directory)
    record = Recorder(directory)
    checkpoint = directory / "step"
    [step] = group.maximum(json.loads(checkpoint.read_text()) if group.rank == 0 and checkpoint.exists() else 0)
    record("start", step=step)
    first, finishing = step, False
    while not finishing:
        fail_on_request(directory, step, first)
        finish = group.rank == 0 and (directory / "finish").exists()
        saving, finishing = map(bool, group.maximum(redelastic.should_checkpoint(), finish))
        saves = not (directory / "no-save").exists()
        if saving and saves:
            if group.rank == 0:
                draft = checkpoint.with_suffix(".new")  # if it is killed meanwhile, the checkpoint stays whole
                draft.write_text(json.dumps(step))
                draft.replace(checkpoint)
            record("saved", step=step)
            redelastic.progress(step)
            ending = (directory / "end-after-save").exists()
            if any(group.maximum(ending)):
                (directory / "end-after-save").unlink(missing_ok=True)
                break
        time.sleep(PACE)
        record("step", step=step)
        if saves and (group.rank == 0 or not (directory / "mute").exists()):
            redelastic.progress(step)
        step += 1
    record("end", step=step)
    group.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except ConnectionError:
        if not Path(sys.argv[1], "patient").exists():
            raise
        hang()
