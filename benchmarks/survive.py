"""How long does a job of three nodes stand still when its workers survive, beside jobs whose workers start anew?

The workers of a round survive (`redelastic run --survive`), are forked from a template (`--preload`), or are started.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Final

from benchmarks import report
from benchmarks.recovery import Case, measure
from benchmarks.recovery_job import AGENT_KILLED, AGENTS, C10D, CRASHED, JOIN, NEW, SURVIVING
from benchmarks.report import Progress, Table

REPEAT: Final = 3  # times, for our agent
FAULTS: Final = (CRASHED, AGENT_KILLED, "kill", "freeze", JOIN, "terminate")
PLANNED: Final = (JOIN, "terminate")  # workers train on until the change
LEASE_OF_1_S: Final = {"keep_alive_interval": 0.25, "keep_alive_max_attempt": 4}
TUNED: Final = (  # and for states that take seconds to load
    *(Case(CRASHED, "rank 0", state=megabytes, contenders=(SURVIVING,)) for megabytes in (10, 500, 2000)),
    Case(AGENT_KILLED, "rank 0", conf={"roll_call_timeout": 0.1}, contenders=(SURVIVING,)),
    Case("freeze", "rank 0", conf={"keep_alive_interval": 1}, contenders=(SURVIVING,)),
    Case("freeze", "rank 0", conf=LEASE_OF_1_S, contenders=(SURVIVING,)),
)


def target(case: Case) -> float:
    """Seconds that a fault may cost, or a change."""
    if case.fault == "freeze":
        return case.lease + 0.2
    if case.fault == AGENT_KILLED and case.conf:
        return 0.3
    return {CRASHED: 0.12, AGENT_KILLED: 0.75, "kill": 0.75, JOIN: 0.2, "terminate": 0.2}[case.fault]


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    if quick:
        pairs = (CRASHED, "rank 0"), (JOIN, NEW)
        cases = ours = [Case(*pair, conf=LEASE_OF_1_S, contenders=(SURVIVING,)) for pair in pairs]
    else:
        ours = [Case(fault, NEW if fault == JOIN else "rank 0", contenders=AGENTS) for fault in FAULTS]
        theirs = [Case(case.fault, case.role, contenders=(C10D,)) for case in ours if case.fault != AGENT_KILLED]
        ours += TUNED
        cases = [*(ours * REPEAT), *theirs]  # torchrun's workers survive their agent
    found = measure(progress, cases)
    stepped = Table("survive-stepped", "From the fault to the first step of all survivors", "fault", base=SURVIVING)
    paused = Table("survive-paused", "The longest that a survivor was without a step", "change", base=SURVIVING)
    for case in ours:
        table, part = (paused, "paused") if case.fault in PLANNED else (stepped, "stepped")
        table.targets[case.row] = target(case)
        for (row, contender), recoveries in found.items():
            if row == case.row:
                times = [took for recovery in recoveries if (took := getattr(recovery, part)) is not None]
                missing = [recovery.missing for recovery in recoveries if getattr(recovery, part) is None]
                table.put(row, contender, missing[0] if missing else times)
    yield from (stepped, paused)


if __name__ == "__main__":
    sys.exit(report.main(run, "survive", __doc__ or ""))
