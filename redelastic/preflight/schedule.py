"""The steps of a preflight, as a pure function: what all hosts do next, given what they have reported so far.

In a round of pairs, each host measures its link with a partner whom it has not met: pairs tell a bad host from its
partner.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple

Kind = Literal["own", "pairs", "group"]
Report = Mapping[str, Any]  # of one host: figures, or an error in words; it comes from another host and is not trusted

SLOW: Final = 0.7  # of the median of the hosts' best links: below it a link is measured again with others

LABELS: Final[Mapping[Kind, str]] = {
    "own": "the measures of its own",
    "pairs": "a round of pairs",
    "group": "the all-reduce",
}


@dataclass(frozen=True)
class Step:
    """What hosts do at the same time.

    Attributes:
        kind: each measures itself (``own``), two measure their link (``pairs``), or all sum a tensor (``group``).
        hosts: that take part, in ascending order.
        pairs: of a round of pairs.
        reports: of the hosts that have reported in time.
    """

    kind: Kind
    hosts: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...] = ()
    reports: Mapping[int, Report] = field(default_factory=dict)

    @property
    def silent(self) -> list[int]:
        """The hosts that have not reported."""
        return [host for host in self.hosts if host not in self.reports]


@dataclass(frozen=True)
class Link:
    """A link that two hosts measured; neither was silent.

    Attributes:
        hosts: its ends.
        sent: by each of them, in Gbit/s.
        latency: of a round trip, in ms.
        error: why it did not work; "" if it did.
    """

    hosts: tuple[int, int]
    sent: tuple[float, float] = (0.0, 0.0)
    latency: float = 0.0
    error: str = ""


def next_step(hosts: int, steps: Sequence[Step]) -> Step | None:
    """The step that follows; None after the last.

    A host that was silent once takes no further part: it costs the others the time limit of one step. Where a host has
    no fast link after the last round of pairs, there is one more: it may have been slow by chance.

    Args:
        hosts: how many there are.
        steps: so far, with their reports.
    """
    if not steps:
        return Step("own", tuple(range(hosts)))
    if steps[-1].kind == "group":
        return None
    silent = {host for step in steps for host in step.silent}
    live = [host for host in range(hosts) if host not in silent]
    links = links_of(steps)
    rounds = sum(step.kind == "pairs" for step in steps)
    tried = _compared(links)
    if rounds < rounds_for(hosts) + _needs_another(tried) and (pairs := next_pairs(live, tried)):
        return Step("pairs", tuple(sorted(host for pair in pairs for host in pair)), tuple(pairs))
    linked = {host for link in links if not link.error for host in link.hosts}
    group = tuple(host for host in live if host in linked)
    return Step("group", group) if len(group) > 1 else None


def _needs_another(tried: Sequence[Tried]) -> bool:
    best: dict[int, list[float]] = {}
    for link in tried:
        for host in link.hosts:
            best.setdefault(host, []).append(link.quality)
    if not best:
        return False
    slow = SLOW * statistics.median(max(qualities) for qualities in best.values())
    # One that has failed with several partners takes the time limit each time, and would fail again.
    return any(max(found) < slow and (max(found) > 0 or len(found) == 1) for found in best.values())


def links_of(steps: Sequence[Step]) -> list[Link]:
    """The links that were measured; one whose other end was silent says nothing about this end."""
    return [
        _link(pair, step.reports[pair[0]], step.reports[pair[1]])
        for step in steps
        for pair in step.pairs
        if pair[0] in step.reports and pair[1] in step.reports
    ]


def _link(pair: tuple[int, int], first: Report, second: Report) -> Link:
    sent, latency = (number(first, "send"), number(second, "send")), number(first, "latency")
    errors = {str(report["error"])[:200]: None for report in (first, second) if report.get("error")}
    if errors or not all(sent) or not latency:
        return Link(pair, error="; ".join(errors) or "it was not measured")
    return Link(pair, sent, latency)


def number(report: Report, name: str) -> float:
    """A figure of a report; 0 if it is missing or not a positive number."""
    value = report.get(name)
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else 0.0


def _compared(links: Sequence[Link]) -> list[Tried]:
    """Links by the worst of their figures, each compared with the median of its kind."""
    working = [link for link in links if not link.error]
    if not working:
        return [Tried(link.hosts, 0.0) for link in links]
    speed = statistics.median(value for link in working for value in link.sent)
    latency = statistics.median(link.latency for link in working)
    return [Tried(e.hosts, 0.0 if e.error else min(*e.sent, speed * latency / e.latency)) for e in links]


# -- which hosts measure their link


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
