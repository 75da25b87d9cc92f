"""Workers that survive on GPUs: the end of NCCL's communicators, and of a round whose workers use them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from redelastic.redis.server import RedisServer
from redelastic.torch_internals import abort_nccl
from tests.support.gpu_machine import needs_card, needs_two_cards
from tests.support.surviving_job import SurvivingJob
from tests.support.torchrun_job import PATIENT

GPU: Final = torch.device("cuda")


class Communicator:
    """Stands for a backend of torch's; says what is done with it."""

    def __init__(self, name: str, calls: list[str], error: str = "") -> None:
        self._name, self._calls, self._error = name, calls, error

    def abort(self) -> None:
        self._calls.append(f"abort {self._name}")
        if self._error:
            raise RuntimeError(self._error)


class Nccl(Communicator):
    def _group_start(self) -> None:
        self._calls.append("start")

    def _group_end(self) -> None:
        self._calls.append("end")


def group(backend: Communicator, *devices: torch.device) -> SimpleNamespace:
    return SimpleNamespace(_device_types=[*devices, torch.device("cpu")], _get_backend={GPU: backend}.get)


@pytest.mark.parametrize("error", ["", "a communicator that cannot be aborted"])
def test_all_communicators_are_aborted_in_one_region(monkeypatch: pytest.MonkeyPatch, error: str) -> None:
    calls: list[str] = []
    default, of_cpus = group(Nccl("default", calls), GPU), group(Communicator("cpus", calls))
    on_gloo, newest = group(Communicator("gloo", calls), GPU), group(Nccl("newest", calls, error), GPU)
    groups = [default, of_cpus, on_gloo, newest]
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_names=groups))
    with pytest.raises(RuntimeError, match=error) if error else contextlib.nullcontext():
        abort_nccl()
    assert calls == ["start", "abort newest", *([] if error else ["abort default"]), "end"]


def test_without_nccl_nothing_is_aborted(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_names=[group(Communicator("gloo", calls), GPU)]))
    abort_nccl()
    assert calls == []


@needs_card
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
    with SurvivingJob(server, tmp_path, "1:2", conf=PATIENT) as job:
        yield job


@needs_two_cards
@pytest.mark.timeout(300)
def test_a_survivor_goes_on_when_its_peer_on_another_gpu_is_killed(job: SurvivingJob) -> None:
    for card, name in enumerate("ab"):
        job.begin(name, env={"CUDA_VISIBLE_DEVICES": str(card)})
    first = job.wait_round("ab")
    lost, stays = job.by_rank(first)
    before = job.pids(first)
    lost.kill()
    second = job.wait_round(stays.name, first)
    assert job.pids(second)[stays.name] == before[stays.name]
    job.end(stays.name)
