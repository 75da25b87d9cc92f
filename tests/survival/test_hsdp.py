"""The example of HSDP: nodes that have all shards survive each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from redelastic.monitoring.events import Started
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, AgentJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_surviving_hsdp.py"
F64 = torch.float64
ENDLESS = {  # in double precision, with a checkpoint of each step
    "import torch\n": "import torch\ntorch.set_default_dtype(torch.float64)\n",
    "STEPS = 300": "STEPS = 1_000_000",
    "SAVE_EVERY = 100": "SAVE_EVERY = 1",
    "PACE = 0.1": "PACE = 0.02",
}


class HsdpJob(AgentJob):
    """Nodes whose two workers each run the example."""

    def begin_node(self, name: str) -> None:
        script = self.directory / "train.py"
        if not script.exists():
            source = EXAMPLE.read_text()
            for old, new in ENDLESS.items():
                assert source.count(old) == 1
                source = source.replace(old, new)
            script.write_text(source)
        self.start(name, script=script, options=("--survive", "--preload=torch.distributed.fsdp"))

    def await_steps(self) -> int:
        """Wait until three more steps are made; returns the last one."""
        last = self.saved_step() + 3
        return self.wait(f"step {last} is made", lambda: (step := self.saved_step()) >= last and step)

    def saved_step(self) -> int:
        complete = [int(one.parent.name) for one in self.directory.glob("*/1.pt") if (one.parent / "0.pt").exists()]
        return max(complete, default=0)

    def await_round(self, names: str) -> dict[str, bool]:
        """Wait until the newest round is of these nodes; returns of which one the processes have survived."""

        def started() -> dict[str, bool]:
            events = self.events(Started)
            newest = max((event.epoch for event in events), default=0)
            found = {event.node[0]: event.survived for event in events if event.epoch == newest}
            return found if found.keys() == set(names) else {}

        return self.wait(f"there is a round of {names}", started)

    def parameters(self, step: int) -> list[torch.Tensor]:
        """The parameters after a step, of both shards."""
        shards = [torch.load(self.directory / str(step) / f"{shard}.pt")["shard"] for shard in range(2)]
        return [torch.cat([shard[name] for shard in shards]) for name in shards[0]]


def reference(steps: int) -> list[torch.Tensor]:
    """The parameters after so many steps in one process."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64, dtype=F64), nn.Tanh(), nn.Linear(64, 1, dtype=F64))
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(steps):
        inputs = torch.rand(24, 8, generator=torch.Generator().manual_seed(step), dtype=F64)
        optimizer.zero_grad()
        (((model(inputs) - inputs.sum(1, keepdim=True).sin()) ** 2).sum() / 24).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.long
@pytest.mark.fault(
    "nodes freeze, die, join and drain in a job of HSDP whose workers survive",
    "the others keep their processes, and train as one process does",
)
def test_a_job_of_hsdp(server: RedisServer, tmp_path: Path) -> None:
    with HsdpJob(server, tmp_path, "2:3", nproc=2, conf={"keep_alive_max_attempt": 8}) as job:
        for name in "abc":
            job.begin_node(name)
        job.await_round("abc")
        step = job.await_steps()
        job.nodes["b"].freeze()
        assert job.await_round("ac") == {"a": True, "c": True}
        job.await_steps()
        begun = [int(line.rpartition(" ")[2]) for line in (tmp_path / "a.out").read_text().splitlines()]
        assert min(begun[-2:]) >= step, "no step is lost"
        job.nodes["b"].thaw()
        assert job.await_round("abc") == {"a": True, "b": True, "c": True}
        job.await_steps()

        job.nodes["b"].kill()
        assert job.await_round("ac") == {"a": True, "c": True}
        job.await_steps()

        job.begin_node("b")
        assert job.await_round("abc") == {"a": True, "b": False, "c": True}
        job.await_steps()

        job.nodes["c"].terminate()
        assert job.wait_end("c") == DRAINED
        assert job.await_round("ab") == {"a": True, "b": True}
        last = job.await_steps()

        for own, expected in zip(job.parameters(last), reference(last), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)
