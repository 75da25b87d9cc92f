"""The orders in which an epoch can take its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .permutation import Permutation


class Epoch(NamedTuple):
    """What an order depends on.

    Attributes:
        number: of the epoch, from 0.
        samples: in the data set.
        used: of them, in this epoch: all, or as many as fill global batches.
        global_batch: samples of a step.
        seed: of the job.
        shuffle: whether the order is random.
    """

    number: int
    samples: int
    used: int
    global_batch: int
    seed: int
    shuffle: bool

    def permute(self, numbers: torch.Tensor, length: int, *more_key: int) -> torch.Tensor:
        """Permute numbers below ``length``, unless the order is not random."""
        return Permutation(length, self.seed, self.number, *more_key)(numbers) if self.shuffle else numbers


class Samples:
    """All samples, each at a random place."""

    def indices(self, epoch: Epoch, start: int, stop: int) -> torch.Tensor:
        """Return the samples at places ``start`` to ``stop`` of the epoch, which belong to one step."""
        return epoch.permute(torch.arange(start, stop), epoch.samples)


class LengthGrouped:
    """Puts samples of similar length into the same step, so that little of a padded batch is padding.

    The shuffled samples of ``window`` steps are sorted by length, ties by their shuffled order, and cut into steps,
    whose order is random again; the short last step of an epoch keeps its place. An epoch still uses each sample once.

    Args:
        lengths: of each sample, in any unit: a sequence of integers or a tensor.
        window: number of steps that are sorted together. More steps waste less padding, and are less random.

    Raises:
        ValueError: ``window`` is less than 1, or ``lengths`` has not one dimension.
    """

    def __init__(self, lengths: Sequence[int] | torch.Tensor, *, window: int = 32) -> None:
        if window < 1:
            raise ValueError(f"LengthGrouped sorts at least one step together: window is {window}, not 1 or more.")
        self._lengths = torch.as_tensor(lengths)
        if self._lengths.dim() != 1:
            raise ValueError(f"LengthGrouped takes one length per sample, not a shape of {tuple(self._lengths.shape)}.")
        self._window = window

    def __len__(self) -> int:
        return len(self._lengths)

    def indices(self, epoch: Epoch, start: int, stop: int) -> torch.Tensor:
        """Return the samples at places ``start`` to ``stop`` of the epoch, which belong to one step."""
        size = epoch.global_batch
        step = start // size
        window, row = divmod(step, self._window)
        first = window * self._window * size
        last = min(first + self._window * size, epoch.used)
        samples = epoch.permute(torch.arange(first, last), epoch.samples)
        samples = samples[self._lengths[samples].argsort(stable=True)]
        full = (last - first) // size
        if row < full:
            row = int(epoch.permute(torch.tensor([row]), full, window))
        begin = row * size + start - step * size
        return samples[begin : begin + stop - start]


class ShardRange(NamedTuple):
    """Consecutive records of one shard.

    Attributes:
        shard: its number, from 0.
        start: number of the first record in the shard, from 0.
        stop: number after that of the last record.
    """

    shard: int
    start: int
    stop: int


class Shards:
    """Takes the shards in random order, and the records of each one after the other, as a stream can be read.

    A record's index is its number when all shards are put one behind the other. Shuffle the records when you write the
    shards: inside a shard they keep their order.

    Args:
        counts: number of records of each shard.

    Raises:
        ValueError: there is no shard, or a count is negative.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        if not len(counts) or min(counts) < 0:
            raise ValueError(f"Shards takes the number of records of each shard, not {list(counts)!r:.80}.")
        self._counts = torch.as_tensor(counts, dtype=torch.int64)
        self._ends = self._counts.cumsum(0)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def indices(self, epoch: Epoch, start: int, stop: int) -> torch.Tensor:
        """Return the records at places ``start`` to ``stop`` of the epoch."""
        places = torch.arange(start, stop)
        order = epoch.permute(torch.arange(len(self._counts)), len(self._counts))
        ends = self._counts[order].cumsum(0)
        turn = torch.searchsorted(ends, places, right=True)
        return places - ends[turn] + self._ends[order[turn]]

    def ranges(self, indices: Sequence[int]) -> list[ShardRange]:
        """Find where records are, neighbours as one range, in the given order."""
        found: list[ShardRange] = []
        shards = torch.searchsorted(self._ends, torch.as_tensor(indices, dtype=torch.int64), right=True)
        for index, shard in zip(indices, shards.tolist(), strict=True):
            record = index - int(self._ends[shard] - self._counts[shard])
            if found and found[-1].shard == shard and found[-1].stop == record:
                found[-1] = found[-1]._replace(stop=record + 1)
            else:
                found.append(ShardRange(shard, record, record + 1))
        return found
