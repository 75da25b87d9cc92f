"""Charged restarts and barred hosts: a recount by the rules."""

from __future__ import annotations

from random import Random
from typing import Final

import pytest

from tests.proofs.oracle import apply
from tests.proofs.oracle_state import NOTHING, Charge, Join, Leave, Request, Settings, State
from tests.proofs.twin import START


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_charges_match_a_recount_by_the_rules(budget: int) -> None:
    """Jobs of three hosts, where workers fail and nodes leave at random."""
    stopped = given_back = barred = 0
    for seed in range(200):
        job = Job(Random(seed), budget)
        while job.state.closed is None and len(job.first) < 12:
            job.play_round()
            counted = [host for host in job.first if host is not None]
            assert (job.state.restarts or 0) == len(counted) <= budget + 1, job.first
            assert (job.state.stop == 1) == (len(counted) > budget), job.first
            assert {host: n for host, n in job.state.failures.items() if n >= LIMIT} == job.barred(), job.first
        stopped += job.state.stop or 0
        given_back += job.given_back
        barred += bool(job.barred())
    assert min(stopped, given_back) > 20
    assert barred > 20 or budget < LIMIT - 1


LIMIT: Final = 2  # of failed rounds in a row for one host


class Job:
    """A job with a node on each of the hosts x, y and z.

    `first` has, for each round, the host that failed first: empty if that is not known, None if nobody was charged.
    """

    def __init__(self, random: Random, budget: int) -> None:
        self.random, self.budget = random, budget
        self.state, self.now, self.serial = State(), START, 0
        self.first: list[str | None] = []
        self.given_back = 0
        for host in "xyz":
            self.join(host, 0)

    def send(self, request: Request) -> None:
        self.now += 1
        self.state = apply(self.state, self.now, request)[0]

    def join(self, node: str, after: int) -> None:
        if after == 0:
            self.serial += 1
            node = f"{node}{self.serial}"
        known = NOTHING._replace(incarnation=self.state.incarnation or "")
        self.send(Join(node, after, f"{node}:1", "", Settings(1, 3), known))

    def play_round(self) -> None:
        """Some workers fail; another node may leave; failed nodes report again as final; then the next round."""
        epoch, members = self.state.epoch or 0, sorted(self.state.members)
        failed_at = {node: self.now + self.random.randrange(100) for node in members if self.random.random() < 0.5}
        gone = [node for node in members if node not in failed_at and self.random.random() < 0.3][:1]
        unsure = {node for node in failed_at if self.random.random() < 0.3}
        self.now += 100
        order = [*failed_at, *gone]
        self.random.shuffle(order)
        for node in order:
            if node in gone:
                self.given_back += self.state.charged == epoch
                self.send(Leave(node, ("reason", "left"), "goes on"))
            else:
                self.charge(node, epoch, failed_at[node], final=0, unsure=node in unsure)
        for node, at in failed_at.items():
            self.charge(node, epoch, at, final=1, unsure=node in unsure)
        sure = failed_at.keys() - unsure
        first = min(sure, key=lambda node: (failed_at[node], order.index(node)), default="")
        self.first.append(first[:1] if failed_at and not gone else None)
        if self.state.closed is None:
            self.regroup(
                epoch, gone or self.random.sample(sorted(failed_at), self.random.randrange(2) and len(failed_at))
            )

    def charge(self, node: str, epoch: int, failed_at: int, *, final: int, unsure: bool) -> None:
        ago = self.now + 1 - failed_at
        host = "" if unsure else node[0]
        self.send(Charge(node, host, epoch, ago, -1, -1, "died", self.budget, -1, LIMIT, final))

    def regroup(self, epoch: int, gone: list[str]) -> None:
        """New nodes replace the `gone`, some of which leave only now, on their hosts."""
        for node in gone:
            if node in self.state.members:
                self.send(Leave(node, ("reason", "left"), "goes on"))
        for node in gone:
            self.join(node[0], 0)
        for node in sorted(self.state.members):
            self.join(node, epoch)
        while self.state.epoch == epoch:
            self.now = self.state.deadline or self.now
            self.join(min(self.state.candidates), epoch)

    def barred(self) -> dict[str, int]:
        """Hosts that once failed first in LIMIT rounds in a row, and stay barred."""
        rows: dict[str, int] = {}
        before: str | None = None
        for host in self.first:
            if host:
                rows = {other: n for other, n in rows.items() if other == before or n >= LIMIT}
                rows[host] = rows.get(host, 0) + 1
            before = host
        return {host: n for host, n in rows.items() if n >= LIMIT}
