"""Training whose processes survive: when a node is lost, the others go on from the step that they have just made.

On each node: redelastic run --survive … train_surviving.py CHECKPOINT. Under torchrun it trains as any script does.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import redelastic

STEPS = 300
BATCH = 24  # samples of a step, whatever the number of processes
PACE = 0.1  # a larger model would take as long, in seconds

checkpoint = Path(sys.argv[1])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
optimizer = torch.optim.Adam(model.parameters())
state = redelastic.State(model=model, optimizer=optimizer)
if checkpoint.exists():  # only a job that starts again needs it
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    state.step = saved["step"]


def samples(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This process' part of a step's batch."""
    inputs = torch.rand(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::size]
    return inputs, inputs.sum(1, keepdim=True).sin()


def save() -> None:
    """Write a checkpoint, whole or not at all."""
    new = checkpoint.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": state.step}, new)
    new.replace(checkpoint)


def train(this: redelastic.Round) -> None:
    """Train from the last committed step on; called again in every round."""
    print(f"round {this.epoch}: rank {this.rank} of {this.size} begins at step {state.step}", flush=True)
    parallel = DistributedDataParallel(model) if this.size > 1 else model
    while state.step < STEPS:
        if this.rank == 0 and state.step % 100 == 0:
            save()
        inputs, targets = samples(state.step, this.rank, this.size)
        loss = this.size * ((parallel(inputs) - targets) ** 2).sum() / BATCH  # DDP divides by the size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(PACE)
        state.commit()  # the step is whole: it will not be made again; a round that is over ends here
    if this.rank == 0:
        save()


redelastic.survive(train, state)
print(f"finished at step {state.step}", flush=True)
