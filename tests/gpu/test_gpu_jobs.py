"""Jobs on GPUs: NCCL, nodes and workers that die, freeze or hang in a kernel, and nothing of them left on the card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from redelastic.monitoring.collectives import explain
from redelastic.monitoring.events import Collectives, Hung
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.gpu_machine import ON_GPU, needs_gpu, needs_real_gpu
from tests.support.servers import wait_until
from tests.support.torchrun_job import Job

pytestmark = [needs_gpu, pytest.mark.timeout(300), pytest.mark.xdist_group("gpu")]

TRAIN = Path(__file__).parents[1] / "support" / "workers" / "gpu.py"
HELD = 1024  # MiB that a worker holds, beside CUDA's own
BACKEND = {"TEST_BACKEND": "nccl" if ON_GPU else "gloo"}
SHORT = {"keep_alive_interval": 0.4, "keep_alive_max_attempt": 3}
COUNT = torch.cuda.device_count() if ON_GPU else 0
needs_two_gpus = pytest.mark.skipif(COUNT < 2, reason="needs two GPUs: .ci/gpu, where there are two")


@pytest.fixture(params=["redelastic run", "torchrun"])
def job(request: pytest.FixtureRequest, server: RedisServer, tmp_path: Path) -> Iterator[Job]:
    """Of up to two nodes, on one GPU."""
    kind = AgentJob if request.param == "redelastic run" else Job
    with kind(server, tmp_path, "1:2", conf={**SHORT, "last_call_timeout": 5}) as made:
        yield made


@pytest.fixture
def ours(server: RedisServer, tmp_path: Path) -> Iterator[AgentJob]:
    with AgentJob(server, tmp_path, "1:2", conf={**SHORT, "last_call_timeout": 1}) as made:
        yield made


def query_gpu(*fields: str) -> list[str]:
    """Fields of the first GPU by nvidia-smi, in MiB, degrees and percent: ``query_gpu("uuid", "memory.used")``."""
    command = ["nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout
    return [field.strip() for field in output.split(",")]


def memory_used() -> int:
    """Memory used on the first GPU, in MiB."""
    [used] = query_gpu("memory.used")
    return int(used)


def steps(job: Job, epoch: int = 0) -> int:
    return sum(line.epoch > epoch for line in job.lines("step"))


def hung(job: AgentJob) -> Hung:
    return job.wait_event(Hung)


def test_nccl_alone(job: Job) -> None:
    job.start("a", script=TRAIN, env=BACKEND)
    job.wait("it trains", lambda: steps(job) >= 5)
    job.tell("finish")
    assert job.wait_end("a") == 0


@needs_two_gpus
def test_nccl_on_all(server: RedisServer, tmp_path: Path) -> None:
    import torch

    with AgentJob(server, tmp_path, "1:1", nproc=torch.cuda.device_count()) as job:
        job.start("a", script=TRAIN, env=BACKEND)
        job.wait_round("a")
        job.tell("collective-a")  # of all workers of that node, the first one to see it
        assert "all_reduce" in hung(job).stacks
        job.tell("finish")
        assert job.wait_end("a") == 0


@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_node_is_lost(job: Job, how: str) -> None:
    job.start("a", "b", script=TRAIN, env=BACKEND)
    epoch = job.wait_round("ab")
    getattr(job.nodes["b"], how)()
    job.nodes["b"].may_end = True
    job.wait("the other goes on", lambda: any(line.world == 1 for line in job.lines("step") if line.epoch > epoch))
    job.tell("finish")
    assert job.wait_end("a") == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_is_killed(job: Job, number: signal.Signals) -> None:
    job.start("a", "b", script=TRAIN, env=BACKEND)
    epoch = job.wait_round("ab")
    psutil.Process(next(line.pid for line in job.lines("step") if line.node == "b")).send_signal(number)
    job.wait_round("ab", after=epoch)
    job.tell("finish")
    assert job.wait_end("a") == job.wait_end("b") == 0


def test_a_worker_is_frozen(ours: AgentJob) -> None:
    ours.start("a", script=TRAIN, env=BACKEND, options=("--hang-timeout=3", "--hang-start-timeout=120"))
    epoch = ours.wait_round("a")
    psutil.Process(ours.lines("step")[-1].pid).suspend()
    assert (hung(ours).idle_ms or 0) >= 3000
    ours.wait("it trains again", lambda: steps(ours, epoch) >= 3)
    ours.tell("finish")
    assert ours.wait_end("a") == 0


def test_a_kernel_that_does_not_end(ours: AgentJob) -> None:
    ours.start("a", script=TRAIN, env=BACKEND, options=("--hang-timeout=3", "--hang-start-timeout=120"))
    epoch = ours.wait_round("a")
    ours.tell("kernel-a")
    assert "run_for_ever" in hung(ours).stacks, "the stacks tell where"
    ours.wait("it trains again", lambda: steps(ours, epoch) >= 3)
    ours.tell("finish")
    assert ours.wait_end("a") == 0


def test_a_collective_that_does_not_end(ours: AgentJob) -> None:
    ours.start("a", "b", script=TRAIN, env=BACKEND, options=("--hang-timeout=3", "--hang-start-timeout=120"))
    epoch = ours.wait_round("ab")
    ours.tell("collective-b")
    hung(ours)
    ours.wait("both tell what they wait for", lambda: len(ours.events(Collectives)) >= 2)
    ranks = {line.node: line.rank for line in ours.lines("start") if line.epoch == epoch}
    why = explain({rank: own for event in ours.events(Collectives) for rank, own in event.last.items()})
    assert f"rank {ranks['a']} waits in all_reduce(Float[" in why
    assert f"rank {ranks['b']} has not come to it" in why
    ours.wait_round("ab", after=epoch)
    ours.tell("finish")
    assert ours.wait_end("a") == ours.wait_end("b") == 0


def test_a_kernel_that_fails(ours: AgentJob) -> None:
    """Its process' context is lost, not the GPU: the next worker trains, and the GPU's check lets the host stay."""
    ours.start("a", script=TRAIN, env=BACKEND, options=("--health-check=gpu", "--max-job-restarts=2"))
    epoch = ours.wait_round("a")
    ours.tell("assert-a")
    ours.wait("it trains again", lambda: steps(ours, epoch) >= 3, 120)
    ours.tell("finish")
    assert ours.wait_end("a") == 0


@needs_real_gpu
def test_no_memory_a_second_after_the_agents_death(ours: AgentJob) -> None:
    before = memory_used()
    ours.start("a", script=TRAIN, env=BACKEND)
    ours.wait_round("a")
    assert memory_used() >= before + HELD
    ours.nodes["a"].kill_agent_alone()
    wait_until(lambda: memory_used() < before + 100, "the card is free again", 1.0)


@needs_real_gpu
def test_telemetry_is_what_nvidia_smi_says(ours: AgentJob) -> None:
    ours.start("a", script=TRAIN, env=BACKEND)
    ours.wait_round("a")

    def reported() -> Any:
        return ours.control.find("a").status.get("gpus", [{}])[0]

    ours.wait("its memory has been told", lambda: reported().get("memory_used", 0) > HELD * 2**20)
    uuid, name, used, total, temperature, ecc = query_gpu(
        "uuid", "name", "memory.used", "memory.total", "temperature.gpu", "ecc.errors.uncorrected.volatile.total"
    )
    gpu = reported()
    assert (gpu["uuid"], gpu["name"]) == (uuid, name)
    assert gpu["memory_used"] / 2**20 == pytest.approx(int(used), abs=1024)  # the driver's own share counts for one
    assert gpu["memory_total"] / 2**20 == pytest.approx(int(total), abs=2)
    assert gpu["temperature"] == pytest.approx(int(temperature), abs=5)
    assert 0 <= gpu["utilization"] <= 100
    assert gpu["ecc"] == int(ecc)
    assert gpu["xid"] == 0


SEES = """
import json, os, torch
print(json.dumps([os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ["LOCAL_RANK"], torch.cuda.device_count()]))
torch.zeros(1, device=f"cuda:{os.environ['LOCAL_RANK']}")
"""


def seen(tmp_path: Path, *options: str, visible: str | None = None) -> Any:
    """What a worker of `redelastic run` sees: CUDA_VISIBLE_DEVICES, its local rank, how many GPUs."""
    script = tmp_path / "sees.py"
    script.write_text(SEES)
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    environ |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    command = [sys.executable, "-m", "redelastic", "run", "--standalone", *options, str(script)]
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout)


@needs_real_gpu
def test_a_worker_sees_its_own_gpu_only(tmp_path: Path) -> None:
    visible, local_rank, count = seen(tmp_path, "--virtual-local-rank", "--nproc-per-node=1")
    assert (local_rank, count) == ("0", 1)
    assert visible is not None


@needs_real_gpu
def test_a_gpu_that_is_named_by_its_uuid(tmp_path: Path) -> None:
    [uuid] = query_gpu("uuid")
    assert seen(tmp_path, visible=uuid)[::2] == [uuid, 1]
    assert seen(tmp_path, "--virtual-local-rank", visible=uuid) == [uuid, "0", 1]
