"""Who is an outlier, and why: a pure function of all figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from .options import MEASURES, OF_LINKS, Measure, measure_of
from .schedule import LABELS, Link, Step, links_of, number

SPREADS: Final = 5.0  # by so many standard deviations of the hosts' values an outlier is worse than their median


@dataclass(frozen=True)
class Outlier:
    """A host that stands out.

    Attributes:
        host: its number.
        measure: by which it stands out; "silent" or "link" if it did not answer, or none of its links worked.
        value: of the host; None if there is none.
        median: of all hosts; None if there is none.
        required: the worst value allowed, if it misses that; else None.
        reason: what failed, in words, where there is no value.
    """

    host: int
    measure: str
    value: float | None = None
    median: float | None = None
    required: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class BadLink:
    """A link that is bad though each end has, or may have, a good one with another host: the figures do not tell which.

    Attributes:
        source, target: its ends.
        measure: by which it is bad: "send" from source to target, "latency", or "link" if it did not work.
        value: of the link; None if it did not work.
        median: of all hosts' best links; None if there is none.
        reason: why it did not work.
    """

    source: int
    target: int
    measure: str
    value: float | None = None
    median: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class Verdict:
    """What came of a preflight.

    Attributes:
        outliers: in the order of the hosts.
        links: that are bad, while neither end is known to be.
        unmeasured: what could not be measured on any host, in words.
        figures: of each host, by measure; of its links the best.
        medians: of the hosts, by measure.
        group: seconds of the all-reduce, its bandwidth in Gbit/s, and how many hosts took part; empty without one.
    """

    outliers: tuple[Outlier, ...]
    links: tuple[BadLink, ...]
    unmeasured: tuple[str, ...]
    figures: Mapping[int, Mapping[str, float]]
    medians: Mapping[str, float]
    group: Mapping[str, float]


class Edge(NamedTuple):
    """One way of a link; ``value`` is 0 if it did not work."""

    source: int
    target: int
    value: float


def judge(hosts: int, steps: Sequence[Step], required: Mapping[str, float] | None = None) -> Verdict:
    """Find the outliers.

    A host is judged by the median of all hosts: it is an outlier if it is worse by its measure's factor and margin, and
    by more than the hosts' values are spread. Where all are equally slow, none is: only ``required`` finds that.

    Args:
        hosts: how many there are.
        steps: all, with their reports.
        required: the worst value allowed, by measure.
    """
    outliers, links, unmeasured = list[Outlier](), list[BadLink](), list[str]()
    for step in steps:
        silence = f"it did not report in time from {LABELS[step.kind]}"
        outliers += [Outlier(host, "silent", reason=silence) for host in step.silent]
    figures: dict[int, dict[str, float]] = {host: {} for host in range(hosts)}
    medians: dict[str, float] = {}
    own = next((step.reports for step in steps if step.kind == "own"), {})
    names = (name for report in own.values() for name in report if name.partition(":")[0] in MEASURES)
    for name in dict.fromkeys(names):
        values = {host: value for host, report in own.items() if (value := number(report, name))}
        for host, value in values.items():
            figures[host][name] = value
        failed = {
            host: str(report[name])[:200] for host, report in own.items() if name in report and host not in values
        }
        if not values:
            unmeasured.append(f"{name}: {next(iter(failed.values()))}")
            continue
        outliers += [Outlier(host, name, reason=error) for host, error in failed.items()]
        medians[name], limit = _limit(measure_of(name), values.values())
        outliers += [
            Outlier(host, name, value, medians[name])
            for host, value in values.items()
            if _is_worse(measure_of(name), value, limit)
        ]
    tried = links_of(steps)
    if tried and all(link.error for link in tried) and len(tried) > 1:
        unmeasured.append(f"links: none worked: {tried[0].error}")
    else:
        found, more = _judge_links(tried, figures, medians)
        outliers += found
        links += more
    known = {(outlier.host, outlier.measure) for outlier in outliers}
    for name, limit in (required or {}).items():
        outliers += [
            Outlier(host, one, value, medians[one], limit)
            for host, own_figures in figures.items()
            for one, value in own_figures.items()
            if name in (one, one.partition(":")[0])
            and (host, one) not in known
            and _is_worse(measure_of(one), value, limit)
        ]
    group = _group(steps, unmeasured)
    outliers.sort(key=lambda outlier: outlier.host)
    return Verdict(tuple(outliers), tuple(links), tuple(unmeasured), figures, medians, group)


def _limit(measure: Measure, values: Iterable[float]) -> tuple[float, float]:
    """The median of the hosts' values, and the worst value that is no outlier.

    Of two hosts, none is in the majority: the better one is the measure of the other.
    """
    found = sorted(values, reverse=measure.higher_is_better)
    median, spread = found[0], 0.0
    if len(found) > 2:
        median = statistics.median(found)
        # A standard deviation, by a robust estimate, of the logarithms: a factor.
        spread = 1.4826 * statistics.median(abs(math.log(value / median)) for value in found)
    factor = math.exp(min(max(math.log(measure.factor), SPREADS * spread), 700))
    return median, median / factor - measure.margin if measure.higher_is_better else median * factor + measure.margin


def _is_worse(measure: Measure, value: float, limit: float) -> bool:
    return value < limit if measure.higher_is_better else value > limit


def _judge_links(
    tried: Sequence[Link], figures: dict[int, dict[str, float]], medians: dict[str, float]
) -> tuple[list[Outlier], list[BadLink]]:
    """Judge hosts by their links; adds the best of each host's links to ``figures``, and medians to ``medians``."""
    working = [link for link in tried if not link.error]
    errors = {end: link.error for link in tried if link.error for end in (link.hosts, link.hosts[::-1])}
    hosts, _, unexplained = _blame(_ways(tried, lambda link: 2 * (float(not link.error),)), 0.5, higher_is_better=True)
    outliers = [
        Outlier(host, "link", reason=next(error for end, error in errors.items() if end[0] == host)) for host in hosts
    ]
    links = [BadLink(*edge[:2], "link", reason=errors[edge[:2]]) for edge in unexplained if edge.source < edge.target]
    sent, round_trips = _ways(working, lambda link: link.sent), _ways(working, lambda link: 2 * (link.latency,))
    for names, edges in ((OF_LINKS[:2], sent), (OF_LINKS[2:], round_trips)):
        if not edges:
            continue
        measure = MEASURES[names[0]]
        better = max if measure.higher_is_better else min
        best = dict[int, float]()  # of each host's edges, either way: a host's bad way does not count in the median
        for edge in edges:
            for name, host in zip(names, edge[:2], strict=False):
                figures[host][name] = better(edge.value, figures[host].get(name, edge.value))
            for host in edge[:2]:
                best[host] = better(edge.value, best.get(host, edge.value))
        median, limit = _limit(measure, best.values())
        medians.update(dict.fromkeys(names, median))
        *ends, unexplained = _blame(edges, limit, higher_is_better=measure.higher_is_better)
        for name, found in zip(names, ends, strict=False):
            outliers += [Outlier(host, name, figures[host][name], median) for host in found]
        links += [
            BadLink(*edge[:2], names[0], edge.value, median)
            for edge in unexplained
            if len(names) > 1 or edge.source < edge.target  # a latency is the same both ways
        ]
    return outliers, links


def _ways(links: Iterable[Link], values: Callable[[Link], Sequence[float]]) -> list[Edge]:
    """Both ways of each link, the first host's first."""
    ways = ((end, value) for e in links for end, value in zip((e.hosts, e.hosts[::-1]), values(e), strict=True))
    return [Edge(*end, value) for end, value in ways]


def _blame(edges: Sequence[Edge], limit: float, *, higher_is_better: bool) -> tuple[list[int], list[int], list[Edge]]:
    """Find out who is the cause of edges that are worse than a limit.

    A host is, if it has no good edge, and a bad one with a host that has a good edge with another.

    Returns:
        The hosts that are bad sources, the hosts that are bad targets, and the bad edges that neither explains.
    """
    bad = [edge for edge in edges if (edge.value < limit) == higher_is_better and edge.value != limit]
    good = set(edges) - set(bad)
    good_sources, good_targets = {edge.source for edge in good}, {edge.target for edge in good}
    sources = {edge.source for edge in bad if edge.source not in good_sources and edge.target in good_targets}
    targets = {edge.target for edge in bad if edge.target not in good_targets and edge.source in good_sources}
    unexplained = [edge for edge in bad if edge.source not in sources and edge.target not in targets]
    return sorted(sources), sorted(targets), unexplained


def _group(steps: Sequence[Step], unmeasured: list[str]) -> dict[str, float]:
    """The figures of the all-reduce: the slowest host's; adds to ``unmeasured`` if it failed though all answered."""
    for step in steps:
        if step.kind == "group":
            seconds = [number(report, "seconds") for report in step.reports.values()]
            if errors := [str(report["error"])[:200] for report in step.reports.values() if report.get("error")]:
                unmeasured.append(f"all-reduce of {len(step.hosts)} hosts: {errors[0]}")
            elif seconds and all(seconds):
                slowest = max(step.reports.values(), key=lambda report: number(report, "seconds"))
                figures = {name: number(slowest, name) for name in ("seconds", "bandwidth")}
                return figures | {"hosts": float(len(step.hosts))}
    return {}
