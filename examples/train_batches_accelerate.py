"""Accelerate with the same global batch and data order on any number of nodes; start it as train_batches.py.

All nodes share the folder.
A small network learns from made-up numbers: replace the model and the data.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed.nn  # imported later, it would keep the process group, whose threads can abort the exit
from accelerate import Accelerator, PartialState
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

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    inputs = torch.randn(4090, 16)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    batches = ElasticBatches(data, global_batch=64, micro_batch=16, epochs=None)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    # The batches are not prepared: Accelerate would divide them among the ranks again.
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    accelerator.register_for_checkpointing(batches)  # save_state and load_state include them
    if options.folder.exists():
        accelerator.load_state(str(options.folder))

    total = torch.zeros((), device=accelerator.device)
    for batch, samples in batches.load() if batches.step < options.steps else ():
        some, targets = (tensor.to(accelerator.device) for tensor in samples)
        with batch.sync(model):
            loss = torch.nn.functional.mse_loss(model(some), targets, reduction="sum") * batch.loss_factor
            accelerator.backward(loss)
        total += loss.detach()
        if batch.last:
            optimizer.step()
            optimizer.zero_grad()
            batches.commit()
            accelerator.print(f"loss {float(accelerator.reduce(total, 'mean')):.6f}")
            total.zero_()
            redelastic.progress(batches.step)
            if batches.step % options.save_every == 0:
                accelerator.save_state(
                    str(options.folder)
                )  # train_accelerate.py saves so that a node may die meanwhile
            if batches.step == options.steps:
                break


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # not in main(): with gloo it can hang while the model exists
