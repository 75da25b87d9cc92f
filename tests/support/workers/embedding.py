"""A program that embeds the agent: it runs one agent after the other, and prints the result of each.

Usage: embedding.py URL RUNS. RUNS is a JSON list of keyword arguments of `run`. Each result is a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic.agent import AgentOptions, RedisElasticAgent
from redelastic.rendezvous.handler import handler_from_parameters

NAMES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")


def report(*words: str) -> dict[str, Any]:
    """What a worker returns: its ranks and sizes, its arguments, its role, and the signals that it handles."""
    caught = [s.name for s in (signal.SIGTERM, signal.SIGUSR1) if callable(signal.getsignal(s))]
    return {name: int(os.environ[name]) for name in NAMES} | {
        "words": words,
        "role": os.environ["ROLE_NAME"],
        "catches": caught,
    }


def fail(*words: str) -> None:
    raise ValueError(f"{' '.join(words)} are no good")


def fail_beside_a_waiting_rank(*_: str) -> None:
    """Rank 1 fails while rank 0 waits for SIGTERM."""
    if os.environ["RANK"] == "0":
        time.sleep(600)
    fail("lazy workers")


def leftovers() -> dict[str, Any]:
    """What agents may leave in this process: threads, files, children and signal handlers.

    Garbage is collected before, and threads of redelastic have had time to end.
    """
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("redelastic"):
            thread.join(20)
    gc.collect()
    files = [str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    return {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "files": sorted(name.split("[")[0] for name in files if not name.startswith("/proc/")),
        "children": sorted(process.name() for process in psutil.Process().children(recursive=True)),
        "handlers": [repr(signal.getsignal(s)) for s in (signal.SIGTERM, signal.SIGUSR1)],
    }


def run(
    url: str,
    *,
    run_id: str,
    entrypoint: str,
    args: tuple[str, ...] = (),
    nodes: int = 1,
    workers: int = 1,
    role: str = "trainer",
    topology: str = "",
    start_method: str = "spawn",
    max_restarts: int = 0,
    unfit: bool = False,
    times: int = 1,
) -> dict[str, Any]:
    """Make one agent, and run it so many times."""
    rendezvous: dict[str, Any] = {
        "keep_alive_interval": 0.4,
        "keep_alive_max_attempt": 50,
        "last_call_timeout": 60,
        "join_timeout": 60,
        "topology": topology,
    }
    handler = handler_from_parameters(RendezvousParameters("redis", url, run_id, nodes, nodes, **rendezvous))
    spec = WorkerSpec(
        role=role,
        local_world_size=workers,
        entrypoint=globals().get(entrypoint, entrypoint),
        args=tuple(args),
        rdzv_handler=handler,
        max_restarts=max_restarts,
        monitor_interval=0.05,
    )
    options = AgentOptions(health_command="echo no hands; exit 1" if unfit else None)
    agent = RedisElasticAgent(spec, DefaultLogsSpecs(), start_method, shutdown_timeout=20, options=options)
    result: dict[str, Any] = {}
    began = time.monotonic()
    try:
        for _ in range(times):
            ended = agent.run()
            result |= {
                "state": ended.state.name,
                "values": ended.return_values,
                "failures": {rank: [f.exitcode, f.message] for rank, f in ended.failures.items()},
                "epoch": os.environ["REDELASTIC_EPOCH"],
            }
    except RendezvousError as e:
        result["error"] = f"{type(e).__name__}: {e}"
    finally:
        handler.shutdown()
    return result | {"seconds": time.monotonic() - began}


def main(url: str, runs: list[dict[str, Any]]) -> None:
    with subprocess.Popen(["sleep", "600"]) as own:  # which agents must leave alone
        for one in runs:
            result = run(url, **one) | {"left": leftovers(), "own child lives": own.poll() is None}
            sys.stdout.write(f"{json.dumps(result)}\n")
            sys.stdout.flush()
        own.kill()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
