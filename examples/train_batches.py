"""DDP with the same global batch and data order on any number of nodes. Any node may die or drain; the rest resume.

    redelastic run --rdzv-endpoint=redis.example --rdzv-id=my-job --nnodes=1:4 --nproc-per-node=8 \
        train_batches.py /shared/my-job

or with ``torchrun --rdzv-backend=redis``. All nodes share the folder.
A small network learns from made-up numbers: replace the model and the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # imported later, it would keep the process group, whose threads can abort the exit
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import redelastic
from redelastic.data import ElasticBatches


def main() -> None:
    """Train up to a number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(4090, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = ElasticBatches(data, global_batch=64, micro_batch=16, epochs=None)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    path, losses = options.folder / "checkpoint.pt", []

    # Rank 0 picks the checkpoint: another rank may see an older file.
    box: list[Any] = [torch.load(path) if dist.get_rank() == 0 and path.exists() else None]
    dist.broadcast_object_list(box)
    if box[0]:
        model.load_state_dict(box[0]["model"])
        optimizer.load_state_dict(box[0]["optimizer"])
        batches.load_state_dict(box[0]["batches"])
        losses = box[0]["losses"]

    total = torch.zeros(())
    for batch, (some, targets) in batches.load() if batches.step < options.steps else ():
        with batch.sync(model):
            loss = torch.nn.functional.mse_loss(model(some), targets, reduction="sum") * batch.loss_factor
            loss.backward()
        total += loss.detach()
        if not batch.last:
            continue
        optimizer.step()
        optimizer.zero_grad()
        batches.commit()

        wanted = torch.tensor([float(redelastic.should_checkpoint()), total / dist.get_world_size()])
        dist.all_reduce(wanted)  # one rank may hear of a drain a step before the others
        losses.append(float(wanted[1]))
        total.zero_()
        if dist.get_rank() == 0 and (wanted[0] or batches.step % options.save_every == 0):
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "losses": losses}
            options.folder.mkdir(exist_ok=True)
            torch.save({**state, "batches": batches.state_dict()}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # a node may die while it is written
        redelastic.progress(batches.step)
        if batches.step == options.steps:
            break


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): with gloo it can hang while the model exists
