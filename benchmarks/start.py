"""How long does a worker take from its start to the first line of its script, with torch imported?

Compares workers forked from a template (``--preload torch``) with workers started by torch's agent.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

from benchmarks import report
from benchmarks.harness import run_alone
from benchmarks.report import Progress, Table
from redelastic.workers import processes
from redelastic.workers.warm import WarmStart

TARGETS: Final = {1: 0.02, 8: 0.1}  # seconds, by the number of workers that start at once
LIMIT: Final = 240.0  # seconds for all groups of one size
SCRIPT: Final = """
import torch, os, time
os.write(os.open({!r}, os.O_WRONLY | os.O_APPEND), b"%.6f\\n" % time.monotonic())
os._exit(0)  # an end that takes long would be counted for those that start later
"""


def time_starts(workers: int, repeat: int) -> dict[str, list[float]]:
    """Seconds until the last worker of a group reaches its script's first line; both ways take turns."""
    with tempfile.TemporaryDirectory() as made:
        record, script = Path(made) / "record", Path(made) / "script.py"
        script.write_text(SCRIPT.format(str(record)))
        tree = processes.ProcessTree()
        tree.adopt_orphans()
        handler: Any = None
        spec = WorkerSpec("worker", workers, handler, entrypoint=sys.executable, args=("-u", str(script)))
        warm = WarmStart(spec, ["torch"], tree.environment, tree, lambda: False)
        found: dict[str, list[float]] = {"redelastic": [], "as always": []}
        warm.prepare()
        for _ in range(repeat + 1):
            for way, times in found.items():
                record.write_bytes(b"")
                began = time.monotonic()
                with warm.starting() if way == "redelastic" else nullcontext():
                    context = start_processes(
                        "worker",
                        sys.executable,
                        dict.fromkeys(range(workers), tuple(spec.args)),
                        {rank: {**tree.environment, "RANK": str(rank)} for rank in range(workers)},
                        DefaultLogsSpecs(log_dir=os.devnull),
                    )
                ended = context.wait(period=0.01)
                if ended is None or ended.is_failed():
                    raise RuntimeError(f"workers failed: {ended}")
                lines = record.read_text().split()
                assert len(lines) == workers
                times.append(max(map(float, lines)) - began)
        warm.close()
        tree.close()
    return {way: times[1:] for way, times in found.items()}


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    os.environ["OMP_NUM_THREADS"] = "1"  # as torchrun sets it for several workers per node
    table = Table("start", "From a worker's start to its script's first line", "workers that start at once")
    for workers, target in TARGETS.items():
        progress(f"{workers} at once")
        for way, times in run_alone(time_starts, (workers, 1 if quick else 9 if workers == 1 else 3), LIMIT).items():
            table.put(workers, way, times)
        table.targets[str(workers)] = target
    yield table


if __name__ == "__main__":
    sys.exit(report.main(run, "start", __doc__ or ""))
