"""A job of `redelastic run --survive`: which processes took part in which round, and what they ended with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.agent_job import AgentJob
from tests.support.workers.surviving import reference

SCRIPT: Final = Path(__file__).parent / "workers" / "surviving.py"


class SurvivingJob(AgentJob):
    """Nodes whose workers run `workers/surviving.py`."""

    def begin(self, *names: str, options: tuple[str, ...] = (), **more: Any) -> None:
        self.start(*names, script=SCRIPT, options=("--survive", "--admit=saved", *options), **more)

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
        return [line.step for line in self.lines("begin") if line.pid == pid]

    def end(self, *names: str) -> None:
        """Let the job finish; all must have the weights and the loss of a run in one process."""
        self.tell("finish")
        for name in names:
            assert self.wait_end(name) == 0, self.report()
            for local_rank in range(self.nproc):
                final = json.loads((self.directory / f"final-{name}-{local_rank}.json").read_text())
                weights, loss = reference(final["step"])
                assert final["weights"] == pytest.approx(weights, abs=1e-10), name
                assert final["loss"] == pytest.approx(loss, abs=1e-10), name
