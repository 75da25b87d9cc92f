"""Which hosts measure their link in the next round: pairs that tell a bad host from its partner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Tried(NamedTuple):
    """A link that was measured.

    Attributes:
        hosts: its two ends.
        quality: 0 if it did not work; else comparable with the other links', higher is better.
    """

    hosts: tuple[int, int]
    quality: float


def rounds_for(hosts: int) -> int:
    """How many rounds of pairs measure each host twice: two, or three where one host is left out of each round."""
    return 0 if hosts < 2 else 1 if hosts == 2 else 2 + hosts % 2


def next_pairs(hosts: Sequence[int], tried: Sequence[Tried]) -> list[tuple[int, int]]:
    """Pair hosts whose links are slow, or not known, with hosts that have a fast one.

    A bad host is then slow with a partner that is fast with others; its first partner finds a good one. Nobody meets a
    former partner: where that cannot be avoided, both are left out. Of an odd number, a host is left out that has been
    measured most.

    Args:
        hosts: that take part, in ascending order.
        tried: the links that were measured before.
    """
    best: dict[int, float] = {}
    times = dict.fromkeys(hosts, 0)
    for link in tried:
        for host in link.hosts:
            best[host] = max(link.quality, best.get(host, 0.0))
            times[host] = times.get(host, 0) + 1
    paired = sorted(hosts, key=lambda host: (best.get(host, -1.0), host))
    if len(paired) % 2:
        paired.remove(max(paired, key=lambda host: (times[host], best.get(host, -1.0), host)))
    former = {frozenset(link.hosts) for link in tried}
    pairs: list[tuple[int, int]] = []
    while paired:
        slow = paired.pop(0)
        new = next((host for host in reversed(paired) if frozenset((slow, host)) not in former), paired[-1])
        paired.remove(new)
        pairs.append((slow, new))
    for i in range(len(pairs)):
        _part(pairs, i, former)
    return sorted((min(pair), max(pair)) for pair in pairs if frozenset(pair) not in former)


def _part(pairs: list[tuple[int, int]], i: int, former: set[frozenset[int]]) -> None:
    """Have former partners change partners with another pair, if they find one; rather one of middling hosts."""
    if frozenset(pairs[i]) not in former:
        return
    a, b = pairs[i]
    for j in reversed(range(len(pairs))):
        c, d = pairs[j]
        for one, other in ((a, c), (b, d)), ((a, d), (b, c)):
            if j != i and frozenset(one) not in former and frozenset(other) not in former:
                pairs[i], pairs[j] = one, other
                return
