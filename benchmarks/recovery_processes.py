"""What `benchmarks.recovery` runs in separate processes: a node, its worker, and a reaper of them all.

Usage: recovery_processes.py worker RECORD NODE, survivor MEGABYTES RECORD NODE, or reaper DIRECTORY. Nodes are forked.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import runpy
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NoReturn

import psutil

PACE: Final = 0.02  # between two steps, in seconds
POLL: Final = 0.01


def node(directory: Path, log: str, env: Mapping[str, str], module: str, *arguments: str) -> None:
    """Become an agent, in a process that has already imported torch, which makes a job start sooner.

    Args:
        directory: where it lives; it identifies all processes of a job.
        log: the file there for all its output.
        env: additional environment variables.
        module: the module, as for `python -m`.
        arguments: the module's arguments.
    """
    os.setsid()
    os.chdir(directory)
    os.environ.update(env)
    file = os.open(log, os.O_WRONLY | os.O_CREAT, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(file, stream.fileno())
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:  # as when an ordinary process ends: this is how torchrun's nodes leave
        atexit._run_exitfuncs()  # noqa: SLF001


def worker(record: Path, number: str, megabytes: int | None = None) -> None:
    """Step with all others: per step one all_reduce and a line in the record, all times on the monotonic clock.

    It steps on a GPU where there is one, which all nodes share: NCCL takes them for hosts of their own.
    A worker that survives has a state of so many megabytes; it counts as another one in each round.
    """
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    pid, born = os.getpid(), _born()

    def tell(**what: float) -> None:
        os.write(file, (json.dumps({"pid": pid, **what}) + "\n").encode())  # one write, so that lines stay whole

    def begin(born: float) -> None:
        rank, world = int(os.environ["GROUP_RANK"]), int(os.environ["WORLD_SIZE"])
        tell(node=int(number), rank=rank, world=world, born=born)

    if megabytes is None:
        begin(born)
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    device, backend = ("cuda", "nccl") if torch.cuda.is_available() else ("cpu", "gloo")
    os.environ["NCCL_HOSTID"] = number

    def step(commit: Callable[[], None] = lambda: None) -> NoReturn:
        while True:
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
            one.item()
            tell(step=time.monotonic())
            time.sleep(PACE)
            commit()

    if megabytes is not None:
        import redelastic  # noqa: PLC0415

        def train(_: object) -> NoReturn:
            begin(time.monotonic())
            tell(ready=time.monotonic())
            step(state.commit)

        model = torch.nn.ParameterList(torch.zeros(250_000, device=device) for _ in range(megabytes))  # 1 MB each
        state = redelastic.State(model=model)
        redelastic.survive(train, state)
    else:
        tell(ready=time.monotonic())
        dist.init_process_group(backend)
        step()


def _born() -> float:
    """When this process was created, to 10 ms: field 22 of proc(5)'s stat counts from boot."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def reaper(directory: Path) -> None:
    """End a job, its processes and its files, once standard input is closed, even if the benchmark was killed."""
    sys.stdin.read()
    while left := [process for process in psutil.process_iter() if _lives_in(directory, process)]:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        time.sleep(POLL)
    shutil.rmtree(directory)


def _lives_in(directory: Path, process: psutil.Process) -> bool:
    try:
        return process.cwd() == str(directory) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # it has ended, or belongs to another user
        return False


if __name__ == "__main__":
    role, *given = sys.argv[1:]
    if role == "survivor":
        worker(Path(given[1]), given[2], int(given[0]))
    elif role == "worker":
        worker(Path(given[0]), given[1])
    else:
        reaper(Path(given[0]))
