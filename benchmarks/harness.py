"""What the benchmarks share: nodes as threads of a few processes under a time limit, and where figures come from."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import platform
import queue
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

PROCESSES = 4
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # peers whose server ends first complain at length

# Given (shared options, number of this node), prepares the node and returns what is to be timed, and what ends it.
Prepare = Callable[[dict[str, Any], int], tuple[Callable[[], object], Callable[[], object]]]


@dataclass(frozen=True)
class Timing:
    """When one node began and ended, in seconds on the machine's monotonic clock."""

    began: float
    ended: float


class TimeLimitError(Exception):
    """The nodes did not finish within the limit."""


def run_nodes(prepare: Prepare, rounds: list[dict[str, Any]], nodes: int, limit: float) -> list[list[Timing]]:
    """Run ``nodes`` nodes at once, several times over in the same processes, and time each.

    Args:
        prepare: makes a node, in another process, so it must be importable by name; node 0 before the others.
        rounds: options for ``prepare``, for each time.
        nodes: how many; they are threads of up to four processes.
        limit: seconds for everything; past it all processes are killed.

    Raises:
        TimeLimitError: the limit was reached.
        RuntimeError: a node failed.
    """
    context = multiprocessing.get_context("spawn")
    n_processes = min(PROCESSES, nodes)
    results: Any = context.Queue()
    step: Any = context.Barrier(n_processes)
    processes: list[BaseProcess] = [
        context.Process(
            target=_run_share, args=(prepare, rounds, range(i, nodes, n_processes), step, results), daemon=True
        )
        for i in range(n_processes)
    ]
    deadline = time.monotonic() + limit
    timings: list[list[Timing]] = []
    with _killed_at_the_end(processes):
        for process in processes:
            process.start()
        for _ in rounds:
            timings.append([])
            for _ in processes:
                try:
                    found = results.get(timeout=max(0.0, deadline - time.monotonic()))
                except queue.Empty:
                    raise TimeLimitError(f"not within {limit:g} s") from None
                if isinstance(found, str):
                    raise RuntimeError(found)  # noqa: TRY004
                timings[-1] += [Timing(*pair) for pair in found]
        for process in processes:
            process.join(max(0.1, deadline - time.monotonic()))
    return timings


@contextlib.contextmanager
def _killed_at_the_end(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # each process leads a group of its own
                    os.killpg(process.pid, signal.SIGKILL)
            if process.pid is not None:
                process.join()


def _run_share(prepare: Prepare, rounds: list[dict[str, Any]], share: range, step: Any, results: Any) -> None:
    """One process: its nodes prepare, all processes wait for each other, and each node is timed in a thread."""
    os.setpgid(0, 0)
    logging.disable(logging.WARNING)
    try:
        for options in rounds:
            nodes = [prepare(options, 0)] if share[0] == 0 else []
            step.wait()
            nodes += [prepare(options, number) for number in share if number != 0]
            step.wait()
            results.put(_time_all([timed for timed, _ in nodes]))
            step.wait()
            for _, end in nodes:
                end()
    except Exception as e:  # noqa: BLE001  # the parent decides
        results.put(f"{type(e).__name__}: {e}")


def _time_all(timed: list[Callable[[], object]]) -> list[tuple[float, float]]:
    timings: list[tuple[float, float]] = []
    gate = threading.Barrier(len(timed) + 1)

    def run(one: Callable[[], object]) -> None:
        gate.wait()
        began = time.monotonic()
        one()
        timings.append((began, time.monotonic()))

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in timed]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    if len(timings) < len(timed):
        raise RuntimeError(f"{len(timed) - len(timings)} nodes failed; see the output above")
    return timings


def milliseconds(seconds: float) -> str:
    """A time for a table."""
    return f"{1000 * seconds:,.1f} ms"


def median_and_spread(values: list[float]) -> dict[str, float]:
    """The median, the extremes and how many there were."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def provenance() -> dict[str, Any]:
    """Where figures come from: machine, versions, commit."""
    import redis  # noqa: PLC0415
    import torch  # noqa: PLC0415

    described = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False)
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "redis-py": redis.__version__,
        "commit": described.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }
