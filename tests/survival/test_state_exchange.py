"""State: how it travels over gloo, and that all ranks have the same afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from redelastic.survival.state import State, fingerprint
from tests.support.processes import Outcome, Processes


def _join(folder: str, rank: int, size: int) -> None:
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))


class Counter:
    """An entry that is neither a module nor an optimizer."""

    def __init__(self, count: int) -> None:
        self.count, self.history = count, torch.full((count,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": self.history.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.history = state["count"], state["history"]


def _made(rank: int, steps: int) -> tuple[State, nn.Module, Any, Counter]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    counter = Counter(steps)
    state = State(model=model, optimizer=optimizer, scheduler=scheduler, counter=counter)
    for _ in range(steps):
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        state.commit()
    return state, model, optimizer, counter


def _share(folder: str, rank: int, steps: list[int], torn: int) -> dict[str, Any]:
    """Ranks that have made different numbers of steps share; `torn` has called optimizer.step() once more."""
    state, model, optimizer, counter = _made(rank, steps[rank])
    if rank == torn:
        optimizer.step()
    before = [parameter.data_ptr() for parameter in model.parameters()]
    _join(folder, rank, len(steps))
    state.share(verify=True)
    return {
        "step": state.step,
        "print": {
            name: fingerprint(entry.state_dict()) for name, entry in (("m", model), ("o", optimizer), ("c", counter))
        },
        "in place": before == [parameter.data_ptr() for parameter in model.parameters()],
        "count": counter.count,
    }


@pytest.mark.parametrize(("steps", "torn"), [([0, 0, 0], -1), ([2, 3, 0], -1), ([3, 3, 2], 0)])
def test_all_have_the_newest_whole_state(processes: Processes, tmp_path: Path, steps: list[int], torn: int) -> None:
    newest = max(steps)
    for rank in range(len(steps)):
        processes.start(_share, str(tmp_path), rank, steps, torn)
    shared = processes.values()
    assert {one["step"] for one in shared} == {newest}
    assert {one["count"] for one in shared} == {newest}
    assert shared[0]["print"] == shared[1]["print"] == shared[2]["print"]
    assert all(one["in place"] for one in shared), "parameters keep their memory"


def _share_shards(folder: str, rank: int, steps: list[int]) -> tuple[int, str]:
    """Of two replicas with two shards each, all have survived, and have made different numbers of steps."""
    state, model, _, _ = _made(rank % 2, 0)
    _join(folder, rank, 4)
    row, column = divmod(rank, 2)
    members = [column, column + 2], [2 * row, 2 * row + 1]
    groups = [dist.new_group(ranks, use_local_synchronization=True) for ranks in members]
    mesh = DeviceMesh.from_group(groups, "cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard"))
    state.share(mesh)
    for _ in range(steps[rank]):
        with torch.no_grad():
            next(model.parameters()).add_(1 + rank % 2)
        state.commit()
    state.share(mesh, verify=True)
    return state.step, fingerprint(model.state_dict())


def _share_after_a_split(folder: str, rank: int) -> list[float]:
    """Rank 0 was cut off after its step 1; then rank 1 has made its own step 1 without it."""
    model = nn.Linear(1, 1)
    state = State(model=model)
    _join(folder, rank, 2)
    state.share(epoch=1)
    if rank == 1:
        dist.destroy_process_group()
        _join(f"{folder}/alone", 0, 1)
        state.share(epoch=2)
    nn.init.constant_(model.weight, rank)
    nn.init.constant_(model.bias, rank)
    state.commit()
    dist.destroy_process_group()
    _join(f"{folder}/again", rank, 2)
    state.share(epoch=3, verify=True)
    return [float(parameter) for parameter in model.parameters()]


def test_of_the_same_step_the_later_rounds_is_taken(processes: Processes, tmp_path: Path) -> None:
    for name in ("alone", "again"):
        (tmp_path / name).mkdir()
    for rank in range(2):
        processes.start(_share_after_a_split, str(tmp_path), rank)
    assert processes.values() == [[1.0, 1.0], [1.0, 1.0]]


def test_each_shard_comes_from_a_rank_that_has_it(processes: Processes, tmp_path: Path) -> None:
    for rank in range(4):
        processes.start(_share_shards, str(tmp_path), rank, [3, 2, 2, 1])
    shared = processes.values()
    assert [step for step, _ in shared] == [2] * 4, "the newest step that both shards have"
    assert shared[0] == shared[2] != shared[1] == shared[3]


def _survive_torn(folder: str, rank: int, torn: list[int]) -> None:
    state, _, optimizer, _ = _made(0, 1)
    _join(folder, rank, 2)
    state.share()
    if rank in torn:
        optimizer.step()
    state.share()


def test_a_step_that_nobody_has_whole_is_an_error_on_all_ranks(processes: Processes, tmp_path: Path) -> None:
    for rank in range(2):
        processes.start(_survive_torn, str(tmp_path), rank, [0, 1])
    assert [outcome.error.partition(":")[0] for outcome in processes.results()] == ["TornStateError"] * 2


class Deadly(Counter):
    """An entry whose process dies when it is to send its state: when asked for it more often than is ``allowed``."""

    def __init__(self, count: int, allowed: int = 1) -> None:
        super().__init__(count)
        self._left = allowed

    def state_dict(self) -> dict[str, Any]:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return super().state_dict()


def _lose_the_source(folder: str, rank: int) -> None:
    state = State(entry=Counter(1) if rank else Deadly(2))
    state.commit(2 - rank)
    _join(folder, rank, 2)
    with contextlib.suppress(RuntimeError):
        state.share()
    dist.destroy_process_group()
    _join(f"{folder}/alone", 0, 1)
    state.share()


def _outlive_the_source(processes: Processes, directory: Path, work: Callable[[str, int], object]) -> Outcome:
    """What becomes of rank 1, when rank 0 was killed while it sent its state."""
    (directory / "alone").mkdir()
    for rank in range(2):
        processes.start(work, str(directory), rank)
    source, receiver = processes.results()
    assert source.error == "killed"
    return receiver


def test_a_state_is_torn_whose_source_dies_before_all_of_it_has_arrived(processes: Processes, tmp_path: Path) -> None:
    receiver = _outlive_the_source(processes, tmp_path, _lose_the_source)
    assert receiver.error.startswith("TornStateError: No process has the state of step 1")


def _lose_the_source_of_a_survivor(folder: str, rank: int) -> tuple[int, bool]:
    """Rank 0 is a step ahead of rank 1, and dies when a part of its state has arrived there."""
    state, model, optimizer, counter = _made(0, 1)
    _join(folder, rank, 2)
    state.share()
    before = [fingerprint(entry.state_dict()) for entry in (model, optimizer, counter)]
    if rank == 0:
        model(torch.rand(4, 3)).sum().backward()
        optimizer.step()
        state.commit()
        broadcast, sent = dist.broadcast, count()
        dist.broadcast = lambda *args: os.kill(os.getpid(), signal.SIGKILL) if next(sent) == 2 else broadcast(*args)
    with contextlib.suppress(RuntimeError):
        state.share()
    dist.destroy_process_group()
    _join(f"{folder}/alone", 0, 1)
    state.share(verify=True)
    return state.step, before == [fingerprint(entry.state_dict()) for entry in (model, optimizer, counter)]


@pytest.mark.fault(
    "the only worker with the newest step dies while it sends its state", "a survivor that is a step behind goes on"
)
def test_a_survivor_keeps_its_state_until_all_of_a_newer_one_is_there(processes: Processes, tmp_path: Path) -> None:
    survivor = _outlive_the_source(processes, tmp_path, _lose_the_source_of_a_survivor)
    assert survivor.value == (1, True), survivor


def _share_without_memory(folder: str, rank: int) -> tuple[int, str]:
    """Rank 1, which is a step behind, has no memory for a second state."""
    state, model, optimizer, _ = _made(0, 1)
    _join(folder, rank, 2)
    state.share()
    if rank == 0:
        optimizer.step()
        state.commit()

    def refuse(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    torch.empty_like = refuse  # type: ignore[assignment]
    state.share(verify=True)
    return state.step, fingerprint(model.state_dict())


def test_without_memory_for_a_second_state_it_arrives_in_place(processes: Processes, tmp_path: Path) -> None:
    for rank in range(2):
        processes.start(_share_without_memory, str(tmp_path), rank)
    ahead, behind = processes.values()
    assert ahead == behind
    assert ahead[0] == 2


def _lose_one_of_two_sources(folder: str, rank: int) -> tuple[int, int]:
    """Ranks 0 and 1 have the same state; 0 dies while it sends that to 2, which is new."""
    entry = Deadly(0, allowed=2) if rank == 0 else Counter(0)
    state = State(entry=entry)
    if rank < 2:
        _join(folder, rank, 2)
        state.share()
        dist.destroy_process_group()
        entry.count = 7
        state.commit()
    (together := Path(folder, "together")).mkdir(exist_ok=True)
    _join(str(together), rank, 3)
    with contextlib.suppress(RuntimeError):
        state.share()
    dist.destroy_process_group()
    (after := Path(folder, "after")).mkdir(exist_ok=True)
    _join(str(after), rank - 1, 2)
    state.share()
    return state.step, entry.count


def test_who_has_the_newest_step_keeps_it_when_its_source_dies(processes: Processes, tmp_path: Path) -> None:
    for rank in range(3):
        processes.start(_lose_one_of_two_sources, str(tmp_path), rank)
    killed, survivor, newcomer = processes.results()
    assert killed.error == "killed"
    assert survivor.value == newcomer.value == (1, 7), (survivor, newcomer)


def _disagree(folder: str, rank: int) -> None:
    _join(folder, rank, 2)
    State(**{f"model{rank}": nn.Linear(1, 1)}).share()


def test_ranks_with_other_entries_are_named(processes: Processes, tmp_path: Path) -> None:
    for rank in range(2):
        processes.start(_disagree, str(tmp_path), rank)
    for outcome in processes.results():
        assert "Rank 1 has the state's entries ['model1'], and rank 0 has ['model0']" in outcome.error


class Shuffled:
    """An entry that lists its tensors in another order on each rank."""

    def __init__(self, rank: int) -> None:
        self.tensors = {name: torch.full((2,), float(ord(name) + 100 * rank)) for name in "abcd"}
        self._order = random.Random(rank).sample("abcd", 4)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: self.tensors[name] for name in self._order}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.tensors = dict(state)


def _share_shuffled(folder: str, rank: int) -> dict[str, list[float]]:
    _join(folder, rank, 2)
    entry = Shuffled(rank)
    State(entry=entry).share()
    return {name: tensor.tolist() for name, tensor in sorted(entry.tensors.items())}


def test_ranks_may_list_their_tensors_in_another_order(processes: Processes, tmp_path: Path) -> None:
    for rank in range(2):
        processes.start(_share_shuffled, str(tmp_path), rank)
    assert processes.values() == [{name: [float(ord(name))] * 2 for name in "abcd"}] * 2


class Drifting(Shuffled):
    """An entry that does not take what it is given."""

    def load_state_dict(self, _: dict[str, torch.Tensor]) -> None:
        self.tensors["a"] = self.tensors["a"] + 1


def _verify(folder: str, rank: int) -> None:
    _join(folder, rank, 2)
    State(entry=Drifting(rank)).share(verify=True)


def test_a_difference_is_an_error_that_names_the_entry(processes: Processes, tmp_path: Path) -> None:
    for rank in range(2):
        processes.start(_verify, str(tmp_path), rank)
    for outcome in processes.results():
        assert "After step 0 the entry 'entry' of ranks [1] is not rank 0's" in outcome.error
