"""A worker that misbehaves as the environment variable UNRULY says.

Usage: unruly.py DIRECTORY. Files there: `NODE-started`, once it runs; `finish` ends those that wait for it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINE = 1024  # bytes, with its end; Python writes whole lines, so that torch never copies part of one
FLOOD = 100_000 * LINE  # bytes


def say(directory: Path, name: str, value: Any) -> None:
    """Publish a value in a file, which appears only once it is whole."""
    draft = directory / f".{name}-{os.getpid()}"  # all workers of a node write NODE-started
    draft.write_text(str(value))
    draft.rename(directory / name)


def wait(directory: Path) -> None:
    while not (directory / "finish").exists():
        time.sleep(0.05)


def fail_at_the_end(directory: Path) -> None:
    wait(directory)
    sys.exit(5)


def end_first(directory: Path) -> None:
    """Rank 0 ends; the others wait."""
    if os.environ["RANK"] != "0":
        wait(directory)


def end_but_rank_0(directory: Path) -> None:
    """Rank 0 waits; the others end."""
    if os.environ["RANK"] == "0":
        wait(directory)


def ignore_sigterm(directory: Path) -> None:
    signal.signal(signal.SIGTERM, lambda *_: say(directory, "ignored", os.getpid()))
    wait(directory)


def leave_daemon(directory: Path) -> None:
    """Leave an orphan in its own session that ignores SIGTERM; the worker waits."""
    if (between := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            say(directory, "daemon", os.getpid())
            time.sleep(600)
        os._exit(0)
    os.waitpid(between, 0)  # else it may be left, too
    wait(directory)


def leave_upload(directory: Path) -> None:
    """Leave a process in its own session that ends by itself a second after the worker."""
    worker = os.getpid()
    if os.fork() == 0:
        os.setsid()
        while os.getppid() == worker:
            time.sleep(0.01)
        time.sleep(1)
        say(directory, "uploaded", os.getpid())
        os._exit(0)


def leave_sleeper(directory: Path) -> None:
    """Leave a process in its own session that does not end by itself."""
    if os.fork() == 0:
        os.setsid()
        say(directory, "sleeper", os.getpid())
        time.sleep(600)
        os._exit(0)
    while not (directory / "sleeper").exists():
        time.sleep(0.01)


def leave_cleaner(directory: Path) -> None:
    """Leave a process in its own session that takes a second to end on SIGTERM; the worker fails."""

    def clean(_signal: int, _frame: object) -> None:
        time.sleep(1)
        say(directory, "cleaned", os.getpid())
        os._exit(0)

    if os.fork() == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, clean)
        say(directory, "cleaner", os.getpid())
        time.sleep(600)
        os._exit(0)
    while not (directory / "cleaner").exists():
        time.sleep(0.01)
    raise RuntimeError("this worker was told to fail")


def flood(_: Path) -> None:
    for i in range(FLOOD // LINE):
        sys.stdout.write(f"{i:0{LINE - 1}}\n")


def close_output(directory: Path) -> None:
    for fd in (1, 2):
        os.close(fd)
    wait(directory)


def take_all_memory(_: Path) -> None:
    kept = []
    while True:
        kept.append(bytearray(b"x" * (1 << 20)))


def hang_in_kernel(directory: Path) -> None:
    """Hang in uninterruptible sleep, as with a dead disk or GPU: so does the parent of a vfork until its child ends."""
    libc = ctypes.CDLL(None)
    say(directory, "hangs", os.getpid())
    if libc.vfork() == 0:
        libc.pause()  # the child shares its parent's memory, and must never return


def tear_error(directory: Path) -> None:
    """In the first round, write half an error file; then rank 0 exits, and the others wait."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text('{"mess')
        say(directory, f"torn-{os.environ['RANK']}", os.getpid())
        if os.environ["RANK"] == "0":
            while not (directory / "torn-1").exists():
                time.sleep(0.01)
            sys.exit(5)
        time.sleep(600)


ACTIONS: dict[str, Callable[[Path], None]] = {
    action.__name__: action
    for action in (
        *(wait, fail_at_the_end, end_first, end_but_rank_0, ignore_sigterm, flood, close_output, take_all_memory),
        *(leave_daemon, leave_upload, leave_sleeper, leave_cleaner, hang_in_kernel, tear_error),
    )
}


if __name__ == "__main__":
    place = Path(sys.argv[1])
    say(place, f"{os.environ.get('TEST_NODE', 'a')}-started", os.getpid())
    ACTIONS[os.environ["UNRULY"]](place)
