"""The demo's training script: DDP on any number of nodes, whose processes survive if the launcher lets them.

Where they do not, they resume from a checkpoint, which knows the round that wrote it, and refuses writers of past
rounds. A new run resumes from an earlier run's checkpoint, whose writers are refused from then on. Run it under any
torchrun: ``torchrun … -m redelastic.cli.demo.train --checkpoint F``.

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
    options = parse_options()
    data, test = load_data()
    torch.manual_seed(options.seed)
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    samples = Counter()
    state = redelastic.State(model=model, optimizer=optimizer, samples=samples)
    before = resume(options.checkpoint, state, model, optimizer, samples)

    def train(this: redelastic.Round) -> None:
        owner = os.environ.get("TORCHELASTIC_RUN_ID", ""), this.epoch

        def save(step: int) -> None:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            save_checkpoint(options.checkpoint, owner, before, {"step": step, "samples": samples.number, **states})

        parallel = DistributedDataParallel(model)
        if this.rank == 0:
            save(state.step)  # from now on it is this round's: an older round's rank 0 can no longer write it
            report("start", epoch=this.epoch, step=state.step, world_size=this.size)
        # With a file, a round makes a step in any case: in it all ranks learn whether the file is there.
        goes_on = options.marker is not None or state.step < options.steps
        while goes_on:
            started = time.monotonic()
            own = global_batch(state.step, options.batch, options.seed, len(data[0]))[this.rank :: this.size]
            images, labels = (part[own] for part in data)
            loss = cross_entropy(parallel(images), labels, reduction="sum")
            optimizer.zero_grad()
            # DDP divides by the number of ranks: the gradient is the global batch's mean
            (loss * this.size / options.batch).backward()
            asked = redelastic.should_checkpoint()  # by an agent of `redelastic run`, before its node leaves
            marked = this.rank == 0 and options.marker is not None and options.marker.exists()
            totals = torch.tensor([loss.item(), len(labels), asked, marked])
            dist.all_reduce(totals)

            optimizer.step()  # no collective between this and the commit
            samples.number += int(totals[1])
            step = state.step + 1
            goes_on = step < options.steps or bool(totals[3] > 0)
            if this.rank == 0:
                if step % options.save_every == 0 or not goes_on or totals[2] > 0:
                    save(step)
                mean = totals[0].item() / options.batch
                report("step", epoch=this.epoch, step=step, world_size=this.size, loss=mean)
            state.commit()
            time.sleep(max(0.0, options.pace - (time.monotonic() - started)))
        if this.rank == 0:
            found = {"samples": samples.number, "accuracy": measure(model, test), "test_samples": TEST_SAMPLES}
            report("done", epoch=this.epoch, step=state.step, **found)
        dist.barrier()

    redelastic.survive(train, state)


def parse_options() -> argparse.Namespace:
    """The options on the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--while", dest="marker", type=Path, help="train on while this file exists")
    parser.add_argument("--batch", type=int, default=128, help="samples per step, over all nodes")
    parser.add_argument("--save-every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--pace", type=float, default=0.0, help="minimum seconds per step, as if the model were larger")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class Counter:
    """A number that is part of the state."""

    number = 0

    def state_dict(self) -> State:
        """As :class:`redelastic.State` takes it."""
        return {"number": self.number}

    def load_state_dict(self, state_dict: State) -> None:
        """As :class:`redelastic.State` gives it."""
        self.number = state_dict["number"]


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


def resume(
    path: Path, state: redelastic.State, model: nn.Module, optimizer: torch.optim.Optimizer, samples: Counter
) -> Owner | None:
    """Take over the checkpoint, if any; returns its owner. Ranks that read an older one get the newest later."""
    if (found := load_checkpoint(path)) is None:
        return None
    model.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    state.step, samples.number = found["step"], found["samples"]
    return owner_of(found)


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
