"""The steps of a preflight, as a pure function: what all hosts do next, given what they have reported so far."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from .pairing import Tried, next_pairs, rounds_for

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
    tried = [Tried(link.hosts, quality) for link, quality in _qualities(links)]
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


def _qualities(links: Sequence[Link]) -> list[tuple[Link, float]]:
    """The worst of a link's figures, each compared with the median of its kind."""
    working = [link for link in links if not link.error]
    if not working:
        return [(link, 0.0) for link in links]
    speed = statistics.median(value for link in working for value in link.sent)
    latency = statistics.median(link.latency for link in working)
    return [(link, 0.0 if link.error else min(*link.sent, speed * latency / link.latency)) for link in links]
