"""What `benchmarks.recovery` runs in processes of its own: a node, its worker, and a reaper of them all.

Usage: recovery_processes.py node READY MODULE ARGUMENTS…, or worker RECORD NODE, or reaper JOB DIRECTORY.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import shutil
import sys
import time
from pathlib import Path
from typing import Final

import psutil

JOB: Final = "REDELASTIC_BENCH_JOB"  # environment variable by which every process of a job is known, orphans too
PACE: Final = 0.02  # between two steps, in seconds
POLL: Final = 0.01


def node(ready: Path, module: str, *arguments: str) -> None:
    """Become an agent once all have imported torch: else the first ones form a group without the last."""
    importlib.import_module("torch.distributed.launcher.api")
    (ready / str(os.getpid())).touch()
    while not (ready / "go").exists():
        time.sleep(POLL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def worker(record: Path, number: str) -> None:
    """Step after step with all others: one all_reduce and a line in the record, all times on the monotonic clock."""
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    pid = os.getpid()
    rank, world = int(os.environ["GROUP_RANK"]), int(os.environ["WORLD_SIZE"])

    def tell(**what: float) -> None:
        os.write(file, (json.dumps({"pid": pid, **what}) + "\n").encode())  # one write, so that lines stay whole

    tell(node=int(number), rank=rank, world=world, born=_born())
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(1))
        tell(step=time.monotonic())
        time.sleep(PACE)


def _born() -> float:
    """When this process was made, to 10 ms: field 22 of proc(5)'s stat is on the clock that counts from boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def reaper(job: str, directory: Path) -> None:
    """End a job, its processes and its files, once standard input is closed: also when the benchmark was killed."""
    sys.stdin.read()
    while left := [process for process in psutil.process_iter() if _is_of(process, job)]:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(POLL)
    shutil.rmtree(directory)


def _is_of(process: psutil.Process, job: str) -> bool:
    try:
        return process.environ().get(JOB) == job and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or is somebody else's
        return False


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "node":
        node(Path(given[0]), *given[1:])
    elif role == "worker":
        worker(Path(given[0]), given[1])
    else:
        reaper(given[0], Path(given[1]))
