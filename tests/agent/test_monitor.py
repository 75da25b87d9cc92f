"""An agent's monitor: an NVML that does not answer, or a task that fails, does not stop the other tasks."""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs

from redelastic.agent import AgentOptions, RedisElasticAgent, monitor
from redelastic.agent.background import repeat
from redelastic.redis.connection import text
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.node import DrainedError
from tests.support.fake_nvml import FakeGpu, FakeNvml, install_driver
from tests.support.nodes import NodeFactory
from tests.support.waiting import Within

pytestmark = pytest.mark.timeout(180)

LIMIT: Final = 60.0  # for anything to happen, in seconds
until = Within(LIMIT)


class SilentNvml(FakeNvml):
    """An NVML that the test makes silent, until the test releases it."""

    def __init__(self) -> None:
        super().__init__(FakeGpu("GPU-1"))
        self.silent, self.asked, self.released = False, threading.Event(), threading.Event()

    def nvmlDeviceGetMemoryInfo(self, handle: Any, *version: Any) -> Any:  # noqa: N802
        if self.silent:
            self.asked.set()
            assert self.released.wait(2 * LIMIT)
        return super().nvmlDeviceGetMemoryInfo(handle, *version)


class Running:
    """An agent in a thread, whose only worker sleeps and whose NVML the test can make silent."""

    def __init__(self, agent: RedisElasticAgent, nvml: SilentNvml, drain_file: Path, ended: Future[RunResult]) -> None:
        self.agent, self.nvml, self.drain_file, self.ended = agent, nvml, drain_file, ended

    def status(self) -> dict[str, Any]:
        return self.agent._monitor.status()

    def cpu_of_the_worker(self) -> float | None:
        workers = self.status()["workers"]
        return workers[0].get("cpu") if workers else None


@pytest.fixture
def running(new_node: NodeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    nvml = SilentNvml()
    install_driver(monkeypatch, tmp_path, "nvml = FakeNvml(FakeGpu('GPU-1'))")
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    spec = WorkerSpec("test", 1, new_node(1, 1), entrypoint="sleep", args=("600",))
    options = AgentOptions(drain_file=tmp_path / "notice", drain_timeout=0)
    agent = RedisElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), options=options, shutdown_timeout=5)
    with ThreadPoolExecutor(1) as pool:
        started = Running(agent, nvml, tmp_path / "notice", pool.submit(agent.run))
        yield started
        nvml.released.set()
        started.drain_file.touch()
        with pytest.raises(DrainedError):
            started.ended.result(LIMIT)


@pytest.fixture
def quick_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes add to the run's curves several times a second."""
    monkeypatch.setattr(monitor, "MINUTE", 0.3)


@pytest.mark.usefixtures("quick_curves")
def test_what_it_measures_goes_into_the_runs_curves(client: redis.Redis, running: Running) -> None:
    key = RunKeys(running.status()["run_id"]).curves

    def measured() -> set[str]:
        return {figure.partition("=")[0] for point in client.hvals(key) for figure in text(point).split()}

    until(lambda: measured() >= {"memory", "gpu", "gpu_memory"}, "its host and its GPU are in the curves")


def fall_silent(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    running.nvml.silent = True
    assert running.nvml.asked.wait(LIMIT)
    monkeypatch.setattr(monitor, "NVML_TIMEOUT", 0.5)  # not before: on a busy machine an answer may take longer


@pytest.mark.fault("NVML does not answer", "drain file, processes and heartbeats go on; stale GPU figures are dropped")
def test_an_nvml_that_does_not_answer_stops_no_other_task(
    running: Running, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: running.status().get("gpus"), "its GPU is in the status")
    fall_silent(running, monkeypatch)
    before = running.status()["node_time"]
    until(lambda: running.status()["node_time"] > before, "its processes are sampled")
    until(lambda: running.cpu_of_the_worker() is not None, "the worker's CPU use is in the status")
    until(lambda: "gpus" not in running.status(), "stale GPU figures leave the status")
    assert len([r for r in caplog.records if "NVML has not answered" in r.getMessage()]) == 1
    running.drain_file.touch()
    with pytest.raises(DrainedError, match="notice exists"):
        running.ended.result(LIMIT)


def test_gpus_are_reported_again_when_nvml_answers_again(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    until(lambda: running.status().get("gpus"), "its GPU is in the status")
    fall_silent(running, monkeypatch)
    until(lambda: "gpus" not in running.status(), "its GPU has left the status")
    running.nvml.silent = False
    running.nvml.released.set()
    until(lambda: running.status().get("gpus"), "its GPU is in the status again")


@pytest.fixture
def timers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the agent serve torch's file timers; returns the path of the pipe to them."""
    monkeypatch.setenv("TORCHELASTIC_ENABLE_FILE_TIMER", "1")
    monkeypatch.setenv("TORCHELASTIC_TIMER_FILE", str(tmp_path / "timers"))
    return tmp_path / "timers"


def test_livez_fails_while_torchs_file_timers_are_stuck(
    timers: Path, running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops in the middle of a request keeps all timers from being checked."""
    until(timers.exists, "the timers are served")
    request = json.dumps({"pid": 1, "scope_id": "none", "expiration_time": -1, "signal": 0})
    stalled = running.agent._monitor.stalled
    with timers.open("w") as pipe:
        assert stalled() == ""
        pipe.write(request[:9])
        pipe.flush()
        monkeypatch.setattr(monitor, "WATCHDOG_TIMEOUT", 2.0)
        until(lambda: "torch's file timers have not been looked at for" in stalled(), "they count as dead")
        pipe.write(request[9:] + "\n")
    until(lambda: stalled() == "", "they are alive again")


def test_a_task_that_fails_is_logged_once_per_error_and_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    runs = threading.Semaphore(0)
    answers = iter([ValueError("odd"), ValueError("odd"), None, ValueError("odd"), KeyError("even")])

    def task() -> None:
        answer = next(answers, None)
        runs.release()
        if answer is not None:
            raise answer

    with caplog.at_level(logging.ERROR), repeat(task, 0.01, "test"):
        for _ in range(7):
            assert runs.acquire(timeout=LIMIT)
    errors = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [type(error) for error in errors] == [ValueError, ValueError, KeyError]
