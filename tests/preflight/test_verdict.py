"""Which hosts are outliers: up to a thousand simulated hosts, through the real schedule."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from redelastic.preflight.schedule import Step, next_step
from redelastic.preflight.verdict import Verdict, judge
from tests.support.simulated_hosts import RATE, Host, Site

BAD = {
    "compute": Host(compute=0.3),
    "send": Host(send=0.2),
    "receive": Host(receive=0.2),
    "latency": Host(delay=5.0),
    "link": Host(receive=0.0),
    "silent": Host(silent_in=0),
}


def verdict(site: Site, **required: float) -> Verdict:
    return judge(len(site.hosts), site.run(), required)


def found(site: Site, **required: float) -> set[tuple[int, str]]:
    return {(outlier.host, outlier.measure) for outlier in verdict(site, **required).outliers}


def site_of(number: int, bad: dict[int, Host], links: dict[tuple[int, int], float] | None = None) -> Site:
    return Site([bad.get(host, Host()) for host in range(number)], links or {}, random.Random(number))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 5, 8, 33, 1000])
def test_equal_hosts_have_no_outlier(number: int) -> None:
    judged = verdict(site_of(number, {}))
    assert (judged.outliers, judged.links, judged.unmeasured) == ((), (), ())
    assert judged.group.get("hosts", 0) == (number if number > 1 else 0)


@pytest.mark.parametrize("number", [3, 4, 5, 8, 33, 1000])
@pytest.mark.parametrize("measure", BAD)
def test_one_bad_host_is_named_and_its_partners_are_not(number: int, measure: str) -> None:
    for bad in {1, number - 1} if number < 1000 else {500}:
        judged = verdict(site_of(number, {bad: BAD[measure]}))
        assert {(outlier.host, outlier.measure) for outlier in judged.outliers} == {(bad, measure)}
        assert (judged.links, judged.unmeasured) == ((), ())


def test_an_outlier_has_its_value_and_the_median() -> None:
    [outlier] = verdict(site_of(8, {3: Host(send=0.1)})).outliers
    assert (outlier.host, outlier.measure, outlier.reason) == (3, "send", "")
    assert outlier.value == pytest.approx(0.1 * RATE, rel=0.3)
    assert outlier.median == pytest.approx(RATE, rel=0.3)


@pytest.mark.parametrize("measure", ["send", "receive", "latency", "link"])
def test_two_bad_hosts_that_meet_first_are_both_found(measure: str) -> None:
    first = next_step(8, [Step("own", tuple(range(8)), (), {host: {"compute": 1.0} for host in range(8)})])
    assert first is not None
    pair = first.pairs[0]
    assert found(site_of(8, dict.fromkeys(pair, BAD[measure]))) == {(host, measure) for host in pair}


def test_a_host_that_is_slow_by_chance_is_measured_again() -> None:
    """Host 5 is slow with its first two partners, as if something else had used its link meanwhile."""
    steps = site_of(8, {}).run()
    firsts = [pair for step in steps for pair in step.pairs if 5 in pair]
    site = site_of(8, {}, dict.fromkeys(firsts, 0.2))
    assert sum(step.kind == "pairs" for step in steps) == 2
    assert sum(step.kind == "pairs" for step in site.run()) == 3
    assert found(site) == set()


@pytest.mark.parametrize("bad", [0, 2, 5])
@pytest.mark.parametrize("silent_in", [0, 1, 2, 3])
def test_a_host_that_dies_in_any_step_is_named_and_its_partner_is_not(silent_in: int, bad: int) -> None:
    site = site_of(6, {bad: Host(silent_in=silent_in)})
    assert found(site) == {(bad, "silent")}
    later = site.run()[silent_in + 1 :]
    assert all(bad not in step.hosts for step in later)


def test_of_two_hosts_a_slow_one_is_named_but_no_host_for_a_slow_link() -> None:
    assert found(site_of(2, {1: Host(compute=0.55)})) == {(1, "compute")}
    for bad, measure in (Host(send=0.1), "send"), (Host(receive=0.0), "link"):
        judged = verdict(site_of(2, {1: bad}))
        assert judged.outliers == ()
        assert {link.measure for link in judged.links} == {measure}


@pytest.mark.parametrize("factor", [0.0, 0.1])
def test_a_bad_link_between_good_hosts_makes_neither_an_outlier(factor: float) -> None:
    judged = verdict(site_of(8, {}, links={(0, 7): factor}))
    assert judged.outliers == ()
    assert {(link.source, link.target) for link in judged.links} <= {(0, 7), (7, 0)}
    assert judged.links


def test_equally_slow_hosts_are_found_by_required_values() -> None:
    slow = dict.fromkeys(range(6), Host(compute=0.1, send=0.1))
    assert found(site_of(6, slow)) == set()
    assert found(site_of(6, slow), compute=50.0) == {(host, "compute") for host in slow}
    assert found(site_of(6, slow), send=5.0, latency=100.0) == {(host, "send") for host in slow}
    assert found(site_of(6, {}), compute=50.0, send=5.0, latency=1.0) == set()


def test_without_a_majority_there_is_no_outlier() -> None:
    assert found(site_of(10, dict.fromkeys(range(5), Host(compute=0.5)))) == set()


def test_widely_spread_hosts_have_no_outlier() -> None:
    reports = {host: {"compute": value} for host, value in enumerate((62, 70, 80, 90, 100, 110, 120, 130, 140))}
    assert judge(9, [Step("own", tuple(range(9)), (), reports)]).outliers == ()
    reports = {host: {"compute": value} for host, value in enumerate((62, 98, 98, 99, 100, 101, 101, 102, 103))}
    assert [outlier.host for outlier in judge(9, [Step("own", tuple(range(9)), (), reports)]).outliers] == [0]


def test_a_failure_on_one_host_is_an_outlier_and_on_all_hosts_unmeasured() -> None:
    steps = site_of(4, {}).run()
    reports = {host: {**report, "write:/ckpt": 300.0} for host, report in steps[0].reports.items()}
    reports[2]["write:/ckpt"] = "Read-only file system"
    [outlier] = judge(4, [replace(steps[0], reports=reports), *steps[1:]]).outliers
    assert (outlier.host, outlier.measure, outlier.reason) == (2, "write:/ckpt", "Read-only file system")
    for report in reports.values():
        report["write:/ckpt"] = "No such file or directory"
    judged = judge(4, [replace(steps[0], reports=reports), *steps[1:]])
    assert judged.outliers == ()
    assert judged.unmeasured == ("write:/ckpt: No such file or directory",)


def test_links_that_work_on_no_host_are_unmeasured() -> None:
    judged = verdict(site_of(4, dict.fromkeys(range(4), Host(send=0.0))))
    assert (judged.outliers, judged.links) == ((), ())
    assert judged.unmeasured == ("links: none worked: RuntimeError: no connection",)


@pytest.mark.parametrize(
    "report", [{"send": "x"}, {"send": -1, "latency": 1}, {"latency": float("nan")}, {"other": []}]
)
def test_an_invalid_report_counts_as_a_broken_link(report: dict[str, object]) -> None:
    steps = site_of(4, {}).run()
    broken = [replace(step, reports={**step.reports, 1: report}) if step.kind == "pairs" else step for step in steps]
    assert {(outlier.host, outlier.measure) for outlier in judge(4, broken).outliers} == {(1, "link")}
