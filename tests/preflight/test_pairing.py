"""Pairs of hosts: each host meets two others, a bad host meets a good one, and no pair meets again."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from redelastic.preflight.schedule import Tried, next_pairs, rounds_for

NUMBERS = [*range(2, 20), 33, 64, 101]


def rounds(hosts: list[int], rng: random.Random) -> list[list[tuple[int, int]]]:
    tried: list[Tried] = []
    made = []
    for _ in range(rounds_for(len(hosts))):
        made.append(next_pairs(hosts, tried))
        tried += [Tried(pair, rng.random()) for pair in made[-1]]
    return made


@pytest.mark.parametrize("number", NUMBERS)
def test_each_host_meets_two_others_in_rounds_that_leave_out_one_at_most(number: int) -> None:
    for seed in range(5):
        made = rounds(list(range(number)), random.Random(seed))
        for pairs in made:
            ends = [host for pair in pairs for host in pair]
            assert len(set(ends)) == len(ends) == number - number % 2
        links = Counter(pair for pairs in made for pair in pairs)
        met = Counter(host for link in links for host in link)
        assert min(met[host] for host in range(number)) == min(2, number - 1)
        assert max(links.values()) == 1


def test_hosts_that_are_gone_are_not_paired() -> None:
    assert next_pairs([1, 4, 7, 9], []) == [(1, 9), (4, 7)]
    assert rounds([3], random.Random(0)) == []
    assert next_pairs([], []) == []


def test_two_hosts_measure_their_only_link_once() -> None:
    assert rounds([0, 1], random.Random(0)) == [[(0, 1)]]


def test_a_slow_pair_is_parted_and_meets_the_fastest() -> None:
    tried = [Tried((0, 5), 1.0), Tried((1, 4), 0.1), Tried((2, 3), 0.9)]
    pairs = next_pairs(list(range(6)), tried)
    assert (1, 5) in pairs
    assert not {(1, 4), (2, 3), (0, 5)} & set(pairs)
    assert len(pairs) == 3
