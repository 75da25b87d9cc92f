"""The example of HSDP: nodes that have all shards survive each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from redelastic.monitoring.events import Started
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, AgentJob

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_surviving_hsdp.py"
F64 = torch.float64
EDITS = {  # double precision, a checkpoint of each step, and a last step that a file names
    "import torch\n": "import torch\ntorch.set_default_dtype(torch.float64)\n",
    "SAVE_EVERY = 100": "SAVE_EVERY = 1",
    "PACE = 0.1": "PACE = 0.02",
    "state.step < STEPS:": 'state.step < int((checkpoints / "last").read_text()):',
}
START_TIMEOUT = 150.0  # for a node and its workers, which import torch beside others that train, in seconds
CONF = {"keep_alive_max_attempt": 8}
MORE = 20  # steps until the last one, when a job is to finish


class HsdpJob(AgentJob):
    """Nodes whose two workers each run the example."""

    def begin_node(self, name: str) -> None:
        script = self.directory / "train.py"
        if not script.exists():
            source = EXAMPLE.read_text()
            for old, new in EDITS.items():
                assert source.count(old) == 1
                source = source.replace(old, new)
            script.write_text(source)
        self._end_after(1_000_000)
        self.start(name, script=script, options=("--survive", "--preload=torch.distributed.fsdp"))

    def _end_after(self, step: int) -> None:
        (self.directory / "new").write_text(str(step))
        (self.directory / "new").replace(self.directory / "last")

    def finish_soon(self, *names: str) -> None:
        """Have the job finish, and check that it ends as one process does."""
        last = self.saved_step() + MORE
        self._end_after(last)
        for name in names:
            assert self.wait_end(name) == 0, self.report()
        assert self.saved_step() == last
        for own, expected in zip(self._parameters(last), reference(last), strict=True):
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-10)

    def await_steps(self) -> int:
        """Wait until three more steps are made; returns the last one."""
        last = self.saved_step() + 3
        return self.wait(f"step {last} is made", lambda: (step := self.saved_step()) >= last and step)

    def saved_step(self) -> int:
        saved = self.directory.glob("*/1-of-2.pt")
        return max((int(one.parent.name) for one in saved if one.with_name("0-of-2.pt").exists()), default=0)

    def await_round(self, names: str) -> dict[str, bool]:
        """Wait until the newest round is of these nodes; returns of which one the processes have survived."""

        def started() -> dict[str, bool]:
            events = self.events(Started)
            newest = max((event.epoch for event in events), default=0)
            found = {event.node[0]: event.survived for event in events if event.epoch == newest}
            return found if found.keys() == set(names) else {}

        return self.wait(f"there is a round of {names}", started, START_TIMEOUT)

    def _parameters(self, step: int) -> list[torch.Tensor]:
        """The parameters after a step, of both shards."""
        shards = [torch.load(self.directory / str(step) / f"{shard}-of-2.pt")["shard"] for shard in range(2)]
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
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.timeout(400)  # above what waits take together
@pytest.mark.fault(
    "a node dies in a job of HSDP whose workers survive",
    "the other one keeps its processes, and trains as one process does",
)
def test_a_node_of_hsdp_dies(server: RedisServer, tmp_path: Path) -> None:
    with HsdpJob(server, tmp_path, "1:2", nproc=2, conf=CONF) as job:
        for name in "ab":
            job.begin_node(name)
        job.await_round("ab")
        job.await_steps()
        lost, left = (node.name for node in job.control.state().members)
        job.nodes[lost].kill()
        assert job.await_round(left) == {left: True}
        job.await_steps()
        job.finish_soon(left)


@pytest.mark.long
@pytest.mark.timeout(900)  # above what waits take together
@pytest.mark.fault(
    "nodes freeze, die, join and drain in a job of HSDP whose workers survive",
    "the others keep their processes, and train as one process does",
)
def test_a_job_of_hsdp(server: RedisServer, tmp_path: Path) -> None:
    with HsdpJob(server, tmp_path, "2:3", nproc=2, conf=CONF) as job:
        for name in "abc":
            job.begin_node(name)
        job.await_round("abc")
        step = job.await_steps()
        one, two, three = (
            node.name for node in job.control.state().members
        )  # the last one takes the first one's place
        job.nodes[one].freeze()
        assert job.await_round(two + three) == {two: True, three: True}
        job.await_steps()
        begun = re.findall(r"begins at step (\d+)\n", (tmp_path / f"{two}.out").read_text())
        assert int(begun[-1]) >= step, "no step is lost"
        job.nodes[one].thaw()
        assert job.await_round("abc") == {one: True, two: True, three: True}
        job.await_steps()

        job.nodes[two].kill()
        assert job.await_round(one + three) == {one: True, three: True}
        job.await_steps()

        job.begin_node(two)
        assert job.await_round("abc") == {one: True, two: False, three: True}
        job.await_steps()

        job.nodes[three].terminate()
        assert job.wait_end(three) == DRAINED
        assert job.await_round(one + two) == {one: True, two: True}
        job.await_steps()
        job.finish_soon(one, two)
        assert max(event.epoch for event in job.events(Started)) == 6, "each change costs one round"

    with HsdpJob(server, tmp_path, "2:2", nproc=2, conf=CONF) as job:
        saved = job.saved_step()
        for name in "ab":
            job.begin_node(name)
        job.wait("they go on", lambda: job.saved_step() > saved)
        assert f"begins at step {saved}" in (tmp_path / "a.out").read_text()
        job.finish_soon("a", "b")
