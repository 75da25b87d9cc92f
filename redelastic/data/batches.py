"""The samples of each step, for each rank, as a function of the step: the world size decides only how they are cut."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from .orders import Epoch, LengthGrouped, Samples, ShardRange, Shards

_FIXED: Final = ("length", "global_batch", "seed", "shuffle", "drop_last")  # changing one of them changes the order


class MicroBatch(NamedTuple):
    """What a rank computes at once.

    Attributes:
        step: number of the step, from 0.
        indices: of the samples, at most ``micro_batch`` of them, at least one.
        loss_factor: multiply the sum of the samples' losses by it. The gradient that DDP averages over the ranks is
            then that of the mean loss of the step's samples. 0 for padding.
        last: whether it is the rank's last one of the step: synchronize gradients, and let the optimizer step.
        padding: whether the rank has no samples left for it. The one sample is the first of the step, and is counted
            elsewhere; it has the rank take part in collectives, and adds 0 to the gradient.
    """

    step: int
    indices: list[int]
    loss_factor: float
    last: bool
    padding: bool

    def sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Return a context for forward and backward: the model's ``no_sync()``, if it has one, until the last.

        Gradients are then reduced once a step.
        """
        no_sync = None if self.last else getattr(model, "no_sync", None)
        return nullcontext() if no_sync is None else no_sync()


class ElasticBatches:
    """The batches of a job whose number of ranks changes.

    The order of an epoch depends on the seed and the epoch. A step takes the next ``global_batch`` samples of it; the
    last one of an epoch takes what is left. Each rank takes its part, as even as possible, in micro-batches of at most
    ``micro_batch``; all ranks have the same number of them. ::

        batches = ElasticBatches(dataset, global_batch=256, micro_batch=16, epochs=3)
        batches.load_state_dict(checkpoint["batches"])
        for batch, (inputs, targets) in batches.load(num_workers=4):
            with batch.sync(model):
                losses = loss(model(inputs), targets)  # reduction="none"
                (losses.sum() * batch.loss_factor).backward()
            if batch.last:
                optimizer.step()
                optimizer.zero_grad()
                batches.commit()

    Its state is the number of committed steps. Memory does not grow with the data set.

    Args:
        dataset: a data set with a length, whose items have indices from 0; or its length alone.
        global_batch: samples of a step, of all ranks together.
        micro_batch: the most samples that a rank computes at once.
        seed: selects the order; not negative.
        shuffle: whether the order is random, and new in each epoch.
        epochs: how often each sample is used; None for no end.
        drop_last: whether to leave out what is left at an epoch's end. Shuffled, each epoch leaves out other samples.
        order: `LengthGrouped` or `Shards`, instead of samples at random places.

    Attributes:
        step: number of committed steps, which is the number of the next one.

    Raises:
        ValueError: an argument is out of range, or they contradict each other.
    """

    def __init__(
        self,
        dataset: Sized | int,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = 1,
        drop_last: bool = False,
        order: LengthGrouped | Shards | None = None,
    ) -> None:
        self._dataset = dataset
        self.length = dataset if isinstance(dataset, int) else _length(dataset)
        for name, number in (("the length", self.length), ("global_batch", global_batch), ("micro_batch", micro_batch)):
            _require(name, number, 1)
        _require("seed", seed, 0)
        if epochs is not None:
            _require("epochs", epochs, 1)
        if drop_last and global_batch > self.length:
            raise ValueError(
                f"drop_last leaves out all {self.length} samples: they do not fill a global batch of {global_batch}. "
                "Lower global_batch, or use drop_last=False."
            )
        if order is not None and len(order) != self.length:
            raise ValueError(
                f"The order is for {len(order)} samples, and the data set has {self.length}: "
                f"give {type(order).__name__} one number for each."
            )
        self.global_batch, self.micro_batch = global_batch, micro_batch
        self.seed, self.shuffle, self.epochs, self.drop_last = seed, shuffle, epochs, drop_last
        self._order = order or Samples()
        self.step = 0

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of each epoch."""
        return self.length // self.global_batch if self.drop_last else -(-self.length // self.global_batch)

    @property
    def steps(self) -> int | None:
        """Number of steps of all epochs; None for no end."""
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    def batches(self, step: int, rank: int, size: int) -> list[MicroBatch]:
        """Compute a rank's micro-batches of a step. It depends on nothing but the arguments and the constructor's.

        Args:
            step: from 0 to `steps` - 1.
            rank: from 0 to ``size`` - 1.
            size: number of ranks that share the step.

        Raises:
            IndexError: there is no such step.
            ValueError: there is no such rank, there are more ranks than samples in a global batch, or the data set has
                another length than before.
        """
        epoch, start, stop = self._span(step, rank, size)
        samples = stop - start
        most = -(-samples // size)  # of any rank
        parts = -(-most // self.micro_batch)
        first, last = start + rank * samples // size, start + (rank + 1) * samples // size
        own = last - first
        indices: list[int] = self._order.indices(epoch, first, last).tolist() if own else []
        first_of_step: list[int] = [] if own >= parts else self._order.indices(epoch, start, start + 1).tolist()
        found = []
        for part in range(parts):
            some = indices[part * own // parts : (part + 1) * own // parts]
            factor = size / samples if some else 0.0
            found.append(MicroBatch(step, some or first_of_step, factor, part == parts - 1, padding=not some))
        return found

    def shard(self, step: int, rank: int, size: int) -> list[ShardRange]:
        """Compute what a rank reads of which shards for a step: the arguments and errors are those of `batches`.

        Raises:
            TypeError: the order is not `Shards`.
        """
        if not isinstance(self._order, Shards):
            raise TypeError("Only samples in shards have ranges: use ElasticBatches(…, order=Shards(counts)).")
        some = (batch.indices for batch in self.batches(step, rank, size) if not batch.padding)
        return self._order.ranges([index for indices in some for index in indices])

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.iterate()

    def iterate(self, rank: int | None = None, size: int | None = None) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches from the committed step on.

        Args:
            rank: among the ranks that share the data; by default that of the default process group, or before there is
                one, of the environment.
            size: number of these ranks; by default as for ``rank``.

        Raises:
            RuntimeError: the last step was not committed.
            ValueError: see `batches`.
        """
        for batch in self._ahead(*_place(rank, size)):
            yield batch
            self._require_commit(batch)

    def load(
        self, rank: int | None = None, size: int | None = None, **options: Any
    ) -> Iterator[tuple[MicroBatch, Any]]:
        """Yield the same with their samples, collated by a `torch.utils.data.DataLoader` that is made here.

        Its workers read ahead. When the job changes its size, or a step is repeated, call it again: new workers
        start at the committed step.

        Args:
            rank: see `iterate`.
            size: see `iterate`.
            options: of the ``DataLoader``, such as ``num_workers`` and ``collate_fn``.

        Raises:
            TypeError: the constructor got a length instead of a data set.
            RuntimeError: the last step was not committed.
            ValueError: see `batches`; or ``in_order=False``, which would mix up batches.
        """
        if isinstance(self._dataset, int):
            raise TypeError("ElasticBatches has a length but no data set to load from: give it the data set.")
        if not options.get("in_order", True):
            raise ValueError("in_order=False would pair batches with the samples of others: leave it out.")
        ahead: deque[MicroBatch] = deque()

        def indices() -> Iterator[list[int]]:
            for batch in self._ahead(*_place(rank, size)):
                ahead.append(batch)
                yield batch.indices

        loader: DataLoader[Any] = DataLoader(self._dataset, batch_sampler=indices(), **options)  # type: ignore[arg-type]
        for samples in loader:
            batch = ahead.popleft()
            yield batch, samples
            self._require_commit(batch)

    def commit(self) -> None:
        """Count the current step as done. Call it on all ranks after the optimizer's step, before saving."""
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of committed steps, and what the order depends on. It is the same on all ranks."""
        return {"step": self.step, **{name: getattr(self, name) for name in _FIXED}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the committed steps of a state.

        Raises:
            ValueError: the order is another one, so samples would be used twice or never.
        """
        changed = [
            f"{name} {state[name]!r} is now {getattr(self, name)!r}"
            for name in _FIXED
            if state[name] != getattr(self, name)
        ]
        if changed:
            raise ValueError(
                f"The order has changed since the state was saved: {', '.join(changed)}. Samples would be used twice "
                "or never. Restore the old values, or start a new order: do not load this state."
            )
        self.step = state["step"]

    def _span(self, step: int, rank: int, size: int) -> tuple[Epoch, int, int]:
        """The epoch of a step, and its places in the order."""
        if not 0 <= rank < size:
            raise ValueError(f"There is no rank {rank} among {size}: ranks go from 0 to size - 1.")
        if self.global_batch < size:
            raise ValueError(
                f"{size} ranks cannot share a global batch of {self.global_batch}: each needs a sample. "
                "Raise global_batch, or use fewer ranks."
            )
        if step < 0 or (self.steps is not None and step >= self.steps):
            raise IndexError(f"There is no step {step}: {self.epochs or 'endless'} epochs have {self.steps} steps.")
        if not isinstance(self._dataset, int) and (length := len(self._dataset)) != self.length:
            raise ValueError(
                f"The data set had {self.length} samples and now has {length}: samples would be used twice or never. "
                "Keep its length while a job runs, or make a new ElasticBatches, which starts a new order."
            )
        number, row = divmod(step, self.steps_per_epoch)
        used = min(self.steps_per_epoch * self.global_batch, self.length)
        epoch = Epoch(number, self.length, used, self.global_batch, self.seed, self.shuffle)
        return epoch, row * self.global_batch, min((row + 1) * self.global_batch, used)

    def _ahead(self, rank: int, size: int) -> Iterator[MicroBatch]:
        """Yield micro-batches from the committed step on, whether or not the steps before are committed."""
        step = self.step
        while self.steps is None or step < self.steps:
            yield from self.batches(step, rank, size)
            step += 1

    def _require_commit(self, batch: MicroBatch) -> None:
        """Refuse to go on to the next step while the position is still that of an earlier one."""
        if self.step != batch.step + batch.last:
            raise RuntimeError(
                f"After {'the last' if batch.last else 'a'} micro-batch of step {batch.step}, {self.step} steps are "
                "committed. Call commit() once a step, after the optimizer's; to repeat a step, iterate anew."
            )


def _length(dataset: Sized) -> int:
    try:
        return len(dataset)
    except TypeError:
        raise TypeError(
            f"ElasticBatches needs a data set with a length, not {type(dataset).__name__}: give it the length, or for "
            "a stream the number of records in each shard, as Shards."
        ) from None


def _require(name: str, number: int, least: int) -> None:
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} of ElasticBatches is {number!r}: it must be an integer of at least {least}.")


def _place(rank: int | None, size: int | None) -> tuple[int, int]:
    if (rank is None) != (size is None):
        raise ValueError(f"Give both rank and size, or neither: they are {rank} and {size}.")
    if rank is not None and size is not None:
        return rank, size
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
