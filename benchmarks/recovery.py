"""How long does a job stand still when a node dies, is terminated or freezes, or when Redis restarts?

Real agents and workers, and each part on its own: until the fault shows, until the survivors have a new round, until
their workers have started. Side by side: our agent, torchrun with our plug-in, and torchrun with c10d.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

from benchmarks import report
from benchmarks.harness import TimeLimitError
from benchmarks.recovery_job import C10D, C10DS, HOST_ROLE, OURS, PLUGIN, UNSHARED, Job, Outage, Recovery, Watch
from benchmarks.report import Progress, Table

if TYPE_CHECKING:
    from typing_extensions import Self

CONTENDERS: Final = (OURS, PLUGIN, C10D)
LEASE: Final = 6.0  # ours by default; c10d's is 15 s
SHORT: Final = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 3}  # a lease of 1.5 s
AWAY: Final = 1.0  # how long Redis is, in seconds
LIMIT: Final = 30.0
PARTS: Final = {
    "detected": "Until the first worker of a survivor has ended",
    "grouped": "Until all survivors have started the workers of their new round",
    "start": "From then on, until these workers have made a step: their own start",
    "stepped": "Until the first step with all survivors",
    "restarts": "How often a survivor has started its worker",
}
# What the target is for: to the workers' own start, which is not ours, so much comes on top.
TARGETED: Final = "grouped"


@dataclass(frozen=True)
class Case:
    """What is done to whom in what job."""

    fault: str
    role: str
    nodes: int = 3
    conf: Mapping[str, float] = field(default_factory=dict)
    contenders: tuple[str, ...] = CONTENDERS

    @property
    def lease(self) -> float:
        """Ours, in seconds."""
        interval, attempts = (self.conf.get(f"keep_alive_{name}", 0) for name in ("interval", "max_attempt"))
        return interval * attempts or LEASE

    @property
    def row(self) -> str:
        """In the tables."""
        nodes = f", {self.nodes} nodes" if self.nodes != 3 else ""
        lease = f", lease {self.lease:g} s" if self.conf else ""
        return f"{self.fault}, {self.role}{nodes}{lease}"

    @property
    def target(self) -> float:
        """Seconds from the fault to the new round: one that leaves is known at once, another one by its lease."""
        return 0.3 if self.fault == "terminate" else self.lease + 0.1

    @property
    def silent(self) -> bool:
        """Whether nothing happens at c10d: no worker fails when a peer freezes, and no agent looks."""
        return self.fault == "freeze"


CASES: Final = [
    Case("kill", "rank 0", contenders=(*CONTENDERS, UNSHARED)),
    *(Case("kill", role, contenders=(OURS, C10D)) for role in (HOST_ROLE, "another")),
    Case("terminate", "rank 0"),
    *(Case("terminate", role, contenders=(OURS, C10D)) for role in (HOST_ROLE, "another")),
    *(Case("freeze", role, contenders=(OURS, C10D)) for role in ("rank 0", HOST_ROLE, "another")),
    Case("kill", "rank 0", nodes=8, contenders=(OURS, C10D)),
    *(Case(fault, "rank 0", conf=SHORT, contenders=(OURS,)) for fault in ("kill", "freeze")),
]


class Runner:
    """Runs cases one after the other; those in which everybody waits are watched to their limit while others run.

    Args:
        limit: for one recovery, in seconds.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._opened = ExitStack()
        self._watchers = self._opened.enter_context(ThreadPoolExecutor())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def job(self, contender: str, size: int, conf: Mapping[str, float]) -> Job:
        """A job, which ends at the latest when the runner does."""
        job = Job(contender, size, conf)
        self._opened.callback(job.close)
        job.start()
        return job

    def measure(self, case: Case, contender: str) -> Future[Recovery]:
        """Start a job, hurt it, and have it watched."""
        found: Future[Recovery] = Future()
        if case.role == HOST_ROLE and contender not in C10DS:
            found.set_result(Recovery(missing="no node hosts it"))
            return found
        try:
            job = self.job(contender, case.nodes, case.conf)
        except (TimeLimitError, RuntimeError) as e:
            found.set_result(Recovery(missing=str(e).splitlines()[0]))
            return found
        watch = job.hurt(case.fault, job.by_role(case.role))
        found = self._watchers.submit(_watched, job, watch, self._limit)
        if not (case.silent and contender in C10DS):
            watch.over_or_stuck.wait()
        return found


def _watched(job: Job, watch: Watch, limit: float) -> Recovery:
    try:
        with closing(job):
            return watch.result(limit)
    finally:
        watch.over_or_stuck.set()


def tables(progress: Progress, cases: list[Case], *, redis: int, repeat: int, limit: float) -> Iterator[Table]:
    """Measure; contenders take turns.

    Args:
        progress: is told what is being done.
        cases: which faults, to whom.
        redis: how many nodes see their Redis restart; 0: none do.
        repeat: how often each.
        limit: for one recovery, in seconds.
    """
    parts = {
        name: Table(f"recovery-{name}", title, "fault", unit="" if name == "restarts" else "s", base=OURS)
        for name, title in PARTS.items()
    }
    parts[TARGETED].targets = {case.row: case.target for case in cases if case.role != HOST_ROLE}
    with Runner(limit) as runner:
        found: defaultdict[tuple[str, str], list[Future[Recovery]]] = defaultdict(list)
        for case, _, contender in ((c, i, name) for c in cases for i in range(repeat) for name in c.contenders):
            progress(f"{case.row}: {contender}")
            found[case.row, contender].append(runner.measure(case, contender))
        outages = _restart_redis(runner, progress, redis, repeat) if redis else {}
        progress("those in which everybody waits")
        for (row, contender), futures in found.items():
            for name, table in parts.items():
                table.put(row, contender, _cell([future.result() for future in futures], name))
    pauses = Table("recovery-redis", f"Redis is killed, and back after {AWAY:g} s without any data", "what", base=OURS)
    for contender, times in outages.items():
        parts["restarts"].put("Redis restarts empty", contender, [outage.restarts for outage in times])
        pauses.put("longest step while it is away", contender, [outage.away for outage in times])
        pauses.put("longest step afterwards", contender, [outage.afterwards for outage in times])
        known = [outage.known for outage in times if outage.known is not None]
        pauses.put("all nodes known again", contender, known if len(known) == len(times) else "not within a lease")
    yield from parts.values()
    if outages:
        yield pauses


def _restart_redis(runner: Runner, progress: Progress, nodes: int, repeat: int) -> dict[str, list[Outage]]:
    found: defaultdict[str, list[Outage]] = defaultdict(list)
    for _ in range(repeat):
        progress(f"restart of Redis: {OURS}")
        with closing(runner.job(OURS, nodes, {})) as job:
            found[OURS].append(job.restart_redis(AWAY, watched=LEASE + 2))
    return found


def _cell(found: list[Recovery], part: str) -> list[float] | str:
    """The values of all repetitions, or why there are not as many."""
    values: list[float | None] = [getattr(one, part) for one in found]
    known = [value for value in values if value is not None]
    if len(known) == len(found):
        return known
    missing = next(one.missing for one, value in zip(found, values, strict=True) if value is None)
    return missing if len(found) == 1 else f"{missing} ({len(found) - len(known)} of {len(found)})"


def run(quick: bool, progress: Progress, *, limit: float = LIMIT, repeat: int = 1) -> Iterator[Table]:
    """As `python -m benchmarks` does it."""
    if quick:
        case = Case("kill", "rank 0", nodes=2, conf=SHORT, contenders=(OURS,))
        return tables(progress, [case], redis=0, repeat=1, limit=limit)
    return tables(progress, CASES, redis=3, repeat=repeat, limit=limit)


def main() -> int:
    """Patience and repetitions of one's own choice; else as the others."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--repeat", type=int, default=1)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    return report.main(partial(run, limit=own.limit, repeat=own.repeat), "recovery", __doc__ or "")


if __name__ == "__main__":
    sys.exit(main())
