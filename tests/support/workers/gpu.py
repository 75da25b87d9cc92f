"""A training script with DDP on a GPU, of whose memory it holds 1 GiB, or on the CPU where there is none.

Usage: gpu.py DIRECTORY. TEST_BACKEND names the backend of the collectives. Files in the directory steer it:
  finish            all ranks stop together after the step in which rank 0 sees it
  kernel-NODE       the worker of that node starts a kernel that does not end, and removes the file
  collective-NODE   the worker of that node never calls the next collective, and removes the file
  assert-NODE       the worker of that node indexes out of range on its GPU, and removes the file
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import redelastic

PACE: Final = 0.05
ON_GPU: Final = torch.cuda.is_available()


def run_for_ever(device: torch.device) -> None:
    """Start an endless kernel, and wait for it; on the CPU, sleep."""
    if not ON_GPU:
        time.sleep(1e6)
    torch.cuda._sleep(2**62)
    torch.cuda.synchronize(device)


def index_out_of_range(device: torch.device) -> None:
    """Fail an assertion in a kernel, after which the CUDA context is unusable."""
    values = torch.zeros(4, device=device)
    values[torch.full((4,), 99, device=device)] += 1
    if ON_GPU:
        torch.cuda.synchronize(device)


def main(directory: Path) -> None:
    from record import Recorder  # type: ignore[import-not-found]  # beside this script, which is not in a package here

    node = os.environ["TEST_NODE"]
    os.environ["NCCL_HOSTID"] = node  # nodes share one GPU, which NCCL refuses to ranks of one host
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group(os.environ["TEST_BACKEND"])
    record, rank = Recorder(directory), dist.get_rank()
    held = torch.zeros(2**28 if ON_GPU else 1, device=device)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    record("start")
    step, finishing = 0, False

    def is_requested(what: str) -> bool:
        file = directory / f"{what}-{node}"
        found = file.exists()
        file.unlink(missing_ok=True)
        return found

    while not finishing:
        if is_requested("kernel"):
            run_for_ever(device)
        if is_requested("collective"):
            time.sleep(1e6)
        if is_requested("assert"):
            index_out_of_range(device)
        optimizer.zero_grad()
        model(torch.ones(8, 64, device=device)).square().mean().backward()
        optimizer.step()
        held[0] = rank == 0 and (directory / "finish").exists()
        dist.all_reduce(held[:1])
        finishing = bool(held[0].item())
        redelastic.progress(step)
        record("step", step=step)
        step += 1
        time.sleep(PACE)
    record("end", step=step)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    dist.destroy_process_group()
