"""The events of made-up runs of many sizes and kinds, for tests of histories and of their pictures."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import redelastic
from redelastic.monitoring.events import (
    Barred,
    Because,
    Closed,
    Completed,
    Drain,
    Event,
    Failed,
    Hung,
    Joined,
    Left,
    Lost,
    Outage,
    Progressed,
    Refused,
    Regrouped,
    Saved,
    Started,
    Stopped,
)

START = 1_790_000_000.0
[_MERGED] = re.findall(r"MERGED = '\|(.*)\|'", (Path(redelastic.__file__).parent / "lua" / "events.lua").read_text())
KINDS = tuple(_MERGED.split("|"))  # that are merged
HOSTILE = "<script>alert(1)</script>\"'&$x^2$]]>-->\x1b[31m\x00\ud800\u202e"


class Story:
    """The events of a made-up run, added in any order; times are seconds since its beginning."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self._added: list[tuple[float, Event]] = []

    def node(self, name: str) -> str:
        """A new node's id."""
        return f"{name}-{self.random.randrange(1000, 9999)}-{self.random.getrandbits(48):012x}"

    def add(self, at: float, event: Event) -> None:
        self._added.append((at, event))

    def join(self, at: float, nodes: Sequence[str], *, breaks: bool = False, within: float = 0.0) -> None:
        for i, node in enumerate(nodes):
            self.add(at + self.random.uniform(0, within), Joined(node=node, breaks=breaks and i == 0))

    def regroup(self, at: float, nodes: Sequence[str], within: float = 0.0) -> None:
        for node in nodes:
            self.add(at + self.random.uniform(0, within), Regrouped(node=node))

    def lose(self, at: float, node: str, silent_ms: int = 6000) -> None:
        self.add(at, Lost(node=node, cause="lease", silent_ms=silent_ms))

    def complete(
        self,
        at: float,
        members: Sequence[str],
        because: Because = "all_joined",
        start: float = 0,
        *,
        steps: bool = True,
        redone: float = 0,
    ) -> None:
        """A round is complete, with members by rank, which make their first step after ``start`` seconds.

        With ``start`` they have agents. For ``redone`` seconds they repeat steps. Without ``steps`` they report none.
        """
        self.add(at, Completed(node=members[0], because=because, members=tuple(members), size=len(members)))
        if steps:
            last_step = 99 if redone else None
            self.add(at + start, Progressed(node=members[0], step=90, last_step=last_step))
        if redone:
            self.add(at + start + redone, Progressed(node=members[0], step=100, last_step=99))
        for rank, node in enumerate(members if start else ()):
            self.add(at + start * self.random.uniform(0.6, 1), Started(node=node, rank=rank))

    def events(self) -> list[Event]:
        """The entries of the run's stream of events."""
        return merged(self.one_by_one())

    def one_by_one(self) -> list[Event]:
        """Each event of each node separately, as the scripts get them, before they merge some."""
        events: list[Event] = []
        epoch = size = 0
        members: tuple[str, ...] = ()  # of a round that is not broken
        for at, event in sorted(self._added, key=lambda added: added[0]):
            if isinstance(event, Completed):
                epoch, size, members = epoch + 1, event.size, event.members
            gone = isinstance(event, Lost | Regrouped) or (isinstance(event, Left) and event.cause != "finished")
            breaks = event.breaks or (gone and event.node in members)
            members = () if breaks else members
            events.append(replace(event, time=START + at, epoch=epoch, size=size, breaks=breaks))
        return events


@dataclass
class _Series:
    """Events of one kind, of several nodes in quick succession."""

    epoch: int
    last: int  # when the last one came, in ms
    count: int = 0
    pending: list[Event] = field(default_factory=list)


class _EventStream:
    """The entries that `record` in `lua/events.lua` writes, if a heartbeat comes whenever one is due; times in ms."""

    def __init__(self) -> None:
        self.entries: list[Event] = []
        self.due: int | None = None  # when a heartbeat writes what is pending
        self._series: dict[str, _Series] = {}

    def add(self, event: Event, now: int) -> None:
        kind = event.event
        is_merged = kind in KINDS and not event.breaks
        if is_merged and self._collects(event, self._series.setdefault(kind, _Series(event.epoch, now)), now):
            return
        if self.due is not None:
            self.flush_merged_events(now)
        self._write(event, now)

    def _collects(self, event: Event, series: _Series, now: int) -> bool:
        """Add an event to its series; returns whether it waits there to be merged."""
        is_new = series.epoch != event.epoch or now - series.last > 1000
        if series.pending and (is_new or (event.event == "left" and event.pairs() != series.pending[0].pairs())):
            self.flush_merged_events(now)
        series.epoch, series.last, series.count = event.epoch, now, 1 if is_new else series.count + 1
        if series.count <= 16:
            return False
        series.pending.append(event)
        if (series.count - 16) % 64 == 0:
            self.flush_merged_events(now)
        elif self.due is None:
            self.due = now + 1000
        return True

    def flush_merged_events(self, now: int) -> None:
        self.due = None
        for series in [self._series[kind] for kind in KINDS if kind in self._series]:
            if series.pending:
                self._write(replace(series.pending[0], nodes=tuple(event.node for event in series.pending)), now)
                series.pending = []

    def _write(self, event: Event, now: int) -> None:
        self.entries.append(replace(event, id=f"{now}-{len(self.entries)}", time=now / 1000))


def merged(events: Iterable[Event]) -> list[Event]:
    """The entries of a run's stream after these events."""
    stream = _EventStream()
    for event in events:
        now = round(1000 * event.time)
        if stream.due is not None and stream.due <= now:
            stream.flush_merged_events(stream.due)
        stream.add(event, now)
    if stream.due is not None:
        stream.flush_merged_events(stream.due)
    return stream.entries


def _three_nodes() -> Story:
    story = Story()
    a, b, c, d = (story.node(name) for name in ("gpu-a", "gpu-b", "gpu-c", "gpu-d"))
    story.join(0, [a, b, c], within=1.5)
    story.complete(1.6, [a, b, c], "max_nodes", start=6)
    story.lose(60, b, 6200)
    story.regroup(60.1, [a, c], within=0.4)
    story.complete(60.6, [a, c], start=6, redone=9)
    story.join(95, [d], breaks=True)
    story.regroup(95.1, [a, c], within=0.4)
    story.complete(95.6, [a, d, c], "max_nodes", start=6)
    story.add(170, Hung(node=d, rank=8, local_rank=0, pid=71, idle_ms=30_000, step=412, hung=1, stacks="stack\nof it"))
    story.regroup(172, [a, d, c], within=0.4)
    story.complete(172.6, [a, d, c], "max_nodes", start=6)
    story.add(220, Drain(node=c, reason="by ops@bastion: spot instance ends", timeout_ms=30_000))
    story.add(226, Saved(node=c, drains=(c,)))
    story.add(227, Left(node=c, cause="drained", reason="by ops@bastion: spot instance ends"))
    story.regroup(227.1, [a, d], within=0.3)
    story.complete(227.6, [a, d], start=6, redone=12)
    story.add(300, Left(node=a, cause="finished"))
    story.add(300, Closed(node=a, cause="finished"))
    story.add(301, Left(node=d, cause="finished"))
    return story


def _many_nodes(n: int, hours: float, faults: int, *, spares: int = 2, start: float = 25) -> Story:
    story = Story(1)
    members = [story.node(f"node-{i:04d}") for i in range(n)]
    waiting = [story.node(f"spare-{i:02d}") for i in range(spares)]
    story.join(0, members, within=20)
    story.complete(20.1, members, "max_nodes", start=start)
    story.join(24, waiting, within=6)
    end = 3600 * hours
    for i in range(faults):
        at = end * (i + 1) / (faults + 1) + story.random.uniform(-0.25, 0.25) * end / (faults + 1)
        victim = story.random.choice(members)
        kind = ("lost", "hung", "failed", "drain", "lost")[i % 5]
        if kind == "drain":
            story.add(at - 40, Drain(node=victim, reason="by slurm: maintenance", timeout_ms=30_000))
            story.add(at, Left(node=victim, cause="drained", reason="by slurm: maintenance"))
        elif kind == "lost":
            story.lose(at, victim, 6100)
        elif kind == "hung":
            story.add(at, Hung(node=victim, local_rank=3, rank=11, pid=5, idle_ms=300_000, step=412, hung=1))
        else:
            story.add(at, Failed(node=victim, local_rank=5, rank=85, pid=6, exit_code=1, age_ms=20))
        gone = kind in {"lost", "drain"}
        survivors = [node for node in members if node != victim or not gone]
        story.regroup(at + 0.2, survivors, within=2)
        if gone and waiting:
            members[members.index(victim)] = waiting.pop(0)
            replacement = story.node(victim.rsplit("-", 2)[0])
            story.join(at + 400, [replacement])
            waiting.append(replacement)
        else:
            members = survivors
        story.complete(at + 2.5, members, "max_nodes" if len(members) == n else "all_joined", start)
    story.add(end, Left(node=members[0], cause="finished"))
    story.add(end, Closed(node=members[0], cause="finished"))
    for node in [*members[1:], *waiting]:
        story.add(end + story.random.uniform(0, 3), Left(node=node, cause="finished"))
    return story


def _crowded() -> Story:
    story = Story(2)
    members = [story.node(f"gpu-{i:02d}.rack-{i // 8}.eu-central-1.compute.internal") for i in range(40)]
    story.join(0, members, within=5)
    for i in range(60):
        story.complete(6 + 100 * i, members, "max_nodes", start=9)
        rack = members[:8]
        for node in rack:
            story.lose(90 + 100 * i, node)
        again = [story.node(node.rsplit("-", 2)[0]) for node in rack]
        story.join(95 + 100 * i, again)
        story.regroup(92 + 100 * i, members[8:], within=2)
        members = members[8:] + again
    story.add(3000, Outage(away_ms=240_000))
    story.add(5000, Refused(node=story.node("bad"), reason="gpu 3: ECC errors"))
    story.add(5100, Barred(node=story.node("bad"), failures=3))
    long = "for a long reason " * 20
    story.add(6000, Stopped(node=members[0], cause="restarts", restarts=60, message=long))
    return story


STORIES: dict[str, Callable[[], Story]] = {
    "three": _three_nodes,
    "64": lambda: _many_nodes(64, 1.0, 6),
    "crowded": _crowded,
}


def three_nodes() -> list[Event]:
    """A kill, a hang, a drain and a late joiner."""
    return _three_nodes().events()


def many_nodes(n: int, hours: float, faults: int, *, spares: int = 2, start: float = 25) -> list[Event]:
    """A job of n nodes with spares, and faults of all kinds."""
    return _many_nodes(n, hours, faults, spares=spares, start=start).events()


def crowded() -> list[Event]:
    """Long names, a rack that dies as a whole many times, an outage, refused and barred nodes, and a stop."""
    return _crowded().events()


SCENES: dict[str, Callable[[], list[Event]]] = {
    "three": three_nodes,
    "64": lambda: many_nodes(64, 1.0, 6),
    "1000": lambda: many_nodes(1000, 3.0, 3, start=90),
    "single": lambda: three_nodes()[:1],
    "8 hours": lambda: many_nodes(8, 8.0, 5, spares=1, start=40),
    "crowded": crowded,
    "trimmed": lambda: three_nodes()[12:],
}
