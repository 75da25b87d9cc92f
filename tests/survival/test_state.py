"""State: whose is taken, how it travels, and that all ranks have the same afterwards."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from datetime import timedelta
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from redelastic.data import ElasticBatches
from redelastic.survival.state import (
    Report,
    RoundOverError,
    State,
    TornStateError,
    choose_sources,
    fingerprint,
    put_together,
    take_apart,
)
from tests.support.processes import Processes

reports = st.builds(
    Report, survived=st.booleans(), whole=st.booleans(), step=st.integers(0, 3), epoch=st.integers(0, 2)
)


# -- whose state is taken


def commit_of(report: Report) -> tuple[int, int]:
    return report.step, report.epoch


@given(st.lists(reports, min_size=1, max_size=6))
def test_the_newest_whole_step_of_a_survivor_is_taken(known: list[Report]) -> None:
    rivals = [report for report in known if report.survived] or known
    newest = max(map(commit_of, rivals))
    if any(report.whole and commit_of(report) == newest for report in rivals):
        [source] = (known[rank] for rank in choose_sources(known))
        assert source in rivals
        assert source.whole
        assert commit_of(source) == newest
    else:
        with pytest.raises(TornStateError, match=f"of step {newest[0]}: each has called optimizer.step"):
            choose_sources(known)


@given(st.lists(reports, min_size=4, max_size=8).filter(lambda known: len(known) % 2 == 0))
def test_the_newest_whole_step_that_all_shards_have_is_taken(known: list[Report]) -> None:
    rivals = [(rank, report) for rank, report in enumerate(known) if report.survived] or [*enumerate(known)]
    shards = [[report for rank, report in rivals if rank % 2 == shard] for shard in range(2)]
    common = min(max(map(commit_of, shard), default=(-1, -1)) for shard in shards)
    if all(any(report.whole and commit_of(report) == common for report in shard) for shard in shards):
        sources = choose_sources(known, 2)
        assert [rank % 2 for rank in sources] == [0, 1]
        assert all((rank, known[rank]) in rivals and known[rank].whole for rank in sources)
        assert {commit_of(known[rank]) for rank in sources} == {common}
    else:
        with pytest.raises(TornStateError):
            choose_sources(known, 2)


@pytest.mark.parametrize(
    ("steps", "whole", "why"),
    [
        ([3, None, 3, None], True, "No process has shard 1 of the state any more"),
        ([3, 2, 3, 2], True, "Each process with shard 0 is beyond step 2, and none with another shard is"),
        ([3, 2, 2, 2], False, "No process has the state of step 2: each has called"),
    ],
)
def test_a_shard_that_nobody_has_is_an_error(steps: list[int | None], whole: bool, why: str) -> None:
    known = [Report(step is not None, whole, step or 0) for step in steps]
    with pytest.raises(TornStateError, match=why):
        choose_sources(known, 2)


# -- commits


def test_a_commit_counts_steps_and_ends_a_round_that_is_over() -> None:
    state = State()
    state.commit()
    state.commit(10)
    assert state.step == 10
    with pytest.raises(ValueError, match=r"commit\(10\) does not follow step 10"):
        state.commit(10)

    def end(step: int) -> None:
        raise RoundOverError(f"after {step}")

    state.call_after_commit(end)
    with pytest.raises(RoundOverError, match="after 11"):
        state.commit()
    assert state.step == 11, "the step counts"


def test_an_end_of_the_round_before_an_optimizers_step_leaves_the_state_whole() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1)
    state, before = State(model=model, optimizer=optimizer), fingerprint(model.state_dict())

    def end() -> None:
        raise RoundOverError("in the middle")

    state.call_before_step(end)
    model(torch.ones(1)).sum().backward()
    with pytest.raises(RoundOverError, match="in the middle"):
        optimizer.step()
    assert fingerprint(model.state_dict()) == before
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    state.share()  # a torn one would be refused
    dist.destroy_process_group()


def test_a_sharded_model_is_refused() -> None:
    fsdp = import_module("torch.distributed.fsdp")  # it takes a second, and each process of xdist imports this module
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))  # in place
        with pytest.raises(TypeError, match=r"0\.weight of the entry 'model' is a DTensor: its parts are on several"):
            State(model=model).share()
    finally:
        dist.destroy_process_group()


def test_a_commit_includes_the_data() -> None:
    batches = ElasticBatches(100, global_batch=10, micro_batch=5)
    state = State(batches=batches)
    state.commit()
    assert (state.step, batches.step) == (1, 1)


def test_an_entry_without_a_state_is_refused() -> None:
    with pytest.raises(TypeError, match=r"State\(model=…\) needs an object with state_dict\(\) .* not a int"):
        State(model=3)  # type: ignore[arg-type]


# -- taking apart

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
tensors = st.lists(st.floats(allow_nan=False, width=32), max_size=3).map(torch.tensor)
states = st.recursive(
    scalars | tensors,
    lambda inner: (
        st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner)
    ),
    max_leaves=10,
)


@given(states)
def test_a_state_is_the_same_after_it_was_taken_apart(state: Any) -> None:
    again = put_together(*take_apart(state))
    assert fingerprint(again) == fingerprint(state)
    assert take_apart(again)[0] == take_apart(state)[0]


def test_a_fingerprint_tells_states_apart_but_not_their_order() -> None:
    one = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3]), "c": 1}
    assert fingerprint(one) == fingerprint(dict(reversed(one.items())))
    for other in (
        {**one, "c": 2},
        {**one, "a": torch.tensor([1.0, 2.5])},
        {**one, "b": torch.tensor([3], dtype=torch.int32)},
    ):
        assert fingerprint(one) != fingerprint(other)


# -- sharing, over gloo


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


def test_a_state_is_torn_whose_source_dies_before_all_of_it_has_arrived(processes: Processes, tmp_path: Path) -> None:
    (tmp_path / "alone").mkdir()
    for rank in range(2):
        processes.start(_lose_the_source, str(tmp_path), rank)
    source, receiver = processes.results()
    assert source.error == "killed"
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
    (tmp_path / "alone").mkdir()
    for rank in range(2):
        processes.start(_lose_the_source_of_a_survivor, str(tmp_path), rank)
    source, survivor = processes.results()
    assert source.error == "killed"
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
