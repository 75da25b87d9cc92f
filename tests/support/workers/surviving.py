"""A training script whose processes survive: DDP and Adam in float64, and the same batches for any world size.

It trains on a GPU where there is one.

Usage: surviving.py DIRECTORY. A new process begins with the newest checkpoint there. Files there steer it:
  finish         all ranks stop together after the step in which rank 0 sees it
  fail-NODE      the worker of that node raises a ValueError at its next step, and removes the file
  poison-NODE    it does so at the step that this file names, each time
  lonely-NODE    each step of all ranks fails: they wait for a message that no rank sends
  stuck-NODE     the worker of that node waits before a step while this file is there, and leaves no round
  late-NODE      a new worker of that node is not ready while this file is there
  linger         the exchange of state takes longer, by as many seconds as this file says
  loader         each worker has a data loader, whose process is forked in each round and so has the connections, too
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import redelastic
from redelastic.data import ElasticBatches, MicroBatch

Record = Callable[..., None]  # `Recorder.__call__`

SAMPLES: Final = 62  # the last of an epoch's six steps has two: of three ranks, one has none
BATCH: Final = 12
MICRO_BATCH: Final = 4
SAVE_EVERY: Final = 10
DEVICE: Final = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
PACE: Final = float(os.environ.get("TEST_PACE", "0.05"))  # cost of a step beyond communication, in seconds


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, ElasticBatches]:
    """The model, its optimizer and its data before the first step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double().to(DEVICE)
    batches = ElasticBatches(SAMPLES, global_batch=BATCH, micro_batch=MICRO_BATCH, epochs=None)
    return model, torch.optim.Adam(model.parameters(), lr=0.01), batches


def loss_of(model: torch.nn.Module, samples: list[int]) -> torch.Tensor:
    """The sum of the samples' losses."""
    numbers = functools.partial(torch.tensor, dtype=torch.float64, device=DEVICE)
    inputs = torch.sin(numbers(samples)[:, None] * numbers([0.7, 1.1, 1.3, 1.9]))
    targets = inputs @ numbers([[1.0], [-2.0], [3.0], [0.5]])
    loss: torch.Tensor = ((model(inputs) - targets) ** 2).sum()
    return loss


def weights(model: torch.nn.Module) -> list[float]:
    """All parameters of a model, as one list."""
    return [float(w) for p in model.parameters() for w in p.detach().flatten()]


def samples_of(step: int) -> list[int]:
    """The samples of a step, of all ranks."""
    _, _, batches = make()
    return [index for batch in batches.batches(step, 0, 1) for index in batch.indices]


@functools.cache
def reference(steps: int) -> tuple[list[float], list[float]]:
    """The weights after this many steps in one process, and the loss of each step."""
    model, optimizer, _ = make()
    losses = []
    for step in range(steps):
        samples = samples_of(step)
        loss = loss_of(model, samples) / len(samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return weights(model), losses


class ExchangeRecorder:
    """An entry of the state that records when it is exchanged, and can delay the exchange."""

    def __init__(self, directory: Path, recorder: Callable[[Path], Any]) -> None:
        self._directory, self._recorder = directory, recorder

    def state_dict(self) -> dict[str, Any]:
        with contextlib.closing(self._recorder(self._directory)) as record:
            record("shares")
        with contextlib.suppress(FileNotFoundError):
            time.sleep(float((self._directory / "linger").read_text()))
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class Training:
    """A worker's training: what it keeps from round to round, and what it does in one."""

    def __init__(self, directory: Path, recorder: Callable[[Path], Any]) -> None:
        self._directory, self._checkpoint, self._recorder = directory, directory / "checkpoint.pt", recorder
        self._node = os.environ["TEST_NODE"]
        self.model, self._optimizer, self._batches = make()
        self._entries: dict[str, Any] = {"model": self.model, "optimizer": self._optimizer, "batches": self._batches}
        self.state = redelastic.State(**self._entries, witness=ExchangeRecorder(directory, recorder))
        if self._checkpoint.exists():
            saved = torch.load(self._checkpoint)
            for name, entry in self._entries.items():
                entry.load_state_dict(saved[name])
            self.state.step = self._batches.step

    def _save(self) -> None:
        new = self._checkpoint.with_suffix(".new")
        torch.save({name: entry.state_dict() for name, entry in self._entries.items()}, new)
        new.replace(self._checkpoint)

    def _loader(self) -> Iterable[object]:
        samples: Any = range(10**9)
        return DataLoader(samples, num_workers=1) if (self._directory / "loader").exists() else count()

    def _is_asked(self, what: str) -> bool:
        return (self._directory / f"{what}-{self._node}").exists()

    def train(self, this: redelastic.Round) -> None:
        with contextlib.closing(self._recorder(self._directory)) as record:
            record("start", step=self.state.step)
            ddp = DistributedDataParallel(self.model)
            self._optimizer.zero_grad()  # the last round may have ended between two micro-batches
            step: list[MicroBatch] = []
            for batch, _ in zip(self._batches, self._loader(), strict=False):
                step.append(batch)
                if batch.last:
                    self._fail_on_request(record)
                    if self._make_step(step, ddp, this, record):
                        return
                    step = []

    def _fail_on_request(self, record: Record) -> None:
        """Fail or wait before a step, as the files say."""
        if self._is_asked("fail"):
            (self._directory / f"fail-{self._node}").unlink()
            raise ValueError(f"the worker of node {self._node} was told to fail at step {self.state.step}")
        if self._is_asked("poison") and self.state.step == int((self._directory / f"poison-{self._node}").read_text()):
            raise ValueError(f"the worker of node {self._node} always fails at step {self.state.step}")
        if self._is_asked("stuck"):
            record("stuck")
            while self._is_asked("stuck"):
                time.sleep(PACE)

    def _make_step(self, step: list[MicroBatch], ddp: torch.nn.Module, this: redelastic.Round, record: Record) -> bool:
        """Make a step; returns whether it was the last."""
        samples = [index for batch in step if not batch.padding for index in batch.indices]
        record("samples", step=self.state.step, samples=samples)  # before any rank can complete the step
        total = 0.0
        for batch in step:
            with batch.sync(ddp):
                loss = loss_of(ddp, batch.indices) * batch.loss_factor
                loss.backward()
            total += float(loss.detach())
        finish = this.rank == 0 and (self._directory / "finish").exists()
        wanted = [finish, self._is_asked("lonely"), redelastic.should_checkpoint(), total / this.size]
        votes = torch.tensor(wanted, dtype=torch.float64, device=DEVICE)
        dist.all_reduce(votes)
        if votes[1]:
            receiving = dist.irecv(torch.zeros(1, device=DEVICE), (this.rank + 1) % this.size)
            assert receiving is not None
            receiving.wait(timedelta(milliseconds=100))
        if this.rank == 0 and (votes[2] or self.state.step % SAVE_EVERY == 0):
            self._save()  # the last committed state, without this step
        self._optimizer.step()
        record("step", step=self.state.step, loss=float(votes[3]))
        self._optimizer.zero_grad()
        time.sleep(PACE)
        self.state.commit()
        return bool(votes[0])


def main(directory: Path) -> None:
    """Train until there is a file ``finish``."""
    from record import Recorder  # type: ignore[import-not-found]  # beside this script

    os.environ["NCCL_HOSTID"] = os.environ["TEST_NODE"]  # nodes share one GPU, which NCCL refuses to ranks of one host
    training = Training(directory, Recorder)
    while (directory / f"late-{os.environ['TEST_NODE']}").exists():
        time.sleep(PACE)
    redelastic.survive(training.train, training.state, verify=True)
    step = training.state.step
    Recorder(directory)("end", step=step)
    final = directory / f"final-{os.environ['TEST_NODE']}-{os.environ['LOCAL_RANK']}.json"
    final.write_text(json.dumps({"step": step, "weights": weights(training.model)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
