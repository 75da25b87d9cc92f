"""New workers wait until the GPU memory of earlier ones is free: on a fake NVML, and by the agent itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from redelastic.agent import RedisElasticAgent
from redelastic.host.gpu_memory import GpuMemory
from redelastic.host.gpus import Gpu
from tests.support import fake_nvml
from tests.support.fake_nvml import (
    MIB,
    UUIDS,
    FakeGpu,
    FakeNvml,
    Install,
    install_driver,
    pynvml,
)
from tests.support.nodes import NodeFactory

install = fake_nvml.install
A, B, _ = UUIDS


class Memory:
    """GPU memory of earlier workers, which the driver frees while the agent pauses; each pause is 10 s by its clock."""

    def __init__(self, install: Install, frees_after: int, leaves_after: int = 99, users: Sequence[int] = ()) -> None:
        self.paused, self._frees_after, self._leaves_after = 0, frees_after, leaves_after
        self._gpu = FakeGpu(B, users=list(users))
        install(FakeGpu(A), self._gpu)
        self._watched = GpuMemory([Gpu("1", 1, B)], pause=self._pause, clock=lambda: 10.0 * self.paused)

    def _pause(self, _seconds: float) -> None:
        self.paused += 1
        if self.paused == self._frees_after:
            self._gpu.used = 11 * MIB

    def start_workers(self) -> None:
        self._watched.await_free(lambda: self.paused >= self._leaves_after)
        self._gpu.used = 900 * MIB


@pytest.mark.fault("GPU memory is not free yet when workers start again", "they wait for it, up to 30 s")
def test_new_workers_wait_until_the_memory_of_earlier_ones_is_free(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    memory = Memory(install, frees_after=2)
    with caplog.at_level("INFO"):
        memory.start_workers()
        assert memory.paused == 0, "the first ones wait for nothing"
        memory.start_workers()
    assert memory.paused == 2
    assert caplog.messages == ["Waiting up to 30 s for the memory of earlier workers, on GPU 1 (890 MiB)."]


def test_new_workers_do_not_wait_for_ever(install: Install, caplog: pytest.LogCaptureFixture) -> None:
    memory = Memory(install, frees_after=99)
    memory.start_workers()
    memory.start_workers()
    assert memory.paused == 3
    assert caplog.messages == ["The memory of earlier workers is not free after 30 s, on GPU 1 (890 MiB)."]


def test_new_workers_do_not_wait_for_memory_of_other_jobs(install: Install) -> None:
    """A GPU may be shared by several nodes, or jobs."""
    with subprocess.Popen(["true"]) as ended:
        alive, zombie = os.getpid(), ended.pid
        while psutil.Process(zombie).status() != psutil.STATUS_ZOMBIE:
            os.sched_yield()
        for users, pauses in (([alive], 0), ([alive, zombie], 3)):
            memory = Memory(install, frees_after=99, users=users)
            memory.start_workers()
            memory.start_workers()
            assert memory.paused == pauses


def test_new_workers_of_a_node_that_has_to_leave_do_not_wait(install: Install) -> None:
    memory = Memory(install, frees_after=99, leaves_after=1)
    memory.start_workers()
    memory.start_workers()
    assert memory.paused == 1


def test_new_workers_do_not_wait_for_a_gpu_that_nvml_cannot_read(install: Install) -> None:
    memory = Memory(install, frees_after=99)
    memory.start_workers()
    install(FakeGpu(A, broken={"*": pynvml.NVML_ERROR_UNKNOWN}))
    memory.start_workers()
    assert memory.paused == 0


def test_the_agent_waits_for_gpu_memory_before_it_restarts_workers(
    new_node: NodeFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waits, failed = "Waiting up to 30 s for the memory of earlier workers, on GPU 0 (890 MiB).", tmp_path / "failed"

    class SlowDriver(FakeNvml):
        def nvmlDeviceGetMemoryInfo(self, handle: Any, version: Any = None) -> Any:  # noqa: N802, ARG002
            held = failed.exists() and waits not in caplog.messages
            return SimpleNamespace(used=900 * MIB if held else 10 * MIB, total=1000 * MIB)

    install_driver(monkeypatch, tmp_path, f"nvml = FakeNvml(FakeGpu({A!r}))")
    monkeypatch.setitem(sys.modules, "pynvml", SlowDriver(FakeGpu(A)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    fails_once = ("-c", f"test -e {failed} && exit 0; : > {failed}; exit 1")
    spec = WorkerSpec("test", 1, new_node(1, 1), entrypoint="sh", args=fails_once, max_restarts=1)
    with caplog.at_level("INFO"):
        result = RedisElasticAgent(spec, DefaultLogsSpecs(str(tmp_path))).run()
    assert result.state == WorkerState.SUCCEEDED
    assert caplog.messages.count(waits) == 1
