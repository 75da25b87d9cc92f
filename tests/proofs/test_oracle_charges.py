"""Charged restarts and barred hosts: as golden transcripts, and recounted by the rules."""

from __future__ import annotations

from random import Random
from typing import Final

import pytest
import redis

from tests.proofs.oracle import apply
from tests.proofs.oracle_state import Charge, Join, Leave, Request, Settings, State
from tests.proofs.stories import tell
from tests.proofs.twin import START, Server

STORIES: Final = {
    "one charge a round, against the host that failed first": """
     0  x1 joins of 2:2                -> waiting, 0, 0, -1, 0, 0
     0  y1 joins of 2:2                -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
   100  x1 fails 10 ago in 1 of 9/9/9  -> 1, 1, -
        * failed x1: died
   101  y1 fails 50 ago in 1 of 9/9/9  -> 1, 1, -
        * failed y1: died
   102  x1 fails 10 ago in 1 of 9/9/9  -> 1, 0, -
   103  y1 fails 50 ago in 1 of 9/9/9  -> 1, 1, -
   200  x1 joins after 1 of 2:2        -> waiting, 1, 2, -1, 0, 0
        | broken 1: x1 regroups (1 waiting)
   201  y1 joins after 1 of 2:2        -> complete, 2, 1, 2, x1:1, 0
        | complete 2: max_nodes joined (0 waiting)
   300  y1 fails in 1 of 9/9/9         -> 1, 1, -
   301  y1 fails in 2 of 9/9/9         -> 2, 2, -
        * failed y1: died
   302  z1 fails in 2 of 9/9/9         -> 2, 0, -
""",
    "a row of failures ends with another host's": """
     0  x1 joins of 2:2                -> waiting, 0, 0, -1, 0, 0
     0  y1 joins of 2:2                -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails in 1 of -/-/3         -> 1, 1, -
        * failed x1: died
     2  x1 joins after 1 of 2:2        -> waiting, 1, 2, -1, 0, 0
        | broken 1: x1 regroups (1 waiting)
     2  y1 joins after 1 of 2:2        -> complete, 2, 1, 2, x1:1, 0
        | complete 2: max_nodes joined (0 waiting)
     3  x1 fails in 2 of -/-/3         -> 2, 2, -
        * failed x1: died
     4  x1 joins after 2 of 2:2        -> waiting, 2, 4, -1, 0, 0
        | broken 2: x1 regroups (1 waiting)
     4  y1 joins after 2 of 2:2        -> complete, 3, 1, 2, x1:1, 0
        | complete 3: max_nodes joined (0 waiting)
     5  y1 fails in 3 of -/-/3         -> 3, 1, -
        * failed y1: died
     6  x1 joins after 3 of 2:2        -> waiting, 3, 6, -1, 0, 0
        | broken 3: x1 regroups (1 waiting)
     6  y1 joins after 3 of 2:2        -> complete, 4, 1, 2, x1:1, 0
        | complete 4: max_nodes joined (0 waiting)
     7  x1 fails in 4 of -/-/3         -> 4, 1, -
        * failed x1: died
""",
    "a row of failures ends with a round that nobody failed": """
     0  x1 joins of 1:2                -> waiting, 0, 0, 3000, 0, 0
     0  y1 joins of 1:2                -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails in 1 of -/-/3         -> 1, 1, -
        * failed x1: died
     2  x1 joins after 1 of 1:2        -> waiting, 1, 2, -1, 0, 0
        | broken 1: x1 regroups (1 waiting)
     2  y1 joins after 1 of 1:2        -> complete, 2, 1, 2, x1:1, 0
        | complete 2: max_nodes joined (0 waiting)
     3  y1 leaves                      -> nothing
        | broken 2: y1 left (0 waiting)
        * left y1: left
     4  x1 joins after 2 of 1:2        -> complete, 3, 0, 1, x1:1, 1
        | complete 3: every live node joined (0 waiting)
     5  x1 fails in 3 of -/-/3         -> 2, 1, -
        * failed x1: died
""",
    "who is barred stays that, until it is readmitted": """
     0  x1 joins of 1:2                -> waiting, 0, 0, 3000, 0, 0
     0  y1 joins of 1:2                -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails in 1 of -/-/1         -> 1, 1, -
        * failed x1: died
     2  x1 leaves                      -> nothing
        | broken 1: x1 left (0 waiting)
        * left x1: left
     3  y1 joins after 1 of 1:2        -> complete, 2, 0, 1, y1:1, 1
        | complete 2: every live node joined (0 waiting)
     4  y1 fails in 2 of -/-/1         -> 2, 1, -
        * failed y1: died
     5  x2 fails in 2 of -/-/1         -> 2, 1, -
     6  x is readmitted                -> 1
        | readmit 2: x (0 waiting)
        * readmitted x: by hand
     7  x is readmitted                -> 0
""",
    "a lost member costs its peers nothing": """
     0  x1 joins of 1:2                 -> waiting, 0, 0, 3000, 0, 0
     0  y1 joins of 1:2                 -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
  2000  x1 beats                        -> member, 1, -, 0, -, 4000, 0, -, 0
  4000  x1 beats                        -> member, 1, -, 0, -, 2000, 0, -, 0
  4001  x1 fails in 1 of 0/-/1          -> 1, 1, the job has used up its 0 restarts: x1 died
        * failed x1: died
  6000  x1 beats                        -> member, 1, y1 lost its lease after 6.0 s, 0, -, -1, 0, -, 0
        | broken 1: y1 lost its lease after 6.0 s (0 waiting)
        * lost y1: lost its lease after 6.0 s
  6001  x1 fails in 1 of 0/-/1, finally -> 0, 0, -
  6002  x1 joins after 1 of 1:2         -> complete, 2, 0, 1, x1:1, 1
        | complete 2: every live node joined (0 waiting)
  6003  x1 fails in 2 of 0/-/1          -> 1, 1, the job has used up its 0 restarts: x1 died
        * failed x1: died
""",
    "nor does it count as a restart without progress": """
     0  x1 joins of 1:2                -> waiting, 0, 0, 3000, 0, 0
     0  y1 joins of 1:2                -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails in 1 of -/2/-         -> 1, 1, -
        * failed x1: died
     2  x1 joins after 1 of 1:2        -> waiting, 1, 2, -1, 0, 0
        | broken 1: x1 regroups (1 waiting)
     2  y1 joins after 1 of 1:2        -> complete, 2, 1, 2, x1:1, 0
        | complete 2: max_nodes joined (0 waiting)
     3  x1 fails in 2 of -/2/-         -> 2, 2, -
        * failed x1: died
     4  y1 leaves                      -> nothing
        | broken 2: y1 left (0 waiting)
        * left y1: left
     5  x1 joins after 2 of 1:2        -> complete, 3, 0, 1, x1:1, 1
        | complete 3: every live node joined (0 waiting)
     6  x1 fails in 3 of -/2/-         -> 2, 1, -
        * failed x1: died
     7  x1 joins after 3 of 1:2        -> complete, 4, 0, 1, x1:1, 0
        | broken 3: x1 regroups (1 waiting)
        | complete 4: every live node joined (0 waiting)
     8  x1 fails in 4 of -/2/-         -> 3, 2, no progress in 2 restarts, no step was reported: x1 died
        * failed x1: died
""",
    "a member that failed itself and goes is charged": """
     0  x1 joins of 1:2                -> waiting, 0, 0, 3000, 0, 0
     0  y1 joins of 1:2                -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails 5 ago in 1 of 1/-/-   -> 1, 1, -
        * failed x1: died
     2  y1 fails in 1 of 1/-/-         -> 1, 0, -
        * failed y1: died
     3  x1 leaves                      -> nothing
        | broken 1: x1 left (0 waiting)
        * left x1: left
     4  y1 fails in 1 of 1/-/-         -> 1, 0, -
     5  y1 joins after 1 of 1:2        -> complete, 2, 0, 1, y1:1, 1
        | complete 2: every live node joined (0 waiting)
""",
    "the budget of the job is used up": """
     0  x1 joins of 1:1                 -> complete, 1, 0, 1, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails in 1 of 1/-/-, finally -> 1, 1, -
        * failed x1: died
     2  x1 joins after 1 of 1:1         -> complete, 2, 0, 1, x1:1, 0
        | broken 1: x1 regroups (1 waiting)
        | complete 2: max_nodes joined (0 waiting)
     3  x1 fails in 2 of 1/-/-          -> 2, 2, the job has used up its 1 restarts: x1 died
        * failed x1: died
     4  x1 fails in 2 of 1/-/-, finally -> 2, 2, the job has used up its 1 restarts: x1 died
        | stopped 2: the job has used up its 1 restarts: x1 died (0 waiting)
        * stopped x1: the job has used up its 1 restarts: x1 died
     5  x1 fails in 2 of 1/-/-, finally -> 2, 2, the job has used up its 1 restarts: x1 died
     6  x1 beats                        -> member, 2, -, 0, the job has used up its 1 restarts: x1 died, -1, 1, -, 0
     7  x1 joins after 2 of 1:1         -> closed, the job has used up its 1 restarts: x1 died, 0, 1
""",
    "no progress": """
     0  x1 joins of 1:1                      -> complete, 1, 0, 1, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  x1 fails in 1 at 7 of -/2/-, finally -> 1, 1, -
        * failed x1: died
     2  x1 joins after 1 of 1:1              -> complete, 2, 0, 1, x1:1, 0
        | broken 1: x1 regroups (1 waiting)
        | complete 2: max_nodes joined (0 waiting)
     3  x1 fails in 2 at 7 of -/2/-, finally -> 2, 2, -
        * failed x1: died
     4  x1 joins after 2 of 1:1              -> complete, 3, 0, 1, x1:1, 0
        | broken 2: x1 regroups (1 waiting)
        | complete 3: max_nodes joined (0 waiting)
     5  x1 fails in 3 at 8 of -/2/-, finally -> 3, 3, -
        * failed x1: died
     6  x1 joins after 3 of 1:1              -> complete, 4, 0, 1, x1:1, 0
        | broken 3: x1 regroups (1 waiting)
        | complete 4: max_nodes joined (0 waiting)
     7  x1 fails in 4 at 7 of -/2/-, finally -> 4, 4, -
        * failed x1: died
     8  x1 joins after 4 of 1:1              -> complete, 5, 0, 1, x1:1, 0
        | broken 4: x1 regroups (1 waiting)
        | complete 5: max_nodes joined (0 waiting)
     9  x1 fails in 5 of -/2/-, finally      -> 5, 5, no progress in 2 restarts, still at step 8: x1 died
        | stopped 5: no progress in 2 restarts, still at step 8: x1 died (0 waiting)
        * failed x1: died
        * stopped x1: no progress in 2 restarts, still at step 8: x1 died
""",
    "what a closed run has counted stays on record": """
     0  x1 joins of 1:2                 -> waiting, 0, 0, 3000, 0, 0
     0  y1 joins of 1:2                 -> complete, 1, 1, 2, x1:1, 0
        | complete 1: max_nodes joined (0 waiting)
  2000  x1 beats                        -> member, 1, -, 0, -, 4000, 0, -, 0
  4000  x1 beats                        -> member, 1, -, 0, -, 2000, 0, -, 0
  4001  x1 fails in 1 of 0/-/-, finally -> 1, 1, the job has used up its 0 restarts: x1 died
        | stopped 1: the job has used up its 0 restarts: x1 died (0 waiting)
        * failed x1: died
        * stopped x1: the job has used up its 0 restarts: x1 died
  6000  y2 joins of 1:2                 -> closed, the job has used up its 0 restarts: x1 died, 0, 1
        | broken 1: y1 lost its lease after 6.0 s (0 waiting)
        * lost y1: lost its lease after 6.0 s
  6001  x1 fails in 1 of 0/-/-, finally -> 1, 1, the job has used up its 0 restarts: x1 died
""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories_go_as_told(story: str, client: redis.Redis) -> None:
    assert tell(story) == story
    assert tell(story, Server(client)) == story


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_what_is_counted_is_what_happened(budget: int) -> None:
    """Jobs of three hosts, some of whose workers fail and some of whose nodes go, counted anew by the rules."""
    stopped = given_back = barred = 0
    for seed in range(200):
        job = Job(Random(seed), budget)
        while job.state.closed is None and len(job.first) < 12:
            job.play_round()
            counted = [host for host in job.first if host]
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
    """A job with a node on each of the hosts x, y and z; `first` tells for each round which of them failed first."""

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
        self.send(Join(node, after, f"{node}:1", "", Settings(1, 3)))

    def play_round(self) -> None:
        """Some workers fail; a node that did not may go; who failed waits and says so again; then the next round."""
        epoch, members = self.state.epoch or 0, sorted(self.state.members)
        failed_at = {node: self.now + self.random.randrange(100) for node in members if self.random.random() < 0.5}
        gone = [node for node in members if node not in failed_at and self.random.random() < 0.3][:1]
        self.now += 100
        order = [*failed_at, *gone]
        self.random.shuffle(order)
        for node in order:
            if node in gone:
                self.given_back += self.state.charged == epoch
                self.send(Leave(node, "left", "goes on"))
            else:
                self.charge(node, epoch, failed_at[node], final=0)
        for node, at in failed_at.items():
            self.charge(node, epoch, at, final=1)
        first = min(failed_at, key=lambda node: (failed_at[node], order.index(node)), default="")
        self.first.append(first[:1] if first and not gone else None)
        if self.state.closed is None:
            self.regroup(
                epoch, gone or self.random.sample(sorted(failed_at), self.random.randrange(2) and len(failed_at))
            )

    def charge(self, node: str, epoch: int, failed_at: int, *, final: int) -> None:
        ago = self.now + 1 - failed_at
        self.send(Charge(node, node[0], epoch, ago, -1, "died", self.budget, -1, LIMIT, final))

    def regroup(self, epoch: int, gone: list[str]) -> None:
        """The `gone`, some of whom go only now, are replaced by new nodes on their hosts."""
        for node in gone:
            if node in self.state.members:
                self.send(Leave(node, "left", "goes on"))
        for node in gone:
            self.join(node[0], 0)
        for node in sorted(self.state.members):
            self.join(node, epoch)
        while self.state.epoch == epoch:
            self.now = self.state.deadline or self.now
            self.join(min(self.state.candidates), epoch)

    def barred(self) -> dict[str, int]:
        """Hosts that once failed first in LIMIT rounds in a row: those stay barred."""
        rows: dict[str, int] = {}
        before: str | None = None
        for host in self.first:
            if host:
                rows = {other: n for other, n in rows.items() if other == before or n >= LIMIT}
                rows[host] = rows.get(host, 0) + 1
            before = host
        return {host: n for host, n in rows.items() if n >= LIMIT}
