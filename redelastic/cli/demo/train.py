"""The demo's training script: plain DDP that resumes from its checkpoint, on any number of nodes.

It uses redelastic's ``should_checkpoint()`` and ``progress()``, and the round's epoch in the environment, by which a
checkpoint refuses writers of past rounds. A new run resumes from an earlier run's checkpoint, whose writers
are refused from then on. Run it under any torchrun: ``torchrun … -m redelastic.cli.demo.train --checkpoint F``.

Which samples a step takes depends on the seed and the step alone, and the loss is a mean over the global batch: the
result does not depend on how many nodes took part in which step. Rank 0 reports on stdout, one JSON object per line.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import redelastic

TEST_SAMPLES = 360  # of 1,797, held out

State = dict[str, Any]
Owner = tuple[str, int]  # a run's id, and the epoch of a round of it


def main() -> None:
    """Train from the checkpoint, or from the beginning, to the last step; then rank 0 measures the accuracy."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--batch", type=int, default=128, help="samples per step, over all nodes")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--pace", type=float, default=0.0, help="minimum seconds per step, as if the model were larger")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    epoch = int(os.environ.get("REDELASTIC_EPOCH", "0"))
    owner = os.environ.get("TORCHELASTIC_RUN_ID", ""), epoch
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    train, test = load_data()

    torch.manual_seed(options.seed)
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    step, samples, before = resume(options.checkpoint, model, optimizer)
    parallel = DistributedDataParallel(model)

    def save() -> None:
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        save_checkpoint(options.checkpoint, owner, before, {"step": step, "samples": samples, **states})

    if rank == 0:
        save()  # from now on the checkpoint is this round's: an older round's rank 0 can no longer write it
        report("start", epoch=epoch, step=step, world_size=world_size)
    while step < options.steps:
        started = time.monotonic()
        own = global_batch(step, options.batch, options.seed, len(train[0]))[rank::world_size]
        images, labels = (part[own] for part in train)
        loss = cross_entropy(parallel(images), labels, reduction="sum")
        optimizer.zero_grad()
        (
            loss * world_size / options.batch
        ).backward()  # DDP divides by world_size: the gradient is the global batch's mean
        optimizer.step()

        asked = redelastic.should_checkpoint()  # by an agent of `redelastic run`, before its node leaves
        totals = torch.stack([loss.detach(), torch.tensor(float(len(labels))), torch.tensor(float(asked))])
        dist.all_reduce(totals)
        step, samples = step + 1, samples + int(totals[1])
        if rank == 0:
            if step % options.save_every == 0 or step == options.steps or totals[2] > 0:
                save()
            report("step", epoch=epoch, step=step, world_size=world_size, loss=totals[0].item() / options.batch)
        redelastic.progress(step)
        time.sleep(max(0.0, options.pace - (time.monotonic() - started)))

    if rank == 0:
        report(
            "done", epoch=epoch, step=step, samples=samples, accuracy=measure(model, test), test_samples=TEST_SAMPLES
        )
    dist.barrier()


def global_batch(step: int, batch: int, seed: int, size: int) -> Tensor:
    """The indices of a step's samples: each pass over the data has its own order."""
    data_pass, position = divmod(step, size // batch)
    order = np.random.default_rng((seed, data_pass)).permutation(size)
    return torch.from_numpy(order[position * batch :][:batch])


def load_data() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Scikit-learn's handwritten digits: images and labels for training, and the held-out ones.

    Read from the file it installs: importing scikit-learn at each restart takes as long as torch.
    """
    digits = importlib.metadata.distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    table = np.loadtxt(str(digits), delimiter=",")
    images = torch.tensor(table[:, :64] / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(table[:, 64], dtype=torch.int64)
    order = torch.from_numpy(np.random.default_rng(0).permutation(len(labels)))
    test, train = order[:TEST_SAMPLES], order[TEST_SAMPLES:]
    return (images[train], labels[train]), (images[test], labels[test])


def make_network() -> nn.Module:
    """A small convolutional network for images of 8 by 8."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def measure(model: nn.Module, test: tuple[Tensor, Tensor]) -> float:
    """The share of held-out images that are recognised."""
    images, labels = test
    with torch.no_grad():
        right = int((model(images).argmax(1) == labels).sum())
    return right / len(labels)


def resume(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, int, Owner | None]:
    """Take over the checkpoint, if any: rank 0 reads it, so that all ranks have the same one.

    Returns:
        Steps and samples so far, and the checkpoint's owner.
    """
    box: list[State | None] = [load_checkpoint(path) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    if (state := box[0]) is None:
        return 0, 0, None
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["step"], state["samples"], owner_of(state)


def load_checkpoint(path: Path) -> State | None:
    """Read the checkpoint; None if there is none yet."""
    if not path.exists():
        return None
    state: State = torch.load(path, weights_only=True)
    return state


def owner_of(state: State) -> Owner:
    """The run and the round that wrote a checkpoint."""
    return state["run"], state["epoch"]


def save_checkpoint(path: Path, owner: Owner, before: Owner | None, training: State) -> None:
    """Replace the checkpoint atomically: readers find the old one or the new one.

    Args:
        path: of the file.
        owner: the round that saves.
        before: the owner of the checkpoint that this training resumed from.
        training: what is saved.

    Raises:
        RuntimeError: it belongs to a later round, or to a run that took it over: this process was left behind, and
            must not undo their work.
    """
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # nothing may come between the epoch check and the replacement
        newest = load_checkpoint(path)
        if newest is not None and (found := owner_of(newest)) not in (owner, before):
            run, epoch = found  # epochs only order rounds of the same run
            if run != owner[0] or epoch > owner[1]:
                later, over = f"round {epoch} of run {run!r}", f"round {owner[1]} of run {owner[0]!r}"
                raise RuntimeError(f"The checkpoint {path} is of {later}: {over} is over.")
        new = path.with_suffix(".new")
        torch.save({"run": owner[0], "epoch": owner[1], **training}, new)
        os.replace(new, path)  # noqa: PTH105  # the atomic one, by its well-known name


def report(event: str, **fields: float) -> None:
    """Write a report to stdout, as one line of JSON."""
    sys.stdout.write(json.dumps({"event": event, **fields}) + "\n")  # one write: print makes it two
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    dist.destroy_process_group()  # not in main(): with gloo it can hang while the model exists
