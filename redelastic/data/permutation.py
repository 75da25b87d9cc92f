"""A pseudo-random permutation that is computed index by index, in constant memory.

A Feistel network permutes the cells of a table with at least as many cells as numbers, and about as many rows as
columns (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A result beyond the last number goes through
the network again until it is one (cycle walking): so few cells are beyond it that this is rare. All of it is integer
arithmetic: the order of a seed does not change with the version of torch, as that of `torch.randperm` may.
"""

from __future__ import annotations

from math import isqrt
from typing import Final

import torch

MAX_LENGTH: Final = 1 << 60  # rows and columns, and the sum of two, fit 31 bits
_CHUNK: Final = 1 << 15  # indices whose vectors stay in the CPU's cache
_MASK: Final = (1 << 64) - 1
# Of a 32-bit hash (Wellons' lowbias32), as signed integers: twice as fast as one of 64 bits.
_FIRST: Final = 0x7FEB352D
_SECOND: Final = 0x846CA68B - (1 << 32)
_BITS_31: Final = (1 << 31) - 1


def mix(*numbers: int) -> int:
    """Hash integers to one of 64 bits, by SplitMix64."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


class Permutation:
    """A permutation of the numbers 0 to length - 1.

    Args:
        length: how many numbers, from 1 to 2^60.
        key: integers that select the permutation, such as a seed and an epoch.

    Raises:
        ValueError: ``length`` is out of range.
    """

    def __init__(self, length: int, *key: int) -> None:
        if not 1 <= length <= MAX_LENGTH:
            raise ValueError(f"A permutation has 1 to 2^60 numbers, not {length}.")
        self._length = length
        self._rows = isqrt(length - 1) + 1
        self._columns = -(-length // self._rows)
        rounds = 8 if length >= 1 << 16 else 24  # in a small table a round's function has few values to differ by
        self._keys = [mix(*key, number) >> 33 for number in range(rounds)]

    def __call__(self, indices: torch.Tensor) -> torch.Tensor:
        """Map indices to their numbers.

        Args:
            indices: int64, each from 0 to length - 1, in any order and number.
        """
        if indices.numel() > _CHUNK:
            return torch.cat([self(part) for part in indices.split(_CHUNK)])
        found = self._encrypt(indices)
        while (outside := found >= self._length).any():
            found[outside] = self._encrypt(found[outside])
        return found

    def _encrypt(self, numbers: torch.Tensor) -> torch.Tensor:
        """Permute the numbers of all cells."""
        rows, columns = self._rows, self._columns
        row = numbers.div(columns, rounding_mode="floor")
        left, right = row.to(torch.int32), (numbers - row * columns).to(torch.int32)
        for key in self._keys:
            mixed = (right ^ key).mul_(_FIRST)
            mixed = mixed.bitwise_xor_(mixed >> 15).mul_(_SECOND).bitwise_and_(_BITS_31)
            scaled = mixed.to(torch.int64).mul_(rows).bitwise_right_shift_(31)  # to 0 … rows - 1
            total = scaled.to(torch.int32).add_(left).sub_(rows)
            left, right = right, total.add_((total >> 31).bitwise_and_(rows))  # plus rows, where it is negative
            rows, columns = columns, rows
        return left.to(torch.int64) * columns + right
