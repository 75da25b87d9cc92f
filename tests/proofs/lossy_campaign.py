"""Many store operations and rendezvous over a network that loses things, each effect and each reply compared.

    python -m tests.proofs.lossy_campaign --operations 1000000 --rendezvous 1000 --seed 7

Work comes in batches (`lossy_store.py`, `lossy_rendezvous.py`), each with a redis-server of its own, and a faulty proxy
for each client. The seed gives every client its calls, and every proxy the fault of its n-th request. A failure names
the batch, and how to run it alone.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field

from tests.proofs import lossy_rendezvous, lossy_store


@dataclass
class Result:
    """What was done, and which faults were met."""

    operations: int = 0
    rendezvous: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, other: Result) -> None:
        self.operations += other.operations
        self.rendezvous += other.rendezvous
        self.faults += other.faults


def batch(kind: str, seed: int, number: int) -> Result:
    logging.getLogger("redelastic").setLevel(logging.ERROR)  # else each fault logs that Redis is away
    try:
        if kind == "operations":
            return Result(lossy_store.OPERATIONS, 0, lossy_store.run_batch(f"{seed}, {kind} {number}"))
        return Result(0, lossy_rendezvous.ROUNDS, lossy_rendezvous.run_batch(f"{seed}, {kind} {number}"))
    except BaseException as e:
        raise AssertionError(f"--seed {seed} --only {kind} {number}: {type(e).__name__}: {e}") from e


def campaign(operations: int, rendezvous: int, seed: int, processes: int = 2) -> Result:
    """Run all batches; raises with the first failure."""
    wanted = [("operations", i) for i in range(-(-operations // lossy_store.OPERATIONS))]
    wanted += [("rendezvous", i) for i in range(-(-rendezvous // lossy_rendezvous.ROUNDS))]
    total = Result()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        try:
            for done in as_completed([pool.submit(batch, kind, seed, number) for kind, number in wanted]):
                total.add(done.result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description="Store operations and rendezvous over a network that loses things.")
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--rendezvous", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", nargs=2, metavar=("KIND", "NUMBER"), help="a single batch, as a failure names it")
    a = parser.parse_args()
    started = time.monotonic()
    if a.only:
        total = batch(a.only[0], a.seed, int(a.only[1]))
    else:
        total = campaign(a.operations, a.rendezvous, a.seed, a.processes)
    faults = ", ".join(f"{kind} {n:,}" for kind, n in sorted(total.faults.items()))
    sys.stdout.write(
        f"{total.operations:,} operations and {total.rendezvous:,} rendezvous, seed {a.seed}, "
        f"in {time.monotonic() - started:.0f} s; {sum(total.faults.values()):,} faults: {faults}\n"
    )


if __name__ == "__main__":
    main()
