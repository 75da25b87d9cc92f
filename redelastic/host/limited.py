"""Processes that must answer within a time limit, and are gone after it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import Mapping
from typing import Final, NamedTuple

from redelastic.workers.deaths import signal_name

KILL_TIMEOUT: Final = 2.0  # how long a killed process may take to be gone, in seconds
OUTPUT_KEPT: Final = 65536  # of a process, in bytes

_running: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()  # while this is not held, everything that was started is in `_running`


class Ended(NamedTuple):
    """How a process ended.

    Attributes:
        status: its exit status; below 0 if a signal ended it, None if it ran out of time.
        how: the same in words, to follow "the process".
        lines: the last lines that it printed, without empty ones.
    """

    status: int | None
    how: str
    lines: list[str]


def run_within(timeout: float, argv: tuple[str, ...], environment: Mapping[str, str] | None = None) -> Ended:
    """Run a process for at most ``timeout`` seconds; then kill what is left of its process group.

    Args:
        timeout: in seconds.
        argv: the command.
        environment: to add to this process' own.
    """
    with _starting:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )
        _running.add(process)
    tail = bytearray()
    reader = threading.Thread(target=_keep_tail, args=(process, tail), daemon=True)
    reader.start()
    status: int | None = None
    try:
        status = process.wait(timeout)
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"exited with {status}"
    except subprocess.TimeoutExpired:
        how = f"did not end within {timeout:g} s"
    _kill_group(process)
    try:
        process.wait(KILL_TIMEOUT)
        _running.discard(process)
    except subprocess.TimeoutExpired:
        how += f", and not even SIGKILL ends process {process.pid}, which hangs in the kernel"
    reader.join(KILL_TIMEOUT / 2)  # a daemon in its own session may hold the pipe forever
    return Ended(status, how, [line for line in bytes(tail).decode(errors="replace").splitlines() if line.strip()])


def _keep_tail(process: subprocess.Popen[bytes], tail: bytearray) -> None:
    assert process.stdout is not None  # noqa: S101 - stdout=PIPE
    with process.stdout as pipe:
        while chunk := os.read(pipe.fileno(), 65536):
            tail += chunk
            del tail[:-OUTPUT_KEPT]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@atexit.register
def _kill_running() -> None:
    """Kill the processes that still run when this process exits."""
    _starting.acquire()  # for good: remaining threads start nothing more
    for process in list(_running):
        _kill_group(process)
