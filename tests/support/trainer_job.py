"""A job whose workers run a training script of examples/, unmodified, through `workers/paced.py`."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from tests.support.long_tests import LONG
from tests.support.torchrun_job import Job

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
PACED: Final = Path(__file__).parent / "workers" / "paced.py"
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "PET_SHUTDOWN_TIMEOUT": "300",  # a worker that does not end on SIGTERM fails the test
    "PET_DRAIN_TIMEOUT": "300",  # so does one that does not save
}
# What nodes import before workers start, by what the test names.
LIBRARIES: Final = {"transformers": "transformers.trainer", "lightning": "lightning", "torch": "torch._dynamo"}
HELD_STEP: Final = 25  # the step after which workers wait
START_TIMEOUT: Final = 150.0  # for workers to import their library, in seconds


def preload(library: str) -> tuple[str, ...]:
    """Options of `redelastic run` with which a node imports a library once; in long runs each worker imports it."""
    return () if LONG else (f"--preload={LIBRARIES.get(library, 'torch')}",)


class TrainerJob(Job):
    """Nodes that train with a script of examples/; arguments as for `Job`."""

    @property
    def saved(self) -> Path:
        """The folder of the checkpoints."""
        return self.directory / "saved"

    def train(self, script: str, *names: str, **more: Any) -> None:
        """Start nodes, which make 30 steps and save after 10 and 20."""
        _, _, *arguments = self._script(script)
        self.start(*names, script=PACED, arguments=arguments, env=ENVIRONMENT, **more)

    def train_by_accelerate(self, *names: str) -> None:
        """Start nodes with `accelerate.sh` and its script."""
        recipe = (EXAMPLES / "accelerate.sh").read_text()
        edited = re.sub(r"(?m)^script=\(.*?\)", f"script=({shlex.join(self._script('train_accelerate.py'))})", recipe)
        assert edited != recipe
        copy = self.directory / "accelerate.sh"
        copy.write_text(edited)
        where = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "REDIS_ADDRESS": self.server.endpoint}
        own = {"NNODES": self.nnodes, "GPUS": str(self.nproc), **where, **ENVIRONMENT}
        for name in names:
            self.launch(name, ["bash", str(copy), self.run_id, f"--rdzv_conf={self.settings()}"], own)

    def _script(self, name: str) -> list[str]:
        """The workers' command line, without Python."""
        own = [str(PACED), str(self.directory), str(HELD_STEP)]
        return [*own, str(EXAMPLES / name), str(self.saved), "--steps=30", "--save-every=10"]

    def wait_held(self, names: Iterable[str], after: int = 0) -> int:
        """Wait until the workers of exactly these nodes are held in a round after epoch `after`; returns its epoch."""
        names = set(names)

        def held() -> int:
            lines = [line for line in self.lines("step") if line.step == HELD_STEP and line.epoch > after]
            newest = max((line.epoch for line in lines), default=0)
            ranks = {line.rank: line.node for line in lines if line.epoch == newest}
            return newest if set(ranks.values()) == names and len(ranks) == len(names) * self.nproc else 0

        return self.wait(f"{sorted(names)} are held after epoch {after}", held, START_TIMEOUT)

    def wait_steps(self, after: int) -> int:
        """Wait for a step in a round after epoch `after`; returns its epoch."""
        return self.wait(
            f"steps are made after epoch {after}", lambda: self.epoch if self.epoch > after else 0, START_TIMEOUT
        )

    def first_step(self, epoch: int) -> int:
        """The first step of a round."""
        return min(line.step for line in self.lines("step") if line.epoch == epoch)
