"""Processes that each run one function: the members of process groups, forked after torch was imported."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Final

import torch
import torch.distributed as dist

from redelastic import register_init_method
from tests.support import launchers

LIMIT: Final = 90.0  # for a process to do its part, in seconds


@dataclass
class Outcome:
    """What a process's function returned or raised, and after how many seconds."""

    value: Any = None
    error: str = ""
    seconds: float = 0.0


def main() -> None:
    """Run the function that comes through stdin, a pipe to the process that started this one."""
    pipe: Pipe[Any, Any] = Pipe(os.dup(0))
    sys.path[:] = pipe.recv()
    environment, function, arguments = pipe.recv()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo"} | environment)
    torch.set_num_threads(1)
    register_init_method()
    started = time.monotonic()
    faulthandler.dump_traceback_later(0.9 * LIMIT)  # where it hangs
    try:
        value, error = function(*arguments), ""
    except Exception as e:  # noqa: BLE001
        value, error = None, f"{type(e).__name__}: {e}"
    faulthandler.cancel_dump_traceback_later()
    pipe.send((value, error, time.monotonic() - started))
    pipe.recv()  # the others may still need this process
    if dist.is_initialized():
        dist.destroy_process_group()


class Processes:
    """Starts processes that have imported torch, and collects their outcomes."""

    def __init__(self) -> None:
        self._made: list[tuple[launchers.Launcher, Pipe[Any, Any]]] = []

    def start(self, function: Callable[..., Any], *arguments: Any, **environment: str) -> None:
        """Start a process that calls a function, with more environment variables."""
        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", __name__]
        with theirs:
            streams = [theirs.fileno(), 1, 2]
            process = launchers.template().start(command, os.environ, streams, launchers.ROOT)
        ours.send(sys.path)
        ours.send((environment, function, arguments))
        self._made.append((process, ours))

    def results(self) -> list[Outcome]:
        """Wait for all functions, let all processes end, and forget them; the error of a killed one is "killed"."""
        outcomes = []
        for _, pipe in self._made:
            assert pipe.poll(LIMIT), "a process hangs"
            try:
                outcomes.append(Outcome(*pipe.recv()))
            except EOFError:
                outcomes.append(Outcome(error="killed"))
        for process, pipe in self._made:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have been killed
                pipe.send("end")
            assert process.wait(LIMIT) in (0, -signal.SIGKILL)
        self._made.clear()
        return outcomes

    def values(self) -> list[Any]:
        """Like :meth:`results`; checks that no function raised, and returns the values."""
        outcomes = self.results()
        errors = [outcome.error for outcome in outcomes]
        assert not any(errors), errors
        return [outcome.value for outcome in outcomes]

    def kill(self) -> None:
        """Kill the processes whose results nobody has asked for."""
        for process, _ in self._made:
            process.kill()
            process.wait(LIMIT)


if __name__ == "__main__":
    main()
