"""The recipes for data: a job of changing size has the losses of one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from redelastic.data import ElasticBatches, MicroBatch
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED
from tests.support.trainer_job import TrainerJob, preload

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
pytestmark = pytest.mark.timeout(600)


def reference(steps: int) -> list[float]:
    """The losses of the recipes' training in one process, without micro-batches."""
    torch.manual_seed(0)
    inputs = torch.randn(4090, 16)
    targets = inputs.sum(1, keepdim=True)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    whole = ElasticBatches(4090, global_batch=64, micro_batch=64, epochs=None)
    losses = []
    for step in range(steps):
        [batch] = whole.batches(step, 0, 1)
        loss = torch.nn.functional.mse_loss(model(inputs[batch.indices]), targets[batch.indices])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.long
def test_a_job_that_loses_and_gains_nodes_learns_as_one_process(server: RedisServer, tmp_path: Path) -> None:
    with TrainerJob(server, tmp_path, "1:3", agent=True) as job:
        job.train("train_batches.py", *"abc", options=preload("torch"))
        epoch = job.wait_held("abc")
        killed, *others = job.by_rank(epoch)
        killed.kill()
        epoch = job.wait_held({node.name for node in others}, epoch)
        assert job.first_step(epoch) == 21
        job.train("train_batches.py", "d", options=preload("torch"))
        epoch = job.wait_held({"d", *(node.name for node in others)}, epoch)
        *_, drained = job.by_rank(epoch)
        drained.terminate()
        assert job.wait_end(drained.name) == DRAINED
        epoch = job.wait_steps(epoch)
        job.tell("finish")
        for name in {"d", *(node.name for node in others)} - {drained.name}:
            assert job.wait_end(name) == 0, job.report()
        state = torch.load(job.saved / "checkpoint.pt")
    assert state["batches"]["step"] == 30
    torch.testing.assert_close(state["losses"], reference(30), rtol=1e-4, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("library", ["accelerate", "lightning", "transformers"])
def test_trainers_of_two_sizes_learn_as_one_process(library: str, tmp_path: Path) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'redelastic[integrations]'")
    losses: list[float] = []
    for size, steps in ((1, 4), (3, 8)):
        script = [str(EXAMPLES / f"train_batches_{library}.py"), str(tmp_path / "saved")]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
        done = subprocess.run(
            [*torchrun, *script, f"--steps={steps}", "--save-every=4"],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        losses += map(float, re.findall(r"^loss ([0-9.]+)$", done.stdout, re.MULTILINE))
    torch.testing.assert_close(losses, reference(8), rtol=1e-4, atol=0)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than the machine has cores
def test_a_loader_of_torchdata_resumes_at_the_step_and_not_by_its_own_state() -> None:
    pytest.importorskip("torchdata", reason="torchdata is not installed: pip install torchdata")
    page = (EXAMPLES.parent / "docs" / "how-to" / "data.md").read_text()
    [recipe] = re.findall(r"```python\n(.*?)```", textwrap.dedent(page.partition('=== "torchdata"\n')[2]), re.DOTALL)
    dataset = list(range(100, 150))
    batches = ElasticBatches(dataset, global_batch=12, micro_batch=5)
    loaders: list[Any] = []

    def run(step: int, size: int) -> list[tuple[MicroBatch, list[int]]]:
        taken = []

        def train(batch: MicroBatch, samples: torch.Tensor) -> None:
            taken.append((batch, samples.tolist()))
            if batch.last:
                batches.commit()

        batches.step = step
        given = {"batches": batches, "dataset": dataset, "rank": 0, "size": size, "train": train}
        exec(recipe, given)  # noqa: S102
        loaders.append(given["loader"])
        return taken

    for begin, size in ((0, 2), (1, 3), (4, 1)):
        parts = [batch for step in range(begin, 5) for batch in batches.batches(step, 0, size)]
        assert run(begin, size) == [(batch, [dataset[index] for index in batch.indices]) for batch in parts]

    of_two, of_three, _ = loaders
    for _ in zip(range(2), of_two, strict=False):  # a step of two ranks has two micro-batches
        state = of_two.state_dict()
    of_three.load_state_dict(state)
    assert next(iter(of_three)).tolist() != [dataset[index] for index in batches.batches(1, 0, 3)[0].indices]
