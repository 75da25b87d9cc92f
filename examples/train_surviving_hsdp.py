"""HSDP whose processes survive: each node has all of the model, in shards, so that the others can do without it.

On each node: redelastic run --survive --nproc-per-node=2 … train_surviving_hsdp.py FOLDER. Under torchrun it trains as
any script does.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import cast

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import redelastic

STEPS = 300
SAVE_EVERY = 100
BATCH = 24  # samples of a step, whatever the number of processes
MAX_NORM = 1.0  # of the gradient
PACE = 0.1  # a larger model would take as long, in seconds
SHARDS = int(os.environ["LOCAL_WORLD_SIZE"])
SHARD = int(os.environ["LOCAL_RANK"])  # that this process has, in every round
DEVICE = torch.device("cuda", SHARD) if torch.cuda.is_available() else torch.device("cpu")


def build() -> torch.nn.Sequential:
    """The whole model. It has no buffers: they would be an entry of the state, too, and `fill` would copy them."""
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))


def part(whole: torch.Tensor) -> torch.nn.Parameter:
    """This process' part of a parameter: FSDP splits the first dimension, and the last ranks may get nothing."""
    parts = [*whole.detach().chunk(SHARDS), *[whole.detach()[:0]] * SHARDS]
    return torch.nn.Parameter(parts[SHARD].clone().to(DEVICE))


# What survives: plain tensors of no group. FSDP's own parameters belong to the mesh of one round.
torch.manual_seed(0)
shard = torch.nn.ParameterList(part(parameter) for parameter in build().parameters())
optimizer = torch.optim.Adam(shard.parameters())
state = redelastic.State(shard=shard, optimizer=optimizer)

checkpoints = Path(sys.argv[1])
complete = [
    int(folder.name) for folder in checkpoints.glob("[0-9]*") if len([*folder.glob(f"*-of-{SHARDS}.pt")]) == SHARDS
]
if complete:  # only a job that starts again needs it
    state.step = max(complete)
    saved = torch.load(checkpoints / str(state.step) / f"{SHARD}-of-{SHARDS}.pt", map_location=DEVICE)
    shard.load_state_dict(saved["shard"])
    optimizer.load_state_dict(saved["optimizer"])


def save() -> None:
    """Write this process' shard, whole or not at all."""
    folder = checkpoints / str(state.step)
    folder.mkdir(parents=True, exist_ok=True)
    new = folder / f"{SHARD}.new"
    torch.save({"shard": shard.state_dict(), "optimizer": optimizer.state_dict()}, new)
    new.rename(folder / f"{SHARD}-of-{SHARDS}.pt")


def sharded(mesh: DeviceMesh | None) -> torch.nn.Module:
    """The model on the mesh of a round, without values."""
    with torch.device("meta"):
        model = build()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model.to_empty(device=DEVICE)


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This process' part of one of FSDP's parameters or gradients."""
    return cast(DTensor, tensor).to_local()


@torch.no_grad()
def fill(model: torch.nn.Module) -> None:
    """Copy what survives into the model."""
    for own, parameter in zip(shard, model.parameters(), strict=True):
        local(parameter).copy_(own)


def samples(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This process' part of a step's batch."""
    inputs = torch.rand(BATCH, 8, generator=torch.Generator().manual_seed(step))[rank::size].to(DEVICE)
    return inputs, inputs.sum(1, keepdim=True).sin()


def train(this: redelastic.Round) -> None:
    """Train from the last committed step on; called again in every round."""
    print(f"round {this.epoch}: rank {this.rank} of {this.size} begins at step {state.step}", flush=True)
    model = sharded(this.mesh)
    while state.step < STEPS:
        if this.rank < SHARDS and state.step % SAVE_EVERY == 0:
            save()
        fill(model)
        inputs, targets = samples(state.step, this.rank, this.size)
        loss = this.size * ((model(inputs) - targets) ** 2).sum() / BATCH  # FSDP divides by the size
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        for own, parameter in zip(shard, model.parameters(), strict=True):
            own.grad, parameter.grad = local(parameter.grad), None
        dist.all_reduce(loss)  # all have their gradients: no shard makes a step that another one cannot make
        optimizer.step()
        time.sleep(PACE)
        state.commit()  # the step is whole: it will not be made again; a round that is over ends here
    if this.rank < SHARDS:
        save()


redelastic.survive(train, state, shards=SHARDS)
print(f"finished at step {state.step}", flush=True)
