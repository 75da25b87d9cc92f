"""A training script for torchrun, free of redelastic except for the epoch: data-parallel, checkpoint, resume.

Gradients are summed on gloo by hand: at their first step, DDP and an optimizer import as much again as torch itself.

Step k trains on samples k*BATCH … k*BATCH+BATCH-1, dealt out by rank, whatever the world size: the weights after n
steps are known (`reference`). Each checkpoint holds its lineage: the steps that made it and the epoch of each.

Usage: train.py DIRECTORY. Everything happens in that directory; files there steer it:
  finish       all ranks stop together after the step at which rank 0 saw it
  fail-NODE    the worker of that node fails at its next step, and takes the file away
  linger-NODE  the worker of that node goes on after the last step until `release` is there
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

BATCH: Final = 12
WIDTH: Final = 4
RATE: Final = 0.05
PACE: Final = 0.1  # cost of a step beyond communication, in seconds


def samples(step: int, rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's samples of the step, with their inputs and targets."""
    indices = torch.arange(step * BATCH + rank, (step + 1) * BATCH, world)
    inputs = torch.sin(indices[:, None].double() * torch.tensor([0.7, 1.1, 1.3, 1.9], dtype=torch.float64))
    return indices, inputs, inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]], dtype=torch.float64)


def gradient(weights: torch.Tensor, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What these samples contribute to the whole batch's gradient."""
    weights = weights.detach().requires_grad_()
    loss = ((inputs @ weights - targets) ** 2).sum() / BATCH
    return torch.autograd.grad(loss, weights)[0]


def reference(steps: int) -> list[float]:
    """The weights after this many steps in one process."""
    weights = torch.zeros(WIDTH, 1, dtype=torch.float64)
    for step in range(steps):
        _, inputs, targets = samples(step, 0, 1)
        weights -= RATE * gradient(weights, inputs, targets)
    return [float(w) for w in weights.flatten()]


class Checkpoints:
    """One file per epoch: a worker of an older epoch cannot touch what a newer one wrote."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self._directory, self._epoch = directory, epoch

    def newest(self) -> dict[str, Any]:
        found = sorted(self._directory.glob("checkpoint-*.json"))
        empty = {"lineage": [], "weights": [0.0] * WIDTH}
        return dict(json.loads(found[-1].read_text())) if found else empty

    def write(self, state: dict[str, Any]) -> None:
        path = self._directory / f"checkpoint-{self._epoch:06}.json"
        new = path.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(path)


def main(directory: Path) -> None:
    from record import Recorder  # type: ignore[import-not-found]  # beside this script, which is not in a package here

    dist.init_process_group("gloo")
    record, rank, world = Recorder(directory), dist.get_rank(), dist.get_world_size()
    epoch, node = int(os.environ["REDELASTIC_EPOCH"]), os.environ["TEST_NODE"]
    checkpoints = Checkpoints(directory, epoch)
    broadcast = [checkpoints.newest() if rank == 0 else None]
    dist.broadcast_object_list(broadcast)
    state = broadcast[0]
    assert state is not None
    if rank == 0:
        checkpoints.write(state)
    weights = torch.tensor(state["weights"], dtype=torch.float64).reshape(WIDTH, 1)
    lineage: list[list[int]] = state["lineage"]
    record("start", step=len(lineage))
    finishing = False
    while not finishing:
        step = len(lineage)
        failure = directory / f"fail-{node}"
        if failure.exists():
            failure.unlink()
            raise RuntimeError(f"the worker of node {node} was told to fail at step {step}")
        indices, inputs, targets = samples(step, rank, world)
        total = gradient(weights, inputs, targets)
        dist.all_reduce(total)
        weights -= RATE * total
        votes = torch.zeros(BATCH + 1)  # how often each sample of the step was used, and whether rank 0 wants to finish
        votes[indices - step * BATCH] += 1
        votes[BATCH] = rank == 0 and (directory / "finish").exists()
        dist.all_reduce(votes)
        assert votes[:BATCH].eq(1).all(), f"step {step} used its samples {votes.tolist()} times"
        finishing = bool(votes[BATCH])
        lineage.append([step, epoch, world])
        if rank == 0:
            checkpoints.write({"lineage": lineage, "weights": weights.flatten().tolist()})
        record("step", step=step)
        time.sleep(PACE)
    dist.destroy_process_group()
    while (directory / f"linger-{node}").exists() and not (directory / "release").exists():
        record("linger")
        time.sleep(PACE)
    record("end", step=len(lineage))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
