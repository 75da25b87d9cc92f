"""What the benchmarks share: nodes as threads of a few processes under a time limit, and the provenance of figures."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import platform
import queue
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import redis

PROCESSES = 4
# Measurements run in processes forked from one that has already made the slowest imports.
CONTEXT: Final = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch.distributed.elastic.rendezvous.registry", "redelastic.rendezvous.handler"])
# Seconds after which a thread yields the GIL to waiting threads; it yields anyway when it blocks. By default
# they ask for it every 5 ms: with 1,024 nodes, that alone takes half of the CPU.
TURN = 0.1
# TCPStore looks up the name of its peer, even on this host: a lost answer would cost 5 s.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # clients whose server ends first log at length

# Results: a number and its unit, "s", "B", "%" or none.
Figures = dict[str, tuple[float, str]]
SLOW_US = 500  # scripts that take at least this long are examined
# Given (shared options, this node's number), prepares the node and returns what to time (it may return a Timing
# of its own) and what ends the node.
Prepare = Callable[[dict[str, Any], int], tuple[Callable[[], object], Callable[[], object]]]


@dataclass(frozen=True)
class Timing:
    """When a node began and ended, in seconds on the machine's monotonic clock."""

    began: float
    ended: float


class TimeLimitError(Exception):
    """The nodes did not finish within the limit."""


def run_nodes(
    prepare: Prepare,
    rounds: list[dict[str, Any]],
    nodes: int,
    limit: float,
    meanwhile: Callable[[], object] = lambda: None,
    *,
    processes: int = PROCESSES,
    as_many_as_fit: bool = False,
) -> list[list[Timing]]:
    """Run ``nodes`` nodes at once, several times over in the same processes, and time each.

    Args:
        prepare: makes a node in another process, so it must be importable by name; node 0 comes before the others.
        rounds: options for ``prepare``, one per round.
        nodes: how many.
        limit: seconds for everything; after it, all processes are killed.
        meanwhile: called here once all nodes of a round are timed, before any of them ends.
        processes: how many at most; the nodes are threads of them.
        as_many_as_fit: leave out rounds for which no time is left, assuming they take as long as the last one.

    Raises:
        TimeLimitError: the limit was reached.
        RuntimeError: a node failed.
    """
    n_processes = min(processes, nodes)
    results: Any = CONTEXT.Queue()
    step: Any = CONTEXT.Barrier(n_processes)
    timed: Any = CONTEXT.Barrier(n_processes + 1)  # this process among them
    started: list[BaseProcess] = [
        CONTEXT.Process(
            target=_run_share, args=(prepare, rounds, range(i, nodes, n_processes), (step, timed), results), daemon=True
        )
        for i in range(n_processes)
    ]
    deadline = time.monotonic() + limit
    timings: list[list[Timing]] = []
    with _killed_at_the_end(started):
        for process in started:
            process.start()
        for _ in rounds:
            began = time.monotonic()
            timings.append([])
            for _ in started:
                timings[-1] += [Timing(*pair) for pair in _result(results, deadline, limit)]
            meanwhile()
            if as_many_as_fit and 2 * time.monotonic() - began > deadline:
                return timings
            timed.wait(max(0.1, deadline - time.monotonic()))
        for process in started:
            process.join(max(0.1, deadline - time.monotonic()))
    return timings


def run_alone(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], limit: float) -> dict[str, Any]:
    """Run a function in a process of its own, and return its result; raises as :func:`run_nodes` does."""
    results: Any = CONTEXT.Queue()
    process = CONTEXT.Process(target=_run_one, args=(function, arguments, results), daemon=True)
    deadline = time.monotonic() + limit
    with _killed_at_the_end([process]):
        process.start()
        found: dict[str, Any] = _result(results, deadline, limit)
    return found


def _result(results: Any, deadline: float, limit: float) -> Any:
    try:
        found = results.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        raise TimeLimitError(f"not within {limit:g} s") from None
    if isinstance(found, str):
        raise RuntimeError(found)  # noqa: TRY004
    return found


@contextlib.contextmanager
def _killed_at_the_end(processes: list[BaseProcess]) -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # each process leads its own group once it has started
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
            if process.pid is not None:
                process.join()


def _lead_group() -> None:
    """Lead a process group that is killed when the parent of this process ends, however it ends."""
    os.setpgid(0, 0)
    starter = multiprocessing.parent_process()
    assert starter is not None

    def end_with_it() -> None:
        starter.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_it, daemon=True).start()


def _run_one(function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...], results: Any) -> None:
    _lead_group()
    try:
        results.put(function(*arguments))
    except Exception as e:  # noqa: BLE001  # the parent decides
        results.put(f"{type(e).__name__}: {e}")


def _run_share(
    prepare: Prepare, rounds: list[dict[str, Any]], share: range, barriers: tuple[Any, Any], results: Any
) -> None:
    """Run one process: prepare its nodes, wait for all processes, and time each node in a thread."""
    _lead_group()
    logging.disable(logging.WARNING)
    sys.setswitchinterval(TURN)
    step, timed = barriers
    try:
        for options in rounds:
            nodes = [prepare(options, 0)] if share[0] == 0 else []
            step.wait()
            nodes += [prepare(options, number) for number in share if number != 0]
            step.wait()
            results.put(_time_all([node for node, _ in nodes]))
            timed.wait()
            for _, end in nodes:
                end()
    except Exception as e:  # noqa: BLE001  # the parent decides
        results.put(f"{type(e).__name__}: {e}")


def _time_all(nodes: list[Callable[[], object]]) -> list[tuple[float, float]]:
    timings: list[tuple[float, float]] = []
    gate = threading.Barrier(len(nodes) + 1)

    def run(one: Callable[[], object]) -> None:
        gate.wait()
        began = time.monotonic()
        own = one()
        timings.append((own.began, own.ended) if isinstance(own, Timing) else (began, time.monotonic()))

    threads = [threading.Thread(target=run, args=(one,), daemon=True) for one in nodes]
    for thread in threads:
        thread.start()
    gate.wait()
    for thread in threads:
        thread.join()
    if len(timings) < len(nodes):
        raise RuntimeError(f"{len(nodes) - len(timings)} nodes failed; see the output above")
    return timings


@contextlib.contextmanager
def etcd_server() -> Iterator[tuple[str, int] | None]:
    """Torch's own private etcd with the API v2, as its endpoint and pid; None if etcd is not installed.

    Its data is in memory if the system offers that.
    """
    try:
        import etcd  # noqa: F401, PLC0415
        from torch.distributed.elastic.rendezvous.etcd_server import EtcdServer  # noqa: PLC0415
    except ImportError:
        yield None
        return
    if not shutil.which("etcd"):
        yield None
        return
    memory = Path("/dev/shm")  # noqa: S108
    with tempfile.TemporaryDirectory(prefix="redelastic-bench-", dir=memory if memory.is_dir() else None) as folder:
        server = EtcdServer(folder)
        try:
            server.start(stderr=subprocess.DEVNULL)
            yield server.get_endpoint(), server._get_etcd_server_process().pid  # noqa: SLF001
        finally:
            server.stop()


def free_port() -> int:
    """A port for c10d's store, which cannot choose one itself: every node has to know it before."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def raise_limit_of_files() -> None:
    """Raise this process' limit of open files to the hard limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def peak_memory(*, reset: bool = False) -> int:
    """This process' peak memory since the last reset, in bytes."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return 1024 * int(found.group(1)) if found else 0


class Watch:
    """What a server reports: its memory, and how long it was blocked."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        client.config_set("slowlog-log-slower-than", SLOW_US)
        client.config_set("slowlog-max-len", 10_000)
        client.config_set("latency-monitor-threshold", 1)
        self.base = self.memory()

    def memory(self) -> int:
        """Bytes in use."""
        return int(self.client.info("memory")["used_memory"])

    def grown(self) -> int:
        """Bytes in use beyond those at the start."""
        return self.memory() - self.base

    def cpu(self) -> float:
        """Seconds of CPU that it has used."""
        info = self.client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"])

    def longest(self) -> float:
        """How long the longest command since the last call took, in seconds; those below 0.5 ms count as 0."""
        slow = self.client.slowlog_get(10_000)
        self.client.slowlog_reset()
        return max((entry["duration"] for entry in slow), default=0) / 1e6

    def until_empty(self, timeout: float) -> Figures:
        """Wait until no key is left, and measure what remains."""
        self.client.latency_reset()
        began = time.monotonic()
        while self.client.dbsize():
            if time.monotonic() - began > timeout:
                raise RuntimeError(f"{self.client.dbsize()} keys are still there after {timeout:g} s")
            time.sleep(0.05)
        gone = time.monotonic() - began
        while self.client.info("memory")["lazyfree_pending_objects"] and time.monotonic() - began <= timeout:
            time.sleep(0.05)  # their memory is freed in the background
        latest: Any = self.client.latency_latest()
        events = {name: longest / 1000 for name, _, _, longest, *_ in latest}
        return {
            "keys gone after": (gone, "s"),
            "longest removal of what has expired": (
                max(events.get(b"expire-cycle", 0), events.get(b"expire-del", 0)),
                "s",
            ),
            "memory that Redis keeps afterwards": (self.grown(), "B"),
            "connections afterwards": (self.client.info("clients")["connected_clients"] - 1, ""),
        }


def redis_version() -> str:
    """The version of what :class:`redelastic.redis.server.RedisServer` starts."""
    from redelastic.redis.server import find_binary  # noqa: PLC0415

    said = subprocess.run([find_binary(), "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"v=(\S+)", said)
    return found.group(1) if found else "?"


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
        "redis": redis_version(),
        "redis-py": redis.__version__,
        "commit": described.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }
