"""How long does a job of three nodes stand still, beside NVIDIA's NVRx and Meta's torchft?

Installs both into an environment of its own. NVRx' launcher restarts workers, as torchrun does; torchft's workers
survive, each node being a replica group. The timeouts are each tool's own defaults, or about a second.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks import report
from benchmarks.harness import TimeLimitError, free_port
from benchmarks.recovery import LIMIT, Case
from benchmarks.recovery_job import C10D, CRASHED, HOST, LAST_CALL, MAX_RESTARTS, OURS, PROCESSES, SURVIVING, WARM, Job
from benchmarks.report import Progress, Table
from benchmarks.survive import LEASE_OF_1_S

NVRX, TORCHFT = "NVRx, launcher", "torchft"
TUNED: Final = ", timeouts of 1 s"
PACKAGES: Final = ("nvidia-resiliency-ext", "torchft", "numpy", "psutil")
SHORT: Final = ("--join_timeout_ms=1000", "--heartbeat_timeout_ms=1000")  # of its lighthouse; by default 60 s and 5 s
WORKER: Final = Path(__file__).with_name("peers_worker.py")
REPEAT: Final = 3  # times, for what comes back within seconds
FAULTS: Final = ((CRASHED, "rank 0"), ("kill", "rank 0"), ("kill", "another"), ("freeze", "rank 0"))
CONTENDERS: Final = (SURVIVING, SURVIVING + TUNED, WARM, OURS, TORCHFT, TORCHFT + TUNED, NVRX, C10D)


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
        self.survives = contender != NVRX

    def _open_services(self) -> None:
        """The lighthouse, which each job of torchft needs."""
        if self.survives:
            more = SHORT if TUNED in self.contender else ()
            command = [self._bin / "torchft_lighthouse", f"--bind=127.0.0.1:{self._port}", "--min_replicas=2", *more]
            self._spawn(command, "lighthouse.log")

    def _spawn(self, command: list[Any], log: str) -> Node:
        lighthouse = f"http://127.0.0.1:{self._port}"
        env = {**os.environ, **self._env(), "TORCHFT_LIGHTHOUSE": lighthouse}
        with (self._directory / log).open("wb") as output:
            streams: dict[str, Any] = {"stdout": output, "stderr": output}
            return Node([*map(str, command)], cwd=self._directory, env=env, start_new_session=True, **streams)

    def _start_node(self) -> None:
        number = len(self.nodes)
        launcher = "torch.distributed.run"
        if self.contender == NVRX:
            launcher = "nvidia_resiliency_ext.fault_tolerance.launcher"
        command: list[Any] = [self._bin / "python", "-m", launcher]
        command += ["--rdzv-backend=c10d", f"--max-restarts={MAX_RESTARTS}"]
        if self.contender == NVRX:
            conf = f"is_host={int(number == HOST)},last_call_timeout={LAST_CALL}"
            command += [f"--rdzv-endpoint=127.0.0.1:{self._port}", f"--rdzv-conf={conf}", f"--rdzv-id={self._run_id}"]
            command += ["--local-addr=127.0.0.1", "--nnodes=2:3", PROCESSES, "worker"]
        else:
            timeout = 1 if TUNED in self.contender else 60  # seconds; 60 are its default
            command += ["--rdzv-endpoint=127.0.0.1:0", "--nnodes=1", WORKER, timeout]
        self.nodes.append(self._spawn([*command, self._record, number], f"{number}.log"))


def install(folder: Path) -> str:
    """Install the tools; returns why that failed, or nothing."""
    venv.create(folder, with_pip=True)
    version = str(torch.__version__).partition("+")[0]
    command: list[Any] = [folder / "bin" / "python", "-m", "pip", "install", "-q", f"torch=={version}", *PACKAGES]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    return "" if done.returncode == 0 else "cannot be installed: " + done.stderr.strip().splitlines()[-1]


def measure(case: Case, contender: str, environment: Path) -> float | str:
    """Seconds from a fault to the first step of all survivors, or why there was none."""
    conf: Mapping[str, float] = LEASE_OF_1_S if TUNED in contender else {}
    ours = contender.removesuffix(TUNED)
    is_peer = ours in (NVRX, TORCHFT)
    job = PeerJob(contender, environment) if is_peer else Job(ours, 3, conf)
    with closing(job):
        try:
            job.start()
        except (TimeLimitError, RuntimeError) as e:
            return str(e).splitlines()[0]
        found = job.hurt(case.fault, job.by_role(case.role)).result(LIMIT)
    return found.missing if found.stepped is None else found.stepped


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
        for fault, role in faults:
            case = Case(fault, role)
            for contender in contenders:
                if why and contender.removesuffix(TUNED) in (NVRX, TORCHFT):
                    table.put(case.row, contender, why)
                    continue
                found: list[float | str] = []
                for _ in range(repeat if contender not in (C10D, NVRX) else 1):
                    progress(f"{case.row}: {contender}")
                    found.append(measure(case, contender, Path(made)))
                table.put(case.row, contender, summed_up(found))
    yield table


if __name__ == "__main__":
    sys.exit(report.main(run, "peers", __doc__ or ""))
