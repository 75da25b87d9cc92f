"""Trainers and launchers with the scripts of examples/: nodes die and drain, the others resume."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED
from tests.support.long_tests import quick_first
from tests.support.torchrun_job import Node
from tests.support.trainer_job import TrainerJob, preload

pytestmark = pytest.mark.timeout(600)

SCRIPTS: Final = {
    "transformers": "train_transformers.py",
    "lightning": "train_lightning.py",
    "accelerate": "train_accelerate.py",
    "torch": "train_dcp.py",
}
LEASE: Final = {"keep_alive_max_attempt": 12}  # held workers do not notice a dead peer: its lease has to end
TORN: Final = {  # the file left by a node that dies while it saves step 22, or publishes the file
    "transformers": "checkpoint-22/model.safetensors",
    "lightning": "last.ckpt",
    "accelerate": "new/model.safetensors",
    "torch": "step-00000022/__0_0.distcp",
}


def needs(library: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install 'redelastic[integrations]'")


def kill_in_a_save(job: TrainerJob, node: Node, library: str) -> float:
    """Kill a node, and leave an incomplete save of it."""
    fault = job.note(f"SIGKILL of node {node.name}")
    node.kill()
    torn = job.saved / TORN[library]
    torn.parent.mkdir(exist_ok=True)
    torn.write_bytes(b"")
    return fault


def finish(job: TrainerJob, *names: str) -> None:
    """Let the last nodes finish, and check the whole job."""
    job.tell("finish")
    for name in names:
        assert job.wait_end(name) == 0, job.report()
    assert {(line.node, line.step) for line in job.lines("end")} == {(name, 30) for name in names}, job.report()
    job.check_rounds()


@pytest.mark.parametrize("library", quick_first(SCRIPTS))
@pytest.mark.fault(
    "`redelastic run` with Trainer, Lightning, Accelerate, FSDP: a node is killed as it saves, another one drains",
    "I7: the others resume from the last whole checkpoint; all ranks save for the drain, and it loses no step",
)
def test_nodes_die_and_drain(library: str, server: RedisServer, tmp_path: Path) -> None:
    needs(library)
    with TrainerJob(server, tmp_path, "1:3", agent=True, conf=LEASE) as job:
        job.train(SCRIPTS[library], *"abc", options=preload(library))
        epoch = job.wait_held("abc")
        assert job.first_step(epoch) == 1

        killed, *others = job.by_rank(epoch)
        fault = kill_in_a_save(job, killed, library)
        epoch = job.wait_held({node.name for node in others}, epoch)
        job.note_recovery(epoch, fault)
        assert job.first_step(epoch) == 21

        last, drained = job.by_rank(epoch)
        drained.terminate()  # its worker is asked to save; rank 0's worker learns of it from that one only
        assert job.wait_end(drained.name) == DRAINED
        epoch = job.wait_steps(epoch)
        assert job.first_step(epoch) == 27
        finish(job, last.name)


@pytest.mark.long
@pytest.mark.parametrize("library", SCRIPTS)
@pytest.mark.fault(
    "torchrun with Trainer, Lightning, FSDP; `accelerate launch`: a node is killed as it saves, another gets SIGTERM",
    "I7: the third resumes from the last whole checkpoint",
)
def test_torchrun_and_accelerate_launch(library: str, server: RedisServer, tmp_path: Path) -> None:
    needs(library)
    nproc = 2 if library == "accelerate" else 1  # `accelerate launch` needs at least two
    with TrainerJob(server, tmp_path, "1:3", nproc=nproc, conf=LEASE) as job:
        if library == "accelerate":
            job.train_by_accelerate(*"abc")
        else:
            job.train(SCRIPTS[library], *"abc")
        epoch = job.wait_held("abc")
        assert job.first_step(epoch) == 1

        killed, last, ended = job.by_rank(epoch)
        ended.terminate()
        fault = kill_in_a_save(job, killed, library)
        epoch = job.wait_held({last.name}, epoch)
        job.note_recovery(epoch, fault)
        assert job.first_step(epoch) == 21
        assert job.wait_end(ended.name) != 0
        finish(job, last.name)
