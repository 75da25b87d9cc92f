"""How long does a job stand still when a node, agent or worker dies, or a node leaves or freezes?

Real agents and workers, and each part on its own: until the fault shows, until the survivors have a new round, until
their workers have started. Side by side: our agent, torchrun with our plugin, and torchrun with c10d.
"""

from __future__ import annotations

import math
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Final

from benchmarks import report
from benchmarks.harness import TimeLimitError
from benchmarks.recovery_job import (
    AGENT_KILLED,
    C10D,
    C10DS,
    CRASHED,
    HOST_ROLE,
    JOIN,
    OURS,
    PLUGIN,
    UNSHARED,
    WARM,
    Job,
    Recovery,
    Watch,
)
from benchmarks.report import Progress, Table

if TYPE_CHECKING:
    from typing_extensions import Self

CONTENDERS: Final = (OURS, PLUGIN, C10D)
LEASE: Final = 6.0  # ours by default; c10d's is 15 s
SHORT: Final = {"keep_alive_interval": 0.5, "keep_alive_max_attempt": 3}  # a lease of 1.5 s
ROLES: Final = ("rank 0", HOST_ROLE, "another")
C10D_QUIET: Final = 10.0  # its keep-alive comes every 5 s and lasts 15 s
LIMIT: Final = 30.0  # for one recovery, in seconds
PARTS: Final = {
    "detected": "Until the first worker of a survivor has ended",
    "grouped": "Until all survivors have started the workers of their new round",
    "start": "From then on, until these workers have made a step: their own start",
    "stepped": "Until the first step with all survivors",
    "restarts": "How often a survivor has started its worker",
}
# The part the target is for: the workers' own start, which is not ours, comes on top.
TARGETED: Final = "grouped"


@dataclass(frozen=True)
class Case:
    """What is done, to whom, in which job."""

    fault: str
    role: str
    nodes: int = 3
    conf: Mapping[str, float] = field(default_factory=dict)
    state: int = 0  # of each worker that survives, in MB
    contenders: tuple[str, ...] = CONTENDERS

    @property
    def lease(self) -> float:
        """Our lease, in seconds."""
        return self.conf.get("keep_alive_interval", 2) * self.conf.get("keep_alive_max_attempt", 3)

    @property
    def row(self) -> str:
        """The case's row name in the tables."""
        nodes = f", {self.nodes} nodes" if self.nodes != 3 else ""
        lease = f", lease {self.lease:g} s" if self.lease != LEASE else ""
        roll_call = f", roll call {self.conf['roll_call_timeout']:g} s" if "roll_call_timeout" in self.conf else ""
        state = f", state {self.state} MB" if self.state else ""
        return f"{self.fault}, {self.role}{nodes}{lease}{roll_call}{state}"

    @property
    def target(self) -> float:
        """Seconds from the fault to the new round.

        A leave is known at once, as is a worker that fails by itself. A dead node or agent is noticed when a worker of
        another node fails on its connection, and it does not answer the roll call; a frozen one breaks no connection.
        """
        if self.fault == "freeze":
            return self.lease + 0.1
        if self.fault in ("kill", AGENT_KILLED):
            return 1.3 if self.nodes <= 3 else 1.6
        return 0.3

    def quiet(self, contender: str) -> float:
        """For how many seconds after the fault, at least, everyone just waits for a lease to run out."""
        if self.fault == JOIN:
            return 0
        if contender in C10DS and self.fault == "freeze":
            return math.inf  # no worker fails when a peer freezes, and no agent looks
        if contender in C10DS:
            return 0 if self.role == HOST_ROLE or self.fault == CRASHED else C10D_QUIET
        return self.lease * 2 / 3 if self.fault == "freeze" else 0  # there are three heartbeats in a lease


Turn = tuple[Case, str]  # a case and a contender


def _cases() -> Iterator[Case]:
    more = {("kill", "rank 0"): (UNSHARED,), ("terminate", "rank 0"): (WARM,)}
    for fault, role in product(("kill", "terminate", "freeze"), ROLES):
        yield Case(fault, role, contenders=(C10D,) if role == HOST_ROLE else CONTENDERS + more.get((fault, role), ()))
    for fault in ("kill", "terminate", "freeze"):
        yield Case(fault, "rank 0", nodes=8, contenders=(OURS, PLUGIN))
    yield Case(CRASHED, "rank 0")
    yield Case(AGENT_KILLED, "rank 0", contenders=(OURS,))  # torchrun's workers survive their agent
    yield Case("freeze", "rank 0", conf=SHORT, contenders=(OURS,))


def _turns(cases: list[Case]) -> list[Turn]:
    """First those of a tenth of a second, then c10d's, the longest waits first, then the rest."""

    def place(turn: Turn) -> tuple[bool, bool, float, int]:
        case, contender = turn
        theirs = contender in C10DS
        return theirs or case.target > 0.3, not theirs, -case.quiet(contender), -case.nodes

    turns = [(case, contender) for case in cases for contender in case.contenders]
    return sorted(turns, key=place)


class Runner:
    """Runs turns one after the other; turns that only wait overlap with others, if those end in time."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, Watch]] = []  # until when, on the monotonic clock
        self._start: dict[int, float] = {}  # seconds to start, by number of nodes
        self._opened = ExitStack()
        self._watchers = self._opened.enter_context(ThreadPoolExecutor(max_workers=32))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._opened.close()

    def job(self, case: Case, contender: str) -> Job:
        """A job, which ends with the runner at the latest."""
        size = case.nodes
        self.make_room(self._start.get(size, math.inf))
        began = time.monotonic()
        job = Job(contender, size, case.conf, size - 1 if case.fault == JOIN else size, case.state)
        self._opened.callback(job.close)
        job.start()
        self._start[size] = time.monotonic() - began
        return job

    def make_room(self, seconds: float) -> None:
        """Return once this many seconds fit in before any waiting job goes on."""
        for until, watch in self._waiting:
            if time.monotonic() + seconds > until:
                watch.over.wait()

    def measure(self, turn: Turn) -> Future[Recovery]:
        """Hurt a job, and watch it in the background."""
        case, contender = turn
        found: Future[Recovery] = Future()
        try:
            job = self.job(case, contender)
        except (TimeLimitError, RuntimeError) as e:
            found.set_result(Recovery(missing=str(e).splitlines()[0]))
            return found
        self.make_room(0 if contender in C10DS else case.target + self._start[case.nodes])
        watch = job.hurt(case.fault, job.by_role(case.role))
        found = self._watchers.submit(_watched, job, watch)
        quiet = case.quiet(contender)
        if quiet == 0:
            wait([found])
        elif quiet < math.inf:
            self._waiting.append((watch.fault + quiet, watch))
            if case.fault != "freeze":
                watch.detected.wait()
        return found


def _watched(job: Job, watch: Watch) -> Recovery:
    try:
        with closing(job):
            return watch.result(LIMIT)
    finally:
        watch.detected.set()
        watch.over.set()


def measure(progress: Progress, cases: list[Case]) -> dict[tuple[str, str], list[Recovery]]:
    """Measure all cases, some of them several times; contenders take turns. The key is the row and the contender."""
    found: defaultdict[tuple[str, str], list[Future[Recovery]]] = defaultdict(list)
    with Runner() as runner:
        for case, contender in _turns(cases):
            progress(f"{case.row}: {contender}")
            found[case.row, contender].append(runner.measure((case, contender)))
        progress("those in which everybody waits")
        return {key: [future.result() for future in futures] for key, futures in found.items()}


def tables(progress: Progress, cases: list[Case]) -> Iterator[Table]:
    """Measure each case once."""
    parts = {
        name: Table(f"recovery-{name}", title, "fault", unit="" if name == "restarts" else "s", base=OURS)
        for name, title in PARTS.items()
    }
    parts[TARGETED].targets = {case.row: case.target for case in cases if case.role != HOST_ROLE}
    found = measure(progress, cases)
    for case, (name, table) in product(cases, parts.items()):
        if case.role == HOST_ROLE:
            table.put(case.row, OURS, "no node hosts it")
        for contender in case.contenders:
            [recovery] = found[case.row, contender]
            took: float | None = getattr(recovery, name)
            table.put(case.row, contender, recovery.missing if took is None else took)
    yield from parts.values()


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    if quick:
        case = Case("kill", "rank 0", nodes=2, conf=SHORT, contenders=(OURS,))
        return tables(progress, [case])
    return tables(progress, list(_cases()))


if __name__ == "__main__":
    sys.exit(report.main(run, "recovery", __doc__ or ""))
