"""Processes that have imported torch, for a function each: the members of process groups."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import torch
import torch.distributed as dist

from redelastic import register_init_method

# The last ones, which take 2 s, would be imported by each process: by its first optimizer, or with the test's module.
PREPARED: Final = ("torch.distributed", "torch.nn.parallel", "torch._dynamo", "pytest", "hypothesis")
LIMIT: Final = 90.0  # for a process to do its part, in seconds


@dataclass
class Outcome:
    """What became of a process: what its function returned or raised, and after how many seconds."""

    value: Any = None
    error: str = ""
    seconds: float = 0.0


def _child(pipe: Pipe, environment: dict[str, str], function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | environment)
    torch.set_num_threads(1)
    register_init_method()
    started = time.monotonic()
    try:
        outcome = Outcome(value=function(*arguments))
    except Exception as e:  # noqa: BLE001
        outcome = Outcome(error=f"{type(e).__name__}: {e}")
    outcome.seconds = time.monotonic() - started
    pipe.send(outcome)
    pipe.recv()  # the others may still need this process
    if dist.is_initialized():
        dist.destroy_process_group()
    atexit._run_exitfuncs()  # as at the end of a program; multiprocessing leaves it out


class Processes:
    """Starts processes that have imported torch and no more; those that have not ended at the end are killed."""

    def __init__(self) -> None:
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PREPARED])
        self._made: list[tuple[Any, Any]] = []

    def start(self, function: Callable[..., Any], *arguments: Any, **environment: str) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_child, args=(theirs, environment, function, arguments))
        process.start()
        theirs.close()
        self._made.append((process, ours))

    def results(self) -> list[Outcome]:
        """Wait for all, let them end, and forget them; a process that was killed has "killed" for an error."""
        outcomes = []
        for _, pipe in self._made:
            assert pipe.poll(LIMIT), "a process hangs"
            try:
                outcomes.append(pipe.recv())
            except EOFError:
                outcomes.append(Outcome(error="killed"))
        for process, pipe in self._made:
            # It may have been killed, though the forkserver may not know yet.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                pipe.send("end")
            process.join(LIMIT)
            assert process.exitcode in (0, -signal.SIGKILL)
        self._made.clear()
        return outcomes

    def values(self) -> list[Any]:
        outcomes = self.results()
        assert [outcome.error for outcome in outcomes] == [""] * len(outcomes)
        return [outcome.value for outcome in outcomes]

    def kill(self) -> None:
        for process, _ in self._made:
            process.kill()
            process.join()
