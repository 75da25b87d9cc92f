"""A training script whose processes survive: DDP and Adam in float64, the same batch whatever the world size.

Usage: surviving.py DIRECTORY. Files there steer it:
  finish         all ranks stop together after the step at which rank 0 saw it
  fail-NODE      the worker of that node raises a ValueError at its next step, and takes the file away
  lonely-NODE    each step of all ranks fails: they wait for a message that nobody sends
  stuck-NODE     the worker of that node does not leave the next round that ends
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import redelastic

BATCH: Final = 12
PACE: Final = 0.05  # cost of a step beyond communication, in seconds


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model and its optimizer before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def loss_of(model: torch.nn.Module, step: int, rank: int, size: int) -> torch.Tensor:
    """What this rank's samples of a step contribute to the loss of the whole batch."""
    indices = torch.arange(step * BATCH + rank, (step + 1) * BATCH, size)
    inputs = torch.sin(indices[:, None].double() * torch.tensor([0.7, 1.1, 1.3, 1.9], dtype=torch.float64))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=torch.float64)
    loss: torch.Tensor = ((model(inputs) - targets) ** 2).sum() / BATCH
    return loss


def weights(model: torch.nn.Module) -> list[float]:
    """All of a model's parameters."""
    return [float(w) for p in model.parameters() for w in p.detach().flatten()]


def reference(steps: int) -> list[float]:
    """The weights after this many steps in one process."""
    model, optimizer = make()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step, 0, 1).backward()
        optimizer.step()
    return weights(model)


def main(directory: Path) -> None:
    """Train until there is a file ``finish``."""
    from record import Recorder  # type: ignore[import-not-found]  # beside this script

    node = os.environ["TEST_NODE"]
    model, optimizer = make()
    state = redelastic.State(model=model, optimizer=optimizer)

    def told(what: str) -> bool:
        return (directory / f"{what}-{node}").exists()

    def train(this: redelastic.Round) -> None:
        record = Recorder(directory)
        record("start", step=state.step)
        ddp = DistributedDataParallel(model)
        finishing = False
        while not finishing:
            if told("fail"):
                (directory / f"fail-{node}").unlink()
                raise ValueError(f"the worker of node {node} was told to fail at step {state.step}")
            if told("stuck"):
                record("stuck")
                while told("stuck"):
                    time.sleep(PACE)
            optimizer.zero_grad()
            # DDP takes the mean over the ranks
            (this.size * loss_of(ddp, state.step, this.rank, this.size)).backward()
            votes = torch.tensor([float(this.rank == 0 and (directory / "finish").exists()), float(told("lonely"))])
            dist.all_reduce(votes)
            if votes[1]:
                receiving = dist.irecv(torch.zeros(1), (this.rank + 1) % this.size)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=100))
            optimizer.step()
            finishing = bool(votes[0])
            record("step", step=state.step)
            time.sleep(PACE)
            state.commit()

    redelastic.survive(train, state, verify=True)
    Recorder(directory)("end", step=state.step)
    final = directory / f"final-{node}-{os.environ['LOCAL_RANK']}.json"
    final.write_text(json.dumps({"step": state.step, "weights": weights(model)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
