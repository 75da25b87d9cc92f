"""What CPU time does the shuffled order of a data set take, index by index, and how much memory?

Compares `redelastic.data.Permutation`, which computes an index when it is asked for, with torch's list of all.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from benchmarks import report
from benchmarks.harness import run_alone
from benchmarks.report import Progress, Table
from redelastic.data import Permutation

SAMPLES: Final = (10**7, 10**9)
LISTED: Final = 10**7  # torch's list of more takes 8 bytes each
PART: Final = 1 << 20  # indices that are asked for at once
TARGET: Final = 200e-9  # seconds per index: 5 million a second
LIMIT: Final = 60.0
OURS, LIST = "redelastic", "torch.randperm"


def measure(way: str, samples: int, repeat: int) -> dict[str, Any]:
    """Seconds of CPU time per index, and the most bytes of memory."""
    torch.set_num_threads(1)
    asked: Callable[[int], torch.Tensor]
    if way == OURS:
        permutation = Permutation(samples, 0)
        asked, indices = (lambda start: permutation(torch.arange(start, start + PART))), PART
    else:
        asked, indices = (lambda _: torch.randperm(samples)), samples
    torch.arange(PART)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = []
    for number in range(repeat + 1):
        began = time.process_time()
        asked(number * PART % (samples - PART))
        times.append((time.process_time() - began) / indices)
    return {"seconds": times[1:], "bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    seconds = Table("data-time", "CPU time for each index of a shuffled order", "samples")
    memory = Table("data-memory", "Memory that it takes", "samples", unit="B")
    for samples in SAMPLES:
        for way in (OURS, LIST):
            progress(f"{samples:,} samples: {way}")
            if way == LIST and samples > LISTED:
                found: dict[str, Any] = {"seconds": "not tried", "bytes": f"{8 * samples / 1e9:g} GB for the list"}
            else:
                found = run_alone(measure, (way, samples, 1 if quick else 9), LIMIT)
            seconds.put(f"{samples:,}", way, found["seconds"])
            memory.put(f"{samples:,}", way, found["bytes"])
        seconds.targets[f"{samples:,}"] = TARGET
    yield from (seconds, memory)


if __name__ == "__main__":
    sys.exit(report.main(run, "data", __doc__ or ""))
