"""A training script that knows its agent: it reports progress, and saves when it is asked to.

Usage: aware.py DIRECTORY. Which files there steer it:
  finish     all ranks stop together after the step at which rank 0 saw it
  fail-NODE  the worker of that node fails at its next step, and takes the file away
  fail       each worker fails at its first step, for as long as the file is there
  hang-NODE  the worker of that node hangs at its next step, and takes the file away
  no-save    nobody saves, nor reports progress
And at its start:
  slow-NODE   the worker of that node takes 3 s to end after SIGTERM
  deaf-NODE   it does not hear SIGTERM
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

import torch
import torch.distributed as dist
from train import Recorder  # type: ignore[import-not-found]  # beside this script

import redelastic

PACE: Final = 0.05  # of a step, in seconds


def hang() -> None:
    """Wait for ever, in C."""
    threading.Lock().acquire() and threading.Event().wait()


def end_slowly(_signal: int, _frame: object) -> None:
    dist.destroy_process_group()  # its peers fail at once
    time.sleep(3)
    os._exit(1)


def end_well(_signal: int, _frame: object) -> None:
    os._exit(0)


def take_to_its_ways(directory: Path) -> None:
    """Set up how this worker meets signals."""
    ways: dict[str, tuple[signal.Signals, Any]] = {
        "slow": (signal.SIGTERM, end_slowly),
        "deaf": (signal.SIGTERM, signal.SIG_IGN),
        "saver": (signal.SIGUSR1, end_well),
    }
    for way, (number, handler) in ways.items():
        if (directory / f"{way}-{os.environ['TEST_NODE']}").exists():
            signal.signal(number, handler)


def main(directory: Path) -> None:
    take_to_its_ways(directory)
    dist.init_process_group("gloo")
    record, node = Recorder(directory), os.environ["TEST_NODE"]
    checkpoint = directory / "step"
    first = [json.loads(checkpoint.read_text()) if checkpoint.exists() else 0]
    dist.broadcast_object_list(first)
    step = first[0]
    record("start", step=step)
    finishing = False
    while not finishing:
        if (directory / "fail").exists():
            raise RuntimeError(f"all workers were told to fail, at step {step}")
        for what in ("fail", "hang"):
            told = directory / f"{what}-{node}"
            if told.exists():
                told.unlink()
                if what == "hang":
                    hang()
                raise RuntimeError(f"the worker of node {node} was told to fail at step {step}")
        finish = dist.get_rank() == 0 and (directory / "finish").exists()
        votes = torch.tensor([int(redelastic.should_checkpoint()), int(finish)])
        dist.all_reduce(votes, op=dist.ReduceOp.MAX)
        saves = not (directory / "no-save").exists()
        if votes[0] and saves:
            if dist.get_rank() == 0:
                checkpoint.write_text(json.dumps(step))
            record("saved", step=step)
            dist.barrier()
        time.sleep(PACE)
        record("step", step=step)
        if saves:
            redelastic.progress(step)
        step += 1
        finishing = bool(votes[1])
    record("end", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
