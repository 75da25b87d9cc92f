"""A loop with Hugging Face's Accelerate on as many nodes as there are. Any node may die or drain; the rest resume.

    redelastic run --rdzv-endpoint=redis.example --rdzv-id=my-job --nnodes=1:4 --nproc-per-node=8 \
        train_accelerate.py /shared/my-job

or with ``torchrun --rdzv-backend=redis``, or by ``accelerate launch`` as in accelerate.sh. All nodes share the folder.
A small network learns from made-up numbers: replace the model and the data.
"""

from __future__ import annotations

import argparse
import shutil
from itertools import chain, repeat
from pathlib import Path

import torch
import torch.distributed.nn  # imported later, it would keep the process group, whose threads can abort the exit
from accelerate import Accelerator, PartialState
from accelerate.utils import broadcast_object_list, set_seed
from torch.utils.data import DataLoader, TensorDataset

import redelastic


def main() -> None:
    """Train up to a number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())  # else each process would train alone without a GPU
    set_seed(0)
    inputs = torch.randn(4096, 16)
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=16, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    first_step = resume(accelerator, options.folder)
    set_seed(first_step, device_specific=True)  # so that the samples are not those of the first steps again
    batches = chain.from_iterable(repeat(data))
    for step in range(first_step + 1, options.steps + 1):
        inputs, targets = next(batches)
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()

        wanted = torch.tensor(int(redelastic.should_checkpoint()), device=accelerator.device)
        wanted = accelerator.reduce(wanted, "sum")  # one rank may hear of a drain a step before the others
        if wanted.item() or step % options.save_every == 0:
            save(accelerator, options.folder, step)
        redelastic.progress(step)


def resume(accelerator: Accelerator, folder: Path) -> int:
    """Load the newest checkpoint, which rank 0 picks; returns its step, or 0."""
    box = [str(max(folder.glob("step-*"), default=""))]
    broadcast_object_list(box)
    if not box[0]:
        return 0
    accelerator.load_state(box[0])
    return int(box[0].rpartition("-")[2])


def save(accelerator: Accelerator, folder: Path, step: int) -> None:
    """Write a checkpoint, which gets its name when it is complete: a node may die while it is written."""
    new = folder / "new"
    if accelerator.is_main_process:
        shutil.rmtree(new, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(new))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        new.rename(folder / f"step-{step:08}")


if __name__ == "__main__":
    main()
    PartialState().destroy_process_group()  # not in main(): with gloo it can hang while the model exists
