"""A worker of another tool for `benchmarks.peers`, which steps as those of `recovery_processes.py` do.

Usage: peers_worker.py torchft TIMEOUT RECORD NODE, or inprocess TIMEOUT RECORD NODE, with the timeout in seconds, or
`default`. It runs where the tool is installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch

PACE = 0.02  # between two steps, in seconds

Tell = Callable[..., None]


def torchft(timeout: timedelta | None, tell: Tell, number: int) -> NoReturn:
    """Step with all other replica groups; counts as another worker in each group of them."""
    from torchft import Manager, ProcessGroupGloo  # noqa: PLC0415

    timeout = timeout or timedelta(seconds=60)
    state: dict[str, Any] = {"model": torch.zeros(1)}
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timeout),
        state_dict=lambda: state,
        load_state_dict=state.update,
        min_replica_size=2,
        timeout=timeout,
        quorum_timeout=timeout,
        replica_id=f"node_{number}_",
    )
    group = None
    while True:
        manager.start_quorum()
        manager.allreduce(torch.ones(1)).wait()
        if manager.should_commit() and (rank := manager.participating_rank()) is not None:  # None: it gets the state
            now, world = time.monotonic(), manager.num_participants()
            if group != (rank, world):
                group = rank, world
                tell(node=number, rank=rank, world=world, born=now)
                tell(ready=now)
            tell(step=now)
        time.sleep(PACE)


def inprocess(timeout: timedelta | None, tell: Tell, number: int) -> None:
    """Step with all other ranks; counts as another worker each time that NVRx calls the wrapped function."""
    import torch.distributed as dist  # noqa: PLC0415
    from nvidia_resiliency_ext.inprocess import CallWrapper, Wrapper  # noqa: PLC0415

    port, often = int(os.environ["MASTER_PORT"]), timedelta(seconds=0.1)
    short: dict[str, timedelta] = {}
    if timeout:
        short = {f"{name}_interval": often for name in ("monitor_thread", "monitor_process", "progress_watchdog")}
        short |= {"heartbeat_interval": often, "heartbeat_timeout": timeout, "last_call_wait": often}

    def train(call: Any = None) -> NoReturn:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        tell(node=number, rank=rank, world=world, born=time.monotonic())
        server = dist.TCPStore("127.0.0.1", port + 1, world, rank == 0, multi_tenant=True)
        store = dist.PrefixStore(str(call.iteration), server)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timeout)
        tell(ready=time.monotonic())
        while True:
            dist.all_reduce(torch.ones(1))
            tell(step=time.monotonic())
            time.sleep(PACE)

    train.__annotations__["call"] = CallWrapper  # NVRx passes its argument by type, and does not read names of types
    Wrapper(store_kwargs={"port": port}, **short)(train)()


def main(tool: str, timeout: str, record: Path, number: int) -> None:
    """Step with all others until the end."""
    file = os.open(record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def tell(**what: float) -> None:
        os.write(file, (json.dumps({"pid": os.getpid(), **what}) + "\n").encode())

    limit = None if timeout == "default" else timedelta(seconds=float(timeout))
    {"torchft": torchft, "inprocess": inprocess}[tool](limit, tell, number)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
