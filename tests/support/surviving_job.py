"""A job of `redelastic run --survive`: the processes of each round, their steps and their final weights."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.agent_job import AgentJob
from tests.support.workers.surviving import reference, samples_of

SCRIPT: Final = Path(__file__).parent / "workers" / "surviving.py"


class SurvivingJob(AgentJob):
    """Nodes whose workers run `workers/surviving.py`."""

    def begin(self, *names: str, survive: bool = True, options: tuple[str, ...] = (), **more: Any) -> None:
        """Start nodes; without `survive`, each round has new workers, which resume from a checkpoint."""
        self.start(
            *names, script=SCRIPT, options=(*(["--survive", "--admit=saved"] if survive else []), *options), **more
        )

    def pids(self, epoch: int) -> dict[str, set[int]]:
        """The pids of a round's workers, by node."""
        found: dict[str, set[int]] = {}
        for line in self.lines("start"):
            if line.epoch == epoch:
                found.setdefault(line.node, set()).add(line.pid)
        return found

    def committed(self) -> list[int]:
        """The steps that rank 0 has made, in order."""
        return [line.step for line in self.lines("step") if line.rank == 0]

    def begun(self, pid: int) -> list[int]:
        """The steps that a process has begun, in order."""
        return [line.step for line in self.lines("samples") if line.pid == pid]

    def end(self, *names: str) -> None:
        """Let the job finish, and check that its weights, samples and losses are those of a training in one process."""
        self.tell("finish")
        for name in names:
            assert self.wait_end(name) == 0, self.report()
            for local_rank in range(self.nproc):
                final = json.loads((self.directory / f"final-{name}-{local_rank}.json").read_text())
                weights, losses = reference(final["step"])
                assert final["weights"] == pytest.approx(weights, abs=1e-10), name
        self.check_samples(losses)

    def check_samples(self, losses: list[float]) -> None:
        """Check samples and losses of each step, of one that was repeated those of its last time.

        Later steps than the last one were made before a restart, and the job finished before it repeated them.
        """
        made: dict[int, int] = {}
        for line in self.lines("step"):
            if line.step < len(losses):
                made[line.step] = max(line.epoch, made.get(line.step, 0))
        assert sorted(made) == list(range(len(losses)))
        used: dict[int, Counter[int]] = {step: Counter() for step in made}
        for line in self.lines():
            if made.get(line.step) == line.epoch and line.event == "samples":
                used[line.step].update(line.samples)
            elif made.get(line.step) == line.epoch and line.event == "step":
                assert line.loss == pytest.approx(losses[line.step], abs=1e-10), line
        assert used == {step: Counter(samples_of(step)) for step in made}
