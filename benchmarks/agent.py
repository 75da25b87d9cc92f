"""What does it cost a training that redelastic watches over it? Time of its steps, CPU and memory.

What happens every second or two is made many times as frequent, so that its effect on a step shows above the
noise; results are scaled back to the usual pace.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import psutil

import redelastic
from benchmarks import report
from benchmarks.harness import run_alone
from benchmarks.report import Progress, Table
from redelastic import RedisServer
from redelastic.workers.board import ProgressBoard
from redelastic.workers.site.sitecustomize import VARIABLE

STEP: Final = 0.005  # seconds per training step: pure Python that holds the GIL, the worst case
INTERVAL: Final = 2.0  # between heartbeats, in seconds: the default
FASTER: Final = 10  # times as often as usual: telemetry and the agent's loop
OFTEN: Final = 1.0 / FASTER  # between heartbeats then, and between samples, as usual within a second
SETTLES: Final = 0.1  # seconds at the start of a block that do not count
TARGET: Final = 0.1  # percent of a step
LIMIT: Final = 120  # seconds for a process
TURNS: Final = 5  # an agent's CPU, with and without a template


# -- calls


def time_calls(repeat: int, calls: int) -> dict[str, Any]:
    """Seconds per call, by function, several times over, in a process that has an agent's shared memory."""
    board = ProgressBoard(1)
    os.environ |= board.environment(0)
    functions: dict[str, Callable[[int], object]] = {
        "progress()": redelastic.progress,
        "should_checkpoint()": lambda _: redelastic.should_checkpoint(),
        "a function that does nothing": lambda _: None,
    }
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeat + 1):
        for name, function in functions.items():
            began = time.perf_counter()
            for step in range(calls):
                function(step)
            found[name].append((time.perf_counter() - began) / calls)
    board.close()
    return {name: times[1:] for name, times in found.items()}


# -- a step, with and without


def steps_of() -> Callable[[], None]:
    """A step that takes about `STEP` on this machine when it is quiet."""

    def compute(n: int) -> int:
        return sum(i * i for i in range(n))

    def seconds(n: int) -> float:
        began = time.perf_counter()
        compute(n)
        return time.perf_counter() - began

    n = 10_000
    n = round(n * STEP / min(seconds(n) for _ in range(50)))

    def step() -> None:
        redelastic.progress(compute(n) and n)

    return step


def run_steps(step: Callable[[], None], seconds: float) -> list[float]:
    """The seconds each step took."""
    took, until = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        step()
        took.append(time.perf_counter() - began)
    return took


def alternate(pairs: int) -> Iterator[bool]:
    """With, without, without, with, …: slow drifts affect both alike."""
    for i in range(pairs):
        yield from (i % 2 == 0, i % 2 == 1)


def effects(blocks: list[tuple[bool, float]], faster: float) -> list[float]:
    """How many percent slower a step was with it than without, at the usual pace, per pair of blocks."""
    pairs = zip(blocks[::2], blocks[1::2], strict=True)
    return [100 * math.log(dict(pair)[True] / dict(pair)[False]) / faster for pair in pairs]


def confidence(values: list[float]) -> tuple[float, float]:
    """The two values between which the true median lies with 95 % confidence, for any distribution."""
    ordered, n = sorted(values), len(values)
    outside, below = 0, 0.0
    while (below := below + math.comb(n, outside) / 2**n) <= 0.025:
        outside += 1
    outside = max(0, outside - 1)
    return ordered[outside], ordered[n - 1 - outside]


# -- a whole agent


@contextlib.contextmanager
def running_agent(url: str, *, often: bool, preload: str = "") -> Iterator[tuple[psutil.Process, psutil.Process, Path]]:
    """`redelastic run` with one worker; yields the agent, its reaper, and the file with the worker's steps."""
    with tempfile.TemporaryDirectory() as made:
        steps = Path(made) / "steps"
        command = [sys.executable, "-m", "redelastic", "run", "--nnodes=1", "--nproc-per-node=1"]
        command += [f"--rdzv-id=bench-{uuid.uuid4().hex[:12]}", f"--monitor-interval={0.1 / (FASTER if often else 1)}"]
        command += ["--rdzv-endpoint=", f"--rdzv-conf=keep_alive_interval={OFTEN if often else INTERVAL}"]
        command += [f"--preload={preload}"] if preload else []
        command += ["-m", "benchmarks.agent", "worker", str(steps), "busy" if often else "idle"]
        env = os.environ | {"REDELASTIC_REDIS_URL": url, "OMP_NUM_THREADS": "1"}
        with (Path(made) / "log").open("w+") as log:
            launched = subprocess.Popen(command, env=env, stdout=log, stderr=log)  # in our group: it ends with us
            agent = psutil.Process(launched.pid)
            try:
                deadline = time.monotonic() + LIMIT
                while not (steps.exists() and steps.stat().st_size):
                    if launched.poll() is not None or time.monotonic() > deadline:
                        raise RuntimeError(f"the worker did not start: {Path(log.name).read_text()[-1000:]}")
                    time.sleep(0.05)
                [reaper] = [child for child in agent.children() if "reaper.py" in " ".join(child.cmdline())]
                yield agent, reaper, steps
            finally:
                launched.kill()  # its reaper ends the worker
                launched.wait()
                with contextlib.suppress(psutil.NoSuchProcess, UnboundLocalError):
                    while reaper.status() != psutil.STATUS_ZOMBIE:  # its adopter may not reap it
                        time.sleep(0.01)


def be_worker(steps: Path, *, busy: bool) -> None:
    """What the agent runs: writes each step's start and end to a file."""

    def wait() -> None:
        time.sleep(0.1)
        redelastic.progress(round(10 * time.monotonic()))

    step = steps_of() if busy else wait
    with steps.open("wb", buffering=0) as file:
        while True:
            began = time.monotonic()
            step()
            file.write(struct.pack("dd", began, time.monotonic()))


def scheduled(process: psutil.Process) -> tuple[float, float]:
    """How long a process' threads have run, and how long they waited for a core; in seconds."""
    ran, waited = 0, 0
    for thread in process.threads():
        with contextlib.suppress(FileNotFoundError):  # it has ended
            fields = Path(f"/proc/{process.pid}/task/{thread.id}/schedstat").read_text().split()
            ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return ran / 1e9, waited / 1e9


def with_an_agent(url: str, pairs: int, seconds: float) -> tuple[list[float], list[float]]:
    """A worker's steps while its agent runs, and while the agent is stopped.

    Returns:
        How many percent slower they were, as in :func:`effects`; and how many of it from waiting for a core.
    """
    times: list[tuple[bool, float, float]] = []
    waits: list[tuple[bool, float]] = []
    with running_agent(url, often=True) as (agent, reaper, file):
        [worker] = [child for child in agent.children() if child.pid != reaper.pid]
        time.sleep(seconds)  # warms up
        for runs in alternate(pairs):
            (agent.resume if runs else agent.suspend)()
            time.sleep(SETTLES)
            began, (_, waited) = time.monotonic(), scheduled(worker)
            time.sleep(seconds)
            times.append((runs, began, time.monotonic()))
            waits.append((runs, 1 + (scheduled(worker)[1] - waited) / seconds))
        agent.resume()
        took = list(struct.iter_unpack("dd", file.read_bytes()[: file.stat().st_size // 16 * 16]))
    blocks = [
        (runs, statistics.fmean(end - begin for begin, end in took if began <= begin and end <= ended))
        for runs, began, ended in times
    ]
    return effects(blocks, FASTER), effects(waits, FASTER)


def idle_agent(url: str, seconds: float, preload: str = "") -> dict[str, tuple[float, float]]:
    """CPU in percent of a core and private memory in bytes, of an agent, its reaper, and a template if any."""
    with running_agent(url, often=False, preload=preload) as (agent, reaper, _):
        time.sleep(INTERVAL)
        watched = {"agent": agent, "reaper": reaper}
        if preload:
            forks = [child for child in agent.children() if VARIABLE in child.environ()]
            watched["template"] = min(forks, key=psutil.Process.create_time)
        found = {}
        began, before = time.monotonic(), {name: scheduled(process)[0] for name, process in watched.items()}
        time.sleep(seconds)
        elapsed = time.monotonic() - began
        for name, process in watched.items():
            used = scheduled(process)[0] - before[name]
            found[name] = (100 * used / elapsed, float(process.memory_full_info().uss))
    return found


def usage(url: str, turns: int, seconds: float) -> tuple[Table, Table]:
    """CPU and memory of what watches over a training: with a template and without one, in turns."""
    cpu = Table("agent-cpu", "CPU at the usual pace, of one core", "of", unit="%")
    memory = Table("agent-memory", "Memory of its own (USS)", "of", unit="B")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for _ in range(turns):
        for preload, row in (("", "a whole {}"), ("torch", "with --preload torch: {}")):
            for name, used in idle_agent(url, seconds, preload).items():
                found[row.format(name)].append(used)
    for row, used_in_turns in found.items():
        for table, values in zip((cpu, memory), zip(*used_in_turns, strict=True), strict=True):
            table.put(row, "used", values)
    return cpu, memory


# -- the tables


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    repeat, pairs, seconds = (2, 2, 0.4) if quick else (9, 16, 0.5)
    with RedisServer() as server:
        progress("calls")
        table = Table("agent-calls", "One call of what a training script calls", "call")
        for name, times in run_alone(time_calls, (repeat, 20_000 if quick else 300_000), LIMIT).items():
            table.put(name, "takes", times)
        yield table

        table = Table("agent-step", f"A training's step of {1000 * STEP:g} ms is slower by", "with", unit="%")
        progress("steps with an agent")
        slower, waits = with_an_agent(server.url, pairs, seconds)
        for name, values in (("an agent", slower), ("an agent: it waits for a core", waits)):
            table.targets[name] = TARGET
            low, high = confidence(values)
            for column, value in (("median", statistics.median(values)), ("95 %: from", low), ("to", high)):
                table.put(name, column, value)
        yield table

        progress("CPU and memory")
        yield from usage(server.url, *((1, 1.0) if quick else (TURNS, 6.0)))


if __name__ == "__main__":
    if sys.argv[1:2] == ["worker"]:
        be_worker(Path(sys.argv[2]), busy=sys.argv[3] == "busy")
    sys.exit(report.main(run, "agent", __doc__ or ""))
