"""survive() without an agent that keeps workers: train is called once, as in any script."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

import redelastic
from tests.support.processes import Processes
from tests.support.servers import reserved_port


def test_a_process_of_its_own_trains_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "REDELASTIC_CHANNEL", "REDELASTIC_EPOCH"):
        monkeypatch.delenv(name, raising=False)
    rounds: list[redelastic.Round] = []
    redelastic.survive(rounds.append, redelastic.State())
    [only] = rounds
    assert (only.rank, only.size, only.epoch, only.store) == (0, 1, 0, None)
    assert not dist.is_initialized()


def _train_once() -> tuple[int, int, int, bool]:
    state = redelastic.State()
    seen: list[redelastic.Round] = []

    def train(this: redelastic.Round) -> None:
        seen.append(this)
        assert this.store is not None
        this.store.add("count", 1)
        while this.store.add("count", 0) < this.size:
            pass
        dist.barrier()  # the store ends with the process of rank 0, which must not be the first to go
        state.commit()

    redelastic.survive(train, state)
    return seen[0].rank, seen[0].size, state.step, dist.is_initialized()


def test_processes_of_another_launcher_train_once_in_a_group(processes: Processes) -> None:
    with reserved_port() as port:
        for rank in range(2):
            place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
            processes.start(_train_once, **place)
        assert processes.values() == [(0, 2, 1, False), (1, 2, 1, False)]


def _fail() -> None:
    def train(_: redelastic.Round) -> None:
        raise ValueError("no data")

    redelastic.survive(train, redelastic.State())


def test_an_error_of_the_script_is_not_hidden(processes: Processes) -> None:
    processes.start(_fail)
    assert [outcome.error for outcome in processes.results()] == ["ValueError: no data"]


def test_the_example_of_the_page_runs_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (Path(__file__).parents[2] / "examples" / "train_surviving.py").read_text()
    script = tmp_path / "script.py"
    script.write_text(source.replace("STEPS = 300", "STEPS = 100").replace("PACE = 0.1", "PACE = 0"))
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["script.py", str(tmp_path / "checkpoint.pt")])
    runpy.run_path(str(script), run_name="__main__")
    assert (tmp_path / "checkpoint.pt").stat().st_size > 0
