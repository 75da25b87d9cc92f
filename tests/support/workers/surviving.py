"""A training script whose processes survive: DDP and Adam in float64, the same batch whatever the world size.

Usage: surviving.py DIRECTORY. Files there steer it:
  finish         all ranks stop together after the step at which rank 0 saw it
  fail-NODE      the worker of that node raises a ValueError at its next step, and takes the file away
  lonely-NODE    each step of all ranks fails: they wait for a message that nobody sends
  stuck-NODE     the worker of that node does not leave the next round that ends
"""

from __future__ import annotations

import contextlib
import functools
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
from redelastic.data import ElasticBatches, MicroBatch

SAMPLES: Final = 600
BATCH: Final = 12
PACE: Final = 0.05  # cost of a step beyond communication, in seconds


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, ElasticBatches]:
    """The model, its optimizer and its data before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    batches = ElasticBatches(SAMPLES, global_batch=BATCH, micro_batch=BATCH, epochs=None)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), batches


def loss_of(model: torch.nn.Module, batch: MicroBatch) -> torch.Tensor:
    """The loss of a rank's samples of a step; its mean over the ranks is the loss of the whole batch."""
    indices = torch.tensor(batch.indices, dtype=torch.float64)
    inputs = torch.sin(indices[:, None] * torch.tensor([0.7, 1.1, 1.3, 1.9], dtype=torch.float64))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=torch.float64)
    loss: torch.Tensor = batch.loss_factor * ((model(inputs) - targets) ** 2).sum()
    return loss


def weights(model: torch.nn.Module) -> list[float]:
    """All of a model's parameters."""
    return [float(w) for p in model.parameters() for w in p.detach().flatten()]


@functools.cache
def reference(steps: int) -> tuple[list[float], float]:
    """The weights after this many steps in one process, and the loss of the last one."""
    model, optimizer, batches = make()
    loss = torch.tensor(0.0)
    for step in range(steps):
        optimizer.zero_grad()
        [batch] = batches.batches(step, 0, 1)
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
    return weights(model), float(loss.detach())


def main(directory: Path) -> None:
    """Train until there is a file ``finish``."""
    from record import Recorder  # type: ignore[import-not-found]  # beside this script

    node = os.environ["TEST_NODE"]
    model, optimizer, batches = make()
    state = redelastic.State(model=model, optimizer=optimizer, batches=batches)
    final_loss = 0.0

    def told(what: str) -> bool:
        return (directory / f"{what}-{node}").exists()

    def train(this: redelastic.Round) -> None:
        with contextlib.closing(Recorder(directory)) as record:
            record("start", step=state.step)
            make_steps(this, record)

    def make_steps(this: redelastic.Round, record: Recorder) -> None:
        nonlocal final_loss
        ddp = DistributedDataParallel(model)
        for batch in batches:
            record("begin", step=state.step)
            if told("fail"):
                (directory / f"fail-{node}").unlink()
                raise ValueError(f"the worker of node {node} was told to fail at step {state.step}")
            if told("stuck"):
                record("stuck")
                while told("stuck"):
                    time.sleep(PACE)
            optimizer.zero_grad()
            loss = loss_of(ddp, batch)
            loss.backward()
            finish = this.rank == 0 and (directory / "finish").exists()
            votes = torch.tensor([finish, told("lonely"), loss.detach() / this.size], dtype=torch.float64)
            dist.all_reduce(votes)
            if votes[1]:
                receiving = dist.irecv(torch.zeros(1), (this.rank + 1) % this.size)
                assert receiving is not None
                receiving.wait(timedelta(milliseconds=100))
            optimizer.step()
            record("step", step=state.step)
            time.sleep(PACE)
            state.commit()
            if votes[0]:
                final_loss = float(votes[2])
                return

    redelastic.survive(train, state, verify=True)
    Recorder(directory)("end", step=state.step)
    final = directory / f"final-{node}-{os.environ['LOCAL_RANK']}.json"
    final.write_text(json.dumps({"step": state.step, "weights": weights(model), "loss": final_loss}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
