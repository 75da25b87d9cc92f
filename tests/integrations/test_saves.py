"""The callbacks with the real trainers on one node: what a drain saves, when it is on disk, and what is loaded."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from redelastic.monitoring.events import Hung
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, AgentJob
from tests.support.long_tests import quick_first
from tests.support.trainer_job import START_TIMEOUT, preload

pytestmark = pytest.mark.timeout(300)

LIBRARIES = pytest.mark.parametrize("library", quick_first(["lightning", "transformers"]))
SCRIPTS = Path(__file__).parents[1] / "support" / "workers"


class Small(AgentJob):
    """A job of one node that runs the small script of a library."""

    def __init__(self, server: RedisServer, directory: Path, library: str, nproc: int = 1) -> None:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install 'redelastic[integrations]'")
        super().__init__(server, directory, "1:1", nproc=nproc)
        self.script = SCRIPTS / f"small_{library}.py"
        self.preload = preload(library)

    def train(self, name: str, *options: str) -> None:
        self.start(name, script=self.script, options=(*self.preload, *options), env={"HF_HUB_OFFLINE": "1"})

    def wait_end(self, name: str, limit: float = START_TIMEOUT) -> int:
        return super().wait_end(name, limit)

    def said(self, name: str) -> list[str]:
        path = self.directory / name
        return path.read_text().split() if path.exists() else []


@LIBRARIES
@pytest.mark.fault("a node drains while the Trainer evaluates for longer than `--drain-timeout`", "it loses no step")
def test_a_drain_during_an_evaluation_saves(library: str, server: RedisServer, tmp_path: Path) -> None:
    with Small(server, tmp_path, library, nproc=2) as job:
        job.train("a", "--drain-timeout=20")
        job.wait("it evaluates", (tmp_path / "evaluates").exists, START_TIMEOUT)
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED, job.report()
        job.tell("finish")
        job.train("b")
        assert job.wait_end("b") == 0, job.report()
        assert job.said("resumes") == ["0", "20"]
        assert job.said("trained") == ["40"]


@LIBRARIES
@pytest.mark.fault("a Trainer's test or evaluation after the training takes longer than `--hang-timeout`", "no hang")
def test_testing_after_the_training_is_no_hang(library: str, server: RedisServer, tmp_path: Path) -> None:
    with Small(server, tmp_path, library) as job:
        job.tell("finish")
        job.tell("slow-tests")
        job.train("a", "--hang-timeout=3")
        assert job.wait_end("a") == 0, job.report()
        assert job.events(Hung) == []


@pytest.mark.fault("rank 0 of a Trainer saves for longer than `--hang-timeout`, and the others wait for it", "no hang")
def test_a_long_save_is_no_hang(server: RedisServer, tmp_path: Path) -> None:
    with Small(server, tmp_path, "transformers", nproc=2) as job:
        job.tell("finish")
        job.tell("slow-save")
        job.train("a", "--hang-timeout=10")
        assert job.wait_end("a") == 0, job.report()
        assert job.events(Hung) == []


@pytest.mark.fault("a node drains while AsyncCheckpointIO writes", "it leaves when the checkpoint is on disk")
def test_a_drain_waits_for_a_save_in_the_background(server: RedisServer, tmp_path: Path) -> None:
    with Small(server, tmp_path, "lightning") as job:
        job.tell("async")
        job.train("a", "--drain-timeout=100")
        job.wait("it trains", lambda: len(job.said("steps")) > 4, START_TIMEOUT)
        asked_after = int(job.said("steps")[-1])
        job.nodes["a"].terminate()
        assert job.wait_end("a") == DRAINED, job.report()
        saved = [torch.load(path, weights_only=False) for path in (tmp_path / "saved").glob("*.ckpt")]
        assert max(checkpoint["global_step"] for checkpoint in saved) >= asked_after


@LIBRARIES
@pytest.mark.fault(
    "a Trainer's newest checkpoint raises when it is loaded", "the next round resumes from the one before"
)
def test_a_checkpoint_that_cannot_be_loaded_is_skipped(library: str, server: RedisServer, tmp_path: Path) -> None:
    with Small(server, tmp_path, library) as job:
        job.tell("finish")
        job.train("a")
        assert job.wait_end("a") == 0, job.report()
    broken = {"lightning": "last.ckpt", "transformers": "checkpoint-40/scheduler.pt"}[library]
    torch.save(["whole, but nonsense"], tmp_path / "saved" / broken)
    (tmp_path / "resumes").unlink()
    with Small(server, tmp_path, library) as job:
        job.train("b", "--max-restarts=1")
        assert job.wait_end("b") == 0, job.report()
        assert job.said("resumes") == ["30"]
        assert "the next round gets the checkpoint before it" in job.nodes["b"].stderr
