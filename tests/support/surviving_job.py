"""A job of `redelastic run --survive`: which processes took part in which round, and what they ended with."""

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
        """Start nodes; without `survive`, each round starts the workers anew, and they go on from a checkpoint."""
        self.start(
            *names, script=SCRIPT, options=(*(["--survive", "--admit=saved"] if survive else []), *options), **more
        )

    def pids(self, epoch: int) -> dict[str, set[int]]:
        """The workers' processes in a round, by node."""
        found: dict[str, set[int]] = {}
        for line in self.lines("start"):
            if line.epoch == epoch:
                found.setdefault(line.node, set()).add(line.pid)
        return found

    def committed(self) -> list[int]:
        """Each step that rank 0 has made, in order."""
        return [line.step for line in self.lines("step") if line.rank == 0]

    def begun(self, pid: int) -> list[int]:
        """Each step that a process has begun, in order."""
        return [line.step for line in self.lines("samples") if line.pid == pid]

    def end(self, *names: str) -> None:
        """Let the job finish; all must have the weights of one process, and every step its samples and its loss."""
        self.tell("finish")
        for name in names:
            assert self.wait_end(name) == 0, self.report()
            for local_rank in range(self.nproc):
                final = json.loads((self.directory / f"final-{name}-{local_rank}.json").read_text())
                weights, losses = reference(final["step"])
                assert final["weights"] == pytest.approx(weights, abs=1e-10), name
        self.check_samples(losses)

    def check_samples(self, losses: list[float]) -> None:
        """The steps that count are those of one process. Of a step that was made again, the last time counts.

        Steps behind the last one were made before a restart, whose round finished before it came to them again.
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
