"""Workers that survive on GPUs: the end of NCCL's communicators, and of a round whose workers use them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType
from torch.distributed import distributed_c10d

from redelastic.redis.server import RedisServer
from redelastic.torch_internals import abort_nccl, nccl_has_failed
from tests.support.agent_job import DRAINED
from tests.support.gpu_machine import needs_gpu, needs_real_gpu
from tests.support.surviving_job import SurvivingJob
from tests.support.torchrun_job import LONG_LEASES

GPU: Final = torch.device("cuda")


class Communicator:
    """Stands for a backend of torch's; says what is done with it."""

    def __init__(self, name: str, calls: list[str], error: str = "") -> None:
        self._name, self._calls, self._error = name, calls, error
        self.found = ErrorType.SUCCESS

    def abort(self) -> None:
        self._calls.append(f"abort {self._name}")
        if self._error:
            raise RuntimeError(self._error)


class Nccl(Communicator):
    def _group_start(self) -> None:
        self._calls.append("start")

    def _group_end(self) -> None:
        self._calls.append("end")

    def get_error(self) -> ErrorType:
        return self.found


def group(backend: Communicator, *devices: torch.device) -> SimpleNamespace:
    return SimpleNamespace(_device_types=[*devices, torch.device("cpu")], _get_backend={GPU: backend}.get)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """The process groups of this process: torch keeps them where only its own functions add any."""
    made: list[SimpleNamespace] = []
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_names=made))
    return made


@pytest.mark.parametrize("error", ["", "a communicator that cannot be aborted"])
def test_all_communicators_are_aborted_in_one_region(groups: list[SimpleNamespace], error: str) -> None:
    calls: list[str] = []
    default, of_cpus = group(Nccl("default", calls), GPU), group(Communicator("cpus", calls))
    on_gloo, newest = group(Communicator("gloo", calls), GPU), group(Nccl("newest", calls, error), GPU)
    groups += [default, of_cpus, on_gloo, newest]
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        abort_nccl()
    assert calls == ["start", "abort newest", *([] if error else ["abort default"]), "end"]


def test_without_nccl_nothing_is_aborted(groups: list[SimpleNamespace]) -> None:
    calls: list[str] = []
    groups.append(group(Communicator("gloo", calls), GPU))
    abort_nccl()
    assert calls == []


def test_nccl_has_failed_once_one_communicator_has(groups: list[SimpleNamespace]) -> None:
    backends = [Nccl("default", []), Nccl("newest", [])]
    groups += [group(Communicator("gloo", []), GPU), *(group(backend, GPU) for backend in backends)]
    assert not nccl_has_failed()
    backends[0].found = ErrorType.REMOTE_ERROR
    assert nccl_has_failed()


@needs_real_gpu
def test_a_group_that_was_aborted_fails_and_the_next_one_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    for name in ("first", "second"):
        store = dist.FileStore(str(tmp_path / name), 1)
        dist.init_process_group(store=store, rank=0, world_size=1, timeout=timedelta(seconds=30))
        number = torch.ones(1, device=GPU)
        dist.all_reduce(number)
        assert number.item() == 1
        abort_nccl()
        abort_nccl()
        with pytest.raises(RuntimeError, match="NCCL"):
            dist.all_reduce(number)
        dist.destroy_process_group()


@pytest.fixture
def job(server: RedisServer, tmp_path: Path) -> Iterator[SurvivingJob]:
    with SurvivingJob(server, tmp_path, "1:3", conf={**LONG_LEASES, "last_call_timeout": 5}) as job:
        yield job


@needs_gpu
@pytest.mark.timeout(300)
def test_survivors_go_on_when_a_peer_is_killed(job: SurvivingJob) -> None:
    """First a worker, whose node starts another one, and then that node."""
    job.begin("a", "b", "c")
    first = job.wait_round("abc")
    before = job.pids(first)
    [victim] = before["b"]
    fault = job.note("a worker is killed")
    os.kill(victim, signal.SIGKILL)
    second = job.wait_round("ac", first, fault=fault)
    third = job.wait_round("abc", second)
    fault = job.note("a node is killed")
    job.nodes["b"].kill()
    fourth = job.wait_round("ac", third, fault=fault)
    for name in "ac":
        assert job.pids(second)[name] == job.pids(third)[name] == job.pids(fourth)[name] == before[name]
    job.end("a", "c")


@needs_gpu
@pytest.mark.timeout(300)
def test_a_node_that_was_frozen_comes_back_with_its_process(server: RedisServer, tmp_path: Path) -> None:
    with SurvivingJob(server, tmp_path, "1:2", conf={"last_call_timeout": 5}) as job:
        job.begin("a", "b")
        first = job.wait_round("ab")
        before = job.pids(first)
        job.nodes["b"].freeze()
        second = job.wait_round("a", first)
        job.nodes["b"].thaw()
        third = job.wait_round("ab", second)
        assert job.pids(third) == before
        job.end("a", "b")


@needs_gpu
@pytest.mark.timeout(300)
def test_planned_changes_cut_no_collective(job: SurvivingJob) -> None:
    job.begin("a", conf={"last_call_timeout": 0})
    first = job.wait_round("a")
    before = job.pids(first)
    job.begin("b")
    second = job.wait_round("ab", first)
    job.nodes["b"].terminate()
    third = job.wait_round("a", second)
    assert job.pids(second)["a"] == job.pids(third)["a"] == before["a"]
    assert job.wait_end("b") == DRAINED
    job.end("a")
    assert job.committed() == list(range(len(job.committed()))), "no step was made twice"
