"""The permutation: complete, random enough for its uses, and the same in every version."""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from redelastic.data import Permutation
from redelastic.data.permutation import MAX_LENGTH
from tests.support.long_tests import quick_first, quick_rows


@given(st.integers(1, 3000), st.integers(0, 1 << 63), st.integers(0, 1 << 40))
def test_every_number_comes_once(length: int, seed: int, epoch: int) -> None:
    found = Permutation(length, seed, epoch)(torch.arange(length))
    assert found.sort().values.equal(torch.arange(length))


@pytest.mark.parametrize("length", [1 << 16, (1 << 16) + 1, 300_007])
def test_every_number_of_many_comes_once(length: int) -> None:
    found = Permutation(length, 5)(torch.arange(length))
    assert found.sort().values.equal(torch.arange(length))


@given(st.integers(1, MAX_LENGTH), st.data())
def test_a_part_of_any_length_is_computed_as_in_the_whole(length: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20))
    permutation = Permutation(length, 1)
    found = permutation(torch.tensor(places))
    assert all(0 <= number < length for number in found.tolist())
    assert [int(permutation(torch.tensor([place]))) for place in places] == found.tolist()
    assert len(set(found.tolist())) == len(set(places))


def test_an_order_is_the_same_in_every_version() -> None:
    assert Permutation(10, 0, 0)(torch.arange(10)).tolist() == [0, 2, 7, 3, 9, 5, 6, 1, 8, 4]
    large = [233934329, 817477288, 255503770, 379986751, 263668996]
    assert Permutation(10**9, 7, 3)(torch.arange(5)).tolist() == large


def chi_square_limit(degrees: int) -> float:
    """Six standard deviations above the mean."""
    return degrees + 6 * math.sqrt(2 * degrees)


@pytest.mark.parametrize(("length", "each"), quick_rows([(3, 100), (2, 200), (4, 50), (5, 5)]))
def test_seeds_select_all_orders_equally_often(length: int, each: int) -> None:
    places = torch.arange(length)
    orders = math.factorial(length)
    counts = Counter(tuple(Permutation(length, seed, 0)(places).tolist()) for seed in range(each * orders))
    chi_square = sum((counts[order] - each) ** 2 / each for order in permutations(range(length)))
    assert chi_square < chi_square_limit(orders - 1)


@pytest.mark.parametrize("length", [1000, 65_537, 10**9])
@pytest.mark.parametrize("distance", quick_first([1, 2, 31_623]))
def test_places_and_numbers_are_independent(length: int, distance: int) -> None:
    samples, cells = 200_000, 16
    start = torch.arange(samples) % (length - min(distance, length // 2))
    for seed in range(3):
        permutation = Permutation(length, seed, 0)
        here = permutation(start)
        there = permutation((start + distance) % length)
        pairs = [
            (start * cells).div(length, rounding_mode="floor"),
            (here * cells).div(length, rounding_mode="floor"),
            (there * cells).div(length, rounding_mode="floor"),
        ]
        if length > 10 * samples:  # else the samples are not independent draws
            for one, other in ((pairs[1], pairs[2]), (here % cells, there % cells)):
                counts = torch.bincount(one * cells + other, minlength=cells**2).double()
                expected = samples / cells**2
                assert float(((counts - expected) ** 2 / expected).sum()) < chi_square_limit(cells**2 - 1)
        for one, other in ((start, here), (here, there)):
            correlation = float(torch.corrcoef(torch.stack([one.double(), other.double()]))[0, 1])
            assert abs(correlation) < 6 / math.sqrt(min(samples, length))


def test_epochs_and_seeds_have_unrelated_orders() -> None:
    places = torch.arange(100_000)
    orders = [Permutation(10**6, seed, epoch)(places).double() for seed in range(3) for epoch in range(3)]
    correlations = torch.corrcoef(torch.stack(orders)) - torch.eye(len(orders))
    assert float(correlations.abs().max()) < 6 / math.sqrt(len(places))


@pytest.mark.parametrize("length", quick_first([1000, 50_000]))
def test_there_are_as_many_cycles_as_in_a_random_permutation(length: int) -> None:
    """A random permutation has 1 fixed point and ln(n) + 0.58 cycles on average."""
    seeds = 40
    fixed = cycles = 0
    for seed in range(seeds):
        numbers = Permutation(length, seed, 1)(torch.arange(length)).tolist()
        fixed += sum(place == number for place, number in enumerate(numbers))
        seen = bytearray(length)
        for place in range(length):
            cycles += not seen[place]
            at = place
            while not seen[at]:
                seen[at] = 1
                at = numbers[at]
    mean = math.log(length) + 0.5772
    assert abs(fixed - seeds) < 5 * math.sqrt(seeds)
    assert abs(cycles - seeds * mean) < 5 * math.sqrt(seeds * mean)


@pytest.mark.parametrize("length", [0, -1, MAX_LENGTH + 1])
def test_a_length_out_of_range_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match=r"1 to 2\^60 numbers, not"):
        Permutation(length, 0)
