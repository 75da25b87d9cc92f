"""Batches over random schedules of sizes: every sample once, and the gradients of one process."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sized
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from redelastic.data import ElasticBatches, LengthGrouped, MicroBatch, ShardRange, Shards
from tests.support.long_tests import examples


@st.composite
def any_batches(draw: st.DrawFn, least_global_batch: int = 1) -> ElasticBatches:
    """Batches of any parameters."""
    global_batch = draw(st.integers(least_global_batch, 48))
    drop_last = draw(st.booleans())
    length = draw(st.integers(global_batch if drop_last else 1, 200))
    order: LengthGrouped | Shards | None = None
    kind = draw(st.sampled_from(["samples", "lengths", "shards"]))
    if kind == "lengths":
        lengths = draw(st.lists(st.integers(0, 9), min_size=length, max_size=length))
        order = LengthGrouped(lengths, window=draw(st.integers(1, 5)))
    elif kind == "shards":
        ends = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=6))})
        order = Shards([end - start for start, end in pairwise(ends)])
    return ElasticBatches(
        length,
        global_batch=global_batch,
        micro_batch=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 1 << 40)),
        shuffle=draw(st.booleans()),
        epochs=draw(st.integers(1, 3)),
        drop_last=drop_last,
        order=order,
    )


sizes = st.lists(st.integers(1, 16), min_size=1, max_size=12)


def counted(parts: list[list[MicroBatch]]) -> list[int]:
    """The samples of all ranks' micro-batches, without padding."""
    return [index for part in parts for batch in part if not batch.padding for index in batch.indices]


@given(any_batches(), st.data())
def test_the_size_changes_only_how_a_step_is_split(batches: ElasticBatches, data: st.DataObject) -> None:
    assert batches.steps is not None
    step = data.draw(st.integers(0, batches.steps - 1))
    size = data.draw(st.integers(1, min(16, batches.global_batch)))
    alone = counted([batches.batches(step, 0, 1)])
    parts = [batches.batches(step, rank, size) for rank in range(size)]
    assert counted(parts) == alone
    assert len({len(part) for part in parts}) == 1, "the ranks' collectives would not match"
    shares = [len(counted([part])) for part in parts]
    assert max(shares) - min(shares) <= 1
    assert len(parts[0]) == -(-max(shares) // batches.micro_batch), "more micro-batches than needed"
    for batch in (batch for part in parts for batch in part):
        assert batch.step == step
        assert 1 <= len(batch.indices) <= batches.micro_batch
        assert batch.loss_factor == (0 if batch.padding else size / len(alone))
        assert not batch.padding or set(batch.indices) <= set(alone)
    assert all([batch.last for batch in part] == [False] * (len(part) - 1) + [True] for part in parts)


@settings(max_examples=examples(40))
@given(any_batches())
def test_each_epoch_has_every_sample_once(batches: ElasticBatches) -> None:
    assert batches.steps is not None
    for epoch in range(batches.epochs or 0):
        steps = range(epoch * batches.steps_per_epoch, (epoch + 1) * batches.steps_per_epoch)
        samples = [counted([batches.batches(step, 0, 1)]) for step in steps]
        assert all(len(some) == batches.global_batch for some in samples[: None if batches.drop_last else -1])
        used = Counter(index for some in samples for index in some)
        assert set(used.values()) == {1}
        left_out = batches.length % batches.global_batch if batches.drop_last else 0
        assert len(used) == batches.length - left_out
        assert set(used) <= set(range(batches.length))


@settings(max_examples=examples(25))
@given(any_batches(16), sizes, st.data())
def test_kills_torn_steps_and_resumes_lose_and_repeat_nothing(
    batches: ElasticBatches, schedule: list[int], data: st.DataObject
) -> None:
    """Each round has its own size and ends within a step; the next round resumes from an earlier save."""
    assert batches.steps is not None
    reference = [counted([batches.batches(step, 0, 1)]) for step in range(batches.steps)]
    committed: list[list[int]] = []
    saved, saved_steps = json.dumps(batches.state_dict()), 0
    for size in [*schedule, 3]:
        ranks = [copy.copy(batches) for _ in range(size)]
        for rank in ranks:
            rank.load_state_dict(json.loads(saved))
            assert rank.step == saved_steps
        del committed[saved_steps:]  # the steps after the save are undone
        until = None if size == 3 else ranks[0].step + data.draw(st.integers(0, 4))
        steps = zip(*(whole_steps(rank, number, size) for number, rank in enumerate(ranks)), strict=True)
        for parts in steps:
            if parts[0][0].step == until:
                break  # torn: computed, but not committed
            committed.append(counted(list(parts)))
            for rank in ranks:
                rank.commit()
            if data.draw(st.booleans()):
                saved, saved_steps = json.dumps(ranks[size // 2].state_dict()), len(committed)
    assert committed == reference


def whole_steps(batches: ElasticBatches, rank: int, size: int) -> Any:
    """The micro-batches of each step as a list, before the step is committed."""
    while batches.steps is None or batches.step < batches.steps:
        part = []
        for batch in batches.iterate(rank, size):
            part.append(batch)
            if batch.last:
                break
        yield part


INPUTS = torch.randn(200, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
TARGETS = INPUTS.sin().sum(1)


def train(batches: ElasticBatches, schedule: list[int]) -> list[float]:
    """The loss of each step, with DDP's mean over the ranks' gradients."""
    weights = torch.linspace(-1, 1, 5, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.AdamW([weights], lr=0.05)
    curve = []
    assert batches.steps is not None
    for step in range(batches.steps):
        size = schedule[step % len(schedule)]
        loss = torch.zeros((), dtype=torch.float64)
        for rank in range(size):
            for batch in batches.batches(step, rank, size):
                errors = (INPUTS[batch.indices] @ weights).tanh() - TARGETS[batch.indices]
                part = errors.square().sum() * batch.loss_factor / size
                part.backward()
                loss += part.detach()
        curve.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
    return curve


@settings(max_examples=examples(15))
@given(any_batches(16), sizes)
def test_the_loss_curve_is_that_of_one_process(batches: ElasticBatches, schedule: list[int]) -> None:
    torch.testing.assert_close(train(batches, schedule), train(batches, [1]), rtol=0, atol=1e-10)


def test_a_rank_without_samples_takes_part_with_factor_0() -> None:
    batches = ElasticBatches(10, global_batch=8, micro_batch=4, shuffle=False)
    assert batches.batches(1, 3, 4) == [MicroBatch(1, [9], 4 / 2, last=True, padding=False)]
    assert batches.batches(1, 0, 4) == [MicroBatch(1, [8], 0.0, last=True, padding=True)]


def test_steps_of_a_billion_samples_are_computed_without_a_list() -> None:
    batches = ElasticBatches(10**9, global_batch=256, micro_batch=16, epochs=None)
    assert batches.steps is None
    for step in (0, 3_906_249, 10**10):
        assert len(set(counted([batches.batches(step, rank, 8) for rank in range(8)]))) == 256


def test_orders_differ_by_epoch_and_seed_only() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        batches = ElasticBatches(100, global_batch=100, micro_batch=100, seed=seed, epochs=2)
        return counted([batches.batches(epoch, 0, 1)])

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4


def test_samples_of_similar_length_come_together() -> None:
    lengths = torch.randint(1, 1000, (4096,), generator=torch.Generator().manual_seed(0))
    grouped = ElasticBatches(4096, global_batch=32, micro_batch=32, order=LengthGrouped(lengths, window=16))
    plain = ElasticBatches(4096, global_batch=32, micro_batch=32)

    def padding(batches: ElasticBatches) -> float:
        steps = [lengths[counted([batches.batches(step, 0, 1)])] for step in range(128)]
        return 1 - float(lengths.sum()) / sum(int(some.max()) * len(some) for some in steps)

    assert padding(grouped) < 0.1
    assert padding(plain) > 0.4
    means = [float(lengths[counted([grouped.batches(step, 0, 1)])].double().mean()) for step in range(128)]
    windows = [means[start : start + 16] for start in range(0, 128, 16)]
    places = {tuple(sorted(range(16), key=window.__getitem__)) for window in windows}
    assert len(places) == len(windows), "windows have their short samples at the same places"
    assert tuple(range(16)) not in places, "steps grow in length"


def test_the_samples_that_are_left_out_do_not_depend_on_lengths() -> None:
    lengths = list(range(100))
    grouped, plain = (
        ElasticBatches(100, global_batch=40, micro_batch=40, drop_last=True, order=order)
        for order in (LengthGrouped(lengths), None)
    )
    used, by_chance = (
        {index for step in range(2) for index in counted([batches.batches(step, 0, 1)])} for batches in (grouped, plain)
    )
    assert used == by_chance


def test_shards_are_read_one_after_the_other() -> None:
    counts = [7, 0, 5, 9]
    batches = ElasticBatches(21, global_batch=6, micro_batch=6, order=Shards(counts))
    read = [part for step in range(4) for rank in range(2) for part in batches.shard(step, rank, 2)]
    records = [(part.shard, record) for part in read for record in range(part.start, part.stop)]
    assert len(records) == 21
    shards = [shard for shard, _ in records]
    assert sum(one != other for one, other in pairwise(shards)) == 2, "a shard is left and opened again"
    assert sorted(records) == [(shard, record) for shard, count in enumerate(counts) for record in range(count)]
    assert [record for shard, record in records if shard == 3] == list(range(9))


def test_epochs_take_the_shards_in_other_orders() -> None:
    batches = ElasticBatches(8, global_batch=8, micro_batch=8, epochs=9, order=Shards([2] * 4))
    orders = [[part.shard for part in batches.shard(epoch, 0, 1)] for epoch in range(9)]
    assert len(set(map(tuple, orders))) > 4


def test_a_rank_without_samples_reads_nothing() -> None:
    batches = ElasticBatches(10, global_batch=8, micro_batch=4, order=Shards([10]))
    assert [batches.shard(1, rank, 4) for rank in range(4)] == [[], [(0, 8, 9)], [], [(0, 9, 10)]]


def test_ranges_join_neighbours_within_one_shard_only() -> None:
    shards = Shards([3, 2])
    assert shards.ranges([1, 2, 3, 0]) == [ShardRange(0, 1, 3), ShardRange(1, 0, 1), ShardRange(0, 0, 1)]
    assert shards.ranges([0, 4]) == [ShardRange(0, 0, 1), ShardRange(1, 1, 2)]
    assert shards.ranges([0, 2]) == [ShardRange(0, 0, 1), ShardRange(0, 2, 3)]


# -- loading


class Squares(Sized):
    """A map-style data set."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        return index**2


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more processes than the machine has cores
@pytest.mark.parametrize("workers", [0, 2])
def test_loader_workers_that_read_ahead_restart_at_the_committed_step(workers: int) -> None:
    batches = ElasticBatches(Squares(), global_batch=12, micro_batch=5)
    seen: list[int] = []
    for size in (2, 3, 1):
        for batch, squares in batches.load(0, size, num_workers=workers):
            assert squares.tolist() == [index**2 for index in batch.indices]
            if batch.last:
                seen.append(batch.step)
                batches.commit()
                if batch.step in (0, 2):
                    break  # the loader has read further ahead
    assert seen == list(range(5))
    assert batches.step == batches.steps == 5


def test_iteration_takes_rank_and_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = ElasticBatches(Squares(), global_batch=10, micro_batch=5)
    first = next(iter(batches))
    assert first == batches.batches(0, 1, 2)[0]
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_sampler=[first.indices])
    assert next(iter(loader))[0].tolist() == first.indices


def test_iteration_takes_the_rank_from_a_process_group_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    batches = ElasticBatches(50, global_batch=10, micro_batch=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert next(iter(batches)) == batches.batches(0, 0, 1)[0]
    finally:
        dist.destroy_process_group()


def test_gradients_are_synchronised_at_the_last_micro_batch_only() -> None:
    class Model(torch.nn.Module):
        def no_sync(self) -> str:
            return "no_sync"

    batch = MicroBatch(0, [1], 1.0, last=False, padding=False)
    assert batch.sync(Model()) == "no_sync"  # type: ignore[comparison-overlap]
    for context in (batch.sync(torch.nn.Linear(1, 1)), batch._replace(last=True).sync(Model())):
        with context:
            pass


# -- bad input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch": 0}, "micro_batch of ElasticBatches is 0: it must be an integer of at least 1"),
        ({"global_batch": -1}, "global_batch of ElasticBatches is -1"),
        ({"global_batch": 2.5}, "global_batch of ElasticBatches is 2.5"),
        ({"epochs": 0}, "epochs of ElasticBatches is 0"),
        ({"seed": -1}, "seed of ElasticBatches is -1: it must be an integer of at least 0"),
        ({"dataset": 0}, "the length of ElasticBatches is 0"),
        ({"dataset": []}, "the length of ElasticBatches is 0"),
        ({"drop_last": True, "global_batch": 99}, "drop_last leaves out all 50 samples.*Lower global_batch"),
        ({"order": Shards([20, 29])}, "for 49 samples, and the data set has 50: give Shards one number for each"),
        ({"order": LengthGrouped([1])}, "for 1 samples, and the data set has 50"),
    ],
)
def test_bad_arguments_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"dataset": 50, "global_batch": 8, "micro_batch": 2, **changes}
    with pytest.raises(ValueError, match=message):
        ElasticBatches(arguments.pop("dataset"), **arguments)


def test_bad_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="window is 0, not 1 or more"):
        LengthGrouped([1], window=0)
    with pytest.raises(ValueError, match=r"one length per sample, not a shape of \(1, 2\)"):
        LengthGrouped(torch.ones(1, 2))
    for counts in ([], [3, -1]):
        with pytest.raises(ValueError, match="Shards takes the number of records of each shard"):
            Shards(counts)


def test_a_stream_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not generator: give it the length, or .* as Shards"):
        ElasticBatches((i for i in range(3)), global_batch=1, micro_batch=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("place", "error", "message"),
    [
        ((0, 0, 9), ValueError, "9 ranks cannot share a global batch of 8.*Raise global_batch, or use fewer ranks"),
        ((0, 2, 2), ValueError, "no rank 2 among 2"),
        ((0, -1, 2), ValueError, "no rank -1 among 2"),
        ((7, 0, 1), IndexError, "no step 7: 1 epochs have 7 steps"),
        ((-1, 0, 1), IndexError, "no step -1"),
    ],
)
def test_bad_places_are_refused(place: tuple[int, int, int], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ElasticBatches(50, global_batch=8, micro_batch=2).batches(*place)


def test_a_rank_without_a_size_is_refused() -> None:
    with pytest.raises(ValueError, match="both rank and size, or neither: they are 1 and None"):
        next(ElasticBatches(50, global_batch=8, micro_batch=2).iterate(1))


def test_a_data_set_that_changes_its_length_is_refused() -> None:
    data = list(range(50))
    batches = ElasticBatches(data, global_batch=8, micro_batch=2)
    batches.batches(0, 0, 1)
    data.append(50)
    with pytest.raises(ValueError, match=r"had 50 samples and now has 51.*Keep its length"):
        batches.batches(0, 0, 1)


@given(any_batches(), st.sampled_from(["length", "global_batch", "seed", "shuffle", "drop_last"]))
def test_the_state_of_another_order_is_refused(batches: ElasticBatches, name: str) -> None:
    state = batches.state_dict()
    state[name] = not state[name] if isinstance(state[name], bool) else state[name] + 1
    assume(state != batches.state_dict())
    with pytest.raises(ValueError, match=rf"The order has changed .*: {name} {state[name]} is now"):
        batches.load_state_dict(state)


def test_a_step_that_is_not_committed_or_committed_twice_is_refused() -> None:
    data = list(range(50))
    for commits in (0, 2):
        batches = ElasticBatches(data, global_batch=8, micro_batch=8)
        iterators: list[Any] = [batches.iterate(), batches.load()]
        for iterator in iterators:
            batches.step = 0
            next(iterator)
            for _ in range(commits):
                batches.commit()
            with pytest.raises(RuntimeError, match=rf"the last micro-batch of step 0, {commits} steps are"):
                next(iterator)


def test_loading_needs_a_data_set_and_its_order() -> None:
    with pytest.raises(TypeError, match="a length but no data set"):
        next(ElasticBatches(50, global_batch=8, micro_batch=2).load())
    with pytest.raises(ValueError, match="in_order=False would pair batches"):
        next(ElasticBatches([1, 2], global_batch=1, micro_batch=2).load(in_order=False))
    with pytest.raises(TypeError, match=r"order=Shards\(counts\)"):
        ElasticBatches(50, global_batch=8, micro_batch=2).shard(0, 0, 1)
