"""State: what a commit does, whose state is taken, and how it is taken apart."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

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
