"""How long does a job of three nodes stand still, beside NVIDIA's NVRx and Meta's torchft?

Installs both into an environment of its own. NVRx' launcher restarts workers, as torchrun does; its in-process wrapper
and torchft keep the other nodes' workers. The timeouts are each tool's own defaults, or about a second.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import report
from benchmarks.harness import TimeLimitError, free_port
from benchmarks.recovery import LIMIT, Case
from benchmarks.recovery_job import C10D, CRASHED, HOST, LAST_CALL, MAX_RESTARTS, OURS, PROCESSES, SURVIVING, WARM, Job
from benchmarks.report import Progress, Table
from benchmarks.survive import LEASE_OF_1_S

NVRX, INPROCESS, TORCHFT = "NVRx, launcher", "NVRx, in-process", "torchft"
PEERS: Final = (NVRX, INPROCESS, TORCHFT)
TUNED: Final = ", timeouts of 1 s"
PACKAGES: Final = ("nvidia-resiliency-ext", "torchft", "numpy", "psutil")
SHORT: Final = ("--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000")  # of its lighthouse; by default 60 s and 5 s
WORKER: Final = Path(__file__).with_name("peers_worker.py")
REPEAT: Final = 3  # times
ONCE: Final = (C10D, NVRX, INPROCESS, INPROCESS + TUNED)  # are slow
FAULTS: Final = ((CRASHED, "another"), ("kill", "another"), ("kill", "rank 0"), ("freeze", "another"))
CONTENDERS: Final = (
    *(SURVIVING, SURVIVING + TUNED, WARM, OURS),
    *(TORCHFT, TORCHFT + TUNED, INPROCESS, INPROCESS + TUNED, NVRX, C10D),
)
SERVICE: Final = "kill of Redis or the lighthouse"
WITH_SERVICE: Final = (SURVIVING, OURS, TORCHFT, TORCHFT + TUNED)  # the others' is a thread of a worker or agent
WITHOUT: Final = 20.0  # how long the workers are watched after the end of the service, in seconds


class Node(subprocess.Popen[bytes]):
    """A node's process, as :class:`Job` uses one."""

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self.poll() is None

    def join(self) -> None:
        """Wait for its end."""
        self.wait()


class PeerJob(Job):
    """Nodes of another tool.

    Args:
        contender: its name.
        environment: where it is installed.
    """

    def __init__(self, contender: str, environment: Path) -> None:
        super().__init__(contender, 3, {})
        self._bin, self._port = environment / "bin", free_port()
        self._tool, self._is_tuned = contender.removesuffix(TUNED), TUNED in contender
        self.survives = self._tool != NVRX
        self.lighthouse: Node | None = None

    def _open_services(self) -> None:
        """The lighthouse, which each job of torchft needs."""
        if self._tool == TORCHFT:
            more = SHORT if self._is_tuned else ()
            command = [self._bin / "torchft_lighthouse", f"--bind=127.0.0.1:{self._port}", "--min_replicas=2", *more]
            self.lighthouse = self._spawn(command, "lighthouse.log")

    def _spawn(self, command: list[Any], log: str, **more: str) -> Node:
        lighthouse = f"http://127.0.0.1:{self._port}"
        env = {**os.environ, **self._env(), "TORCHFT_LIGHTHOUSE": lighthouse, **more}
        with (self._directory / log).open("wb") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output}
            return Node([*map(str, command)], cwd=self._directory, env=env, start_new_session=True, **streams)

    def _start_node(self) -> None:
        number, timeout = len(self.nodes), "1" if self._is_tuned else "default"
        if self._tool == INPROCESS:
            command: list[Any] = [self._bin / "python", WORKER, "inprocess", timeout]
            env = {"RANK": str(number), "WORLD_SIZE": str(self.size)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._port)}
        else:
            is_nvrx, env = self._tool == NVRX, {}
            launcher = "nvidia_resiliency_ext.fault_tolerance.launcher" if is_nvrx else "torch.distributed.run"
            command = [self._bin / "python", "-m", launcher, "--rdzv-backend=c10d", f"--max-restarts={MAX_RESTARTS}"]
            if is_nvrx:
                conf = f"is_host={int(number == HOST)},last_call_timeout={LAST_CALL}"
                command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}"]
                command += [f"--rdzv-id={self._run_id}", "--local-addr=127.0.0.1", "--nnodes=2:3", PROCESSES, "worker"]
            else:
                command += ["--rdzv-endpoint=127.0.0.1:0", "--nnodes=1", WORKER, "torchft", timeout]
        self.nodes.append(self._spawn([*command, self._record, number], f"{number}.log", **env))


def install(folder: Path) -> str:
    """Install the tools; returns why that failed, or nothing."""
    venv.create(folder, with_pip=True)
    version = str(torch.__version__).partition("+")[0]
    command: list[Any] = [folder / "bin" / "python", "-m", "pip", "install", "-q", f"torch=={version}", *PACKAGES]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else "cannot be installed: " + done.stderr.strip().splitlines()[-1]


def job_of(contender: str, environment: Path) -> Job:
    """A job of three nodes."""
    conf: Mapping[str, float] = LEASE_OF_1_S if TUNED in contender else {}
    tool = contender.removesuffix(TUNED)
    return PeerJob(contender, environment) if tool in PEERS else Job(tool, 3, conf)


def measure(case: Case | None, contender: str, environment: Path) -> float | str:
    """Seconds that a fault costs, or why the job did not go on.

    From the fault to the first step of all survivors; if the service is what ends, the longest time between two steps.
    """
    with closing(job_of(contender, environment)) as job:
        try:
            job.start()
        except (TimeLimitError, RuntimeError) as e:
            return str(e).splitlines()[0]
        if case is None:
            return longest_pause(job)
        found = job.hurt(case.fault, job.by_role(case.role)).result(LIMIT)
    return found.missing if found.stepped is None else found.stepped


def longest_pause(job: Job) -> float | str:
    """End the service of a job; returns the longest time that a worker was without a step, or that it made no more."""
    lighthouse = job.lighthouse if isinstance(job, PeerJob) else None
    pid = lighthouse.pid if lighthouse else job.server.pid if job.server else None
    assert pid, "it has a service"
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    time.sleep(WITHOUT)
    ended = time.monotonic()
    steps: dict[int, list[float]] = {}
    for worker in job.workers():
        steps.setdefault(worker.node, [killed]).extend(step for step in worker.steps if step > killed)
    if any(ended - max(of_node) > WITHOUT / 2 for of_node in steps.values()):
        return f"no step in the last {WITHOUT / 2:g} s of {WITHOUT:g} s"
    return max(later - step for of_node in steps.values() for step, later in pairwise(sorted(of_node)))


def summed_up(found: list[float | str]) -> list[float] | str:
    """The times; in words, if a fault was not survived each time."""
    times = sorted(one for one in found if not isinstance(one, str))
    missing = [one for one in found if isinstance(one, str)]
    if missing and times:
        return f"{missing[0]}, {len(missing)} of {len(found)} times; else {times[0]:.3g} s"
    return missing[0] if missing else times


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    faults, contenders, repeat = (FAULTS[:1], (SURVIVING, TORCHFT), 1) if quick else (FAULTS, CONTENDERS, REPEAT)
    table = Table("peers-stepped", "From the fault to the first step of all survivors", "fault", base=SURVIVING)
    with tempfile.TemporaryDirectory(prefix="redelastic-bench-") as made:
        progress("installs NVRx and torchft")
        why = install(Path(made))
        for case in [*(Case(fault, role) for fault, role in faults), None]:
            row = case.row if case else SERVICE
            for contender in contenders:
                if case is None and contender not in WITH_SERVICE:
                    continue
                if why and contender.removesuffix(TUNED) in PEERS:
                    table.put(row, contender, why)
                    continue
                found: list[float | str] = []
                for _ in range(1 if case is None or contender in ONCE else repeat):
                    progress(f"{row}: {contender}")
                    found.append(measure(case, contender, Path(made)))
                table.put(row, contender, summed_up(found))
    yield table


if __name__ == "__main__":
    sys.exit(report.main(run, "peers", __doc__ or ""))
