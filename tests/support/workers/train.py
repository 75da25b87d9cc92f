"""A data-parallel training script with checkpoints. Of redelastic it uses the environment variable of the epoch alone.

Step k trains on samples k*BATCH … k*BATCH+BATCH-1, divided among the ranks, so the weights after n steps are the same
for any world size (`reference`). Each checkpoint has its lineage: the steps that led to it, with the epoch and the
world size of each. `group.py` sums the gradients, or torch with gloo if TEST_GLOO is set; importing torch takes 2 s.

Usage: train.py DIRECTORY. Its checkpoints and its record are there, and files there steer it:
  finish       all ranks stop together after the step in which rank 0 sees it
  fail-NODE    the worker of that node fails at its next step, and removes the file
  linger-NODE  the worker of that node does not end after the last step before there is `release`
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

BATCH: Final = 12
INPUTS: Final = (0.7, 1.1, 1.3, 1.9)  # the frequencies of a sample's inputs
TARGET: Final = (1.0, -2.0, 3.0, 0.5)  # the weights to be learnt
RATE: Final = 0.05
PACE: Final = 0.1  # cost of a step beyond communication, in seconds


def samples(step: int, rank: int, world: int) -> range:
    """The numbers of a rank's samples of a step."""
    return range(step * BATCH + rank, (step + 1) * BATCH, world)


def gradient(weights: list[float], numbers: Iterable[int]) -> list[float]:
    """The part of these samples in the gradient of the mean squared error over the batch."""
    total = [0.0] * len(weights)
    for number in numbers:
        inputs = [math.sin(number * frequency) for frequency in INPUTS]
        error = sum(i * (weight - target) for i, weight, target in zip(inputs, weights, TARGET, strict=True))
        total = [t + 2 * error * i / BATCH for t, i in zip(total, inputs, strict=True)]
    return total


def updated(weights: list[float], total: list[float]) -> list[float]:
    """The weights after a step with this gradient."""
    return [weight - RATE * t for weight, t in zip(weights, total, strict=True)]


def reference(steps: int) -> list[float]:
    """The weights after this many steps in one process."""
    weights = [0.0] * len(TARGET)
    for step in range(steps):
        weights = updated(weights, gradient(weights, samples(step, 0, 1)))
    return weights


class Gloo:
    """The part of `group.Group` that this script uses, by torch and gloo."""

    def __init__(self) -> None:
        import torch  # takes 2 s
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        dist.init_process_group("gloo")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def total(self, *numbers: float) -> list[float]:
        summed = self._torch.tensor(numbers, dtype=self._torch.float64)
        self._dist.all_reduce(summed)
        return [float(number) for number in summed]

    def close(self) -> None:
        self._dist.destroy_process_group()


def new_group(directory: Path) -> Any:
    """The process group of this round's workers."""
    if os.environ.get("TEST_GLOO"):
        return Gloo()
    from group import Group  # type: ignore[import-not-found]  # beside this script, in no package here

    group = Group()
    group.connect(directory)
    return group


class Checkpoints:
    """One file per epoch, so that a worker of an older epoch cannot overwrite what a newer one wrote."""

    def __init__(self, directory: Path, epoch: int) -> None:
        self._directory, self._own = directory, directory / f"checkpoint-{epoch:06}.json"

    def adopt_newest(self) -> None:
        """Copy the newest checkpoint to this epoch's."""
        found = sorted(self._directory.glob("checkpoint-*.json"))
        empty = {"lineage": [], "weights": [0.0] * len(TARGET)}
        self.write(json.loads(found[-1].read_text()) if found else empty)

    def read(self) -> dict[str, Any]:
        return dict(json.loads(self._own.read_text()))

    def write(self, state: dict[str, Any]) -> None:
        new = self._own.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.replace(self._own)


def main(directory: Path) -> None:
    from record import Recorder  # type: ignore[import-not-found]  # beside this script

    group = new_group(directory)
    record, rank, world = Recorder(directory), group.rank, group.size
    epoch, node = int(os.environ["REDELASTIC_EPOCH"]), os.environ["TEST_NODE"]
    checkpoints = Checkpoints(directory, epoch)
    if rank == 0:
        checkpoints.adopt_newest()
    group.total(0)  # a barrier: the checkpoint is there now, and changes only after all ranks have made a step
    state = checkpoints.read()
    weights: list[float] = state["weights"]
    lineage: list[list[int]] = state["lineage"]
    record("start", step=len(lineage))
    finishing = False
    while not finishing:
        step = len(lineage)
        failure = directory / f"fail-{node}"
        if failure.exists():
            failure.unlink()
            raise RuntimeError(f"the worker of node {node} was told to fail at step {step}")
        numbers = samples(step, rank, world)
        weights = updated(weights, group.total(*gradient(weights, numbers)))
        # how often each sample of the step was used, and whether rank 0 wants to finish
        wants_to_finish = rank == 0 and (directory / "finish").exists()
        *used, finish = group.total(*(step * BATCH + i in numbers for i in range(BATCH)), wants_to_finish)
        assert used == [1] * BATCH, f"step {step} used its samples {used} times"
        finishing = bool(finish)
        lineage.append([step, epoch, world])
        if rank == 0:
            checkpoints.write({"lineage": lineage, "weights": weights})
        record("step", step=step)
        time.sleep(PACE)
    group.close()
    while (directory / f"linger-{node}").exists() and not (directory / "release").exists():
        record("linger")
        time.sleep(PACE)
    record("end", step=len(lineage))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
