"""FSDP with torch.distributed.checkpoint: a checkpoint of any number of ranks is resumed by any other number.

    redelastic run --rdzv-endpoint=redis.example --rdzv-id=my-job --nnodes=1:4 --nproc-per-node=8 \
        train_dcp.py /shared/my-job

or with ``torchrun --rdzv-backend=redis``. All nodes share the folder.
A small network learns from made-up numbers: replace the model and the data.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import redelastic


def main() -> None:
    """Train up to a number of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="for checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=10)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    first_step = resume(options.folder, model, optimizer)
    torch.manual_seed(first_step * dist.get_world_size() + dist.get_rank())  # each rank has samples of its own
    for step in range(first_step + 1, options.steps + 1):
        inputs = torch.randn(16, 16, device=device)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        wanted = torch.tensor(int(redelastic.should_checkpoint()), device=device)
        dist.all_reduce(wanted, op=dist.ReduceOp.MAX)  # one rank may hear of a drain a step before the others
        if wanted.item() or step % options.save_every == 0:
            save(options.folder, step, model, optimizer)
        redelastic.progress(step)


def save(folder: Path, step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Each rank writes its part; the coordinator writes `.metadata` when all are there."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder / f"step-{step:08}")


def resume(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Load the newest complete checkpoint, which rank 0 picks; returns its step, or 0."""
    box = [max((str(path.parent) for path in folder.glob("step-*/.metadata")), default="")]
    dist.broadcast_object_list(box)
    if not box[0]:
        return 0
    weights, moments = get_state_dict(model, optimizer)  # says which parts this rank needs
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=box[0])
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    return int(box[0].rpartition("-")[2])


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): with gloo it can hang while the model exists
