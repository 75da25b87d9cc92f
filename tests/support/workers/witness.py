"""A worker that reports how it was started, and then does an action.

Usage: witness.py DIRECTORY [ACTION [ARGUMENT]]. Each rank writes DIRECTORY/RANK-ATTEMPT.json in each attempt.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def report() -> dict[str, Any]:
    """What a script sees of how it was started."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "name": __name__,
        "cwd": str(Path.cwd()),
        "stdin": str(Path("/proc/self/fd/0").readlink()),
        "files": sorted(fd.name for fd in Path("/proc/self/fd").iterdir() if fd.exists()),
        "signals": {name: status[name].strip() for name in ("SigBlk", "SigIgn")},
        "catches": [s.name for s in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD) if callable(signal.getsignal(s))],
        "leads": {"session": os.getsid(0) == os.getpid(), "group": os.getpgrp() == os.getpid()},
        "umask": status["Umask"].strip(),
    }


def say(directory: Path, what: str, value: Any = None) -> None:
    """Publish a value in a file, which appears only once it is whole."""
    name = f"{os.environ['RANK']}-{os.environ['TORCHELASTIC_RESTART_COUNT']}{what}.json"
    (directory / f".{name}").write_text(json.dumps(value))
    (directory / f".{name}").rename(directory / name)


def fail(kind: str) -> None:
    raise RuntimeError(f"the worker was told to {kind}")


def wait_for_ever() -> None:
    while True:
        time.sleep(60)


def print_lines(rank: int, count: int) -> None:
    for i in range(count):
        sys.stdout.write(f"line {i} of rank {rank} on stdout\n")
        sys.stderr.write(f"line {i} of rank {rank} on stderr\n")


def record_failure() -> None:
    from torch.distributed.elastic.multiprocessing.errors import record

    record(fail)("record")


def die(name: str) -> None:
    signal.signal(signal.Signals[name], signal.SIG_DFL)
    os.kill(os.getpid(), signal.Signals[name])


def overstay(directory: Path) -> None:
    """Let a timer of torch expire; the agent ends the worker then."""
    from torch.distributed.elastic import timer

    timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
    with timer.expires(after=0.5):
        say(directory, "-overstays")
        wait_for_ever()


def wait(directory: Path, deaf_to: str) -> None:
    """Wait for ever; a signal of this name is only reported."""
    signal.signal(signal.Signals[deaf_to], lambda number, _: say(directory, f"-{signal.Signals(number).name}"))
    say(directory, "-waits")
    wait_for_ever()


def exit_beside_a_deaf_rank(directory: Path, rank: int) -> None:
    """Rank 0 ignores SIGTERM; the others exit with 1."""
    if rank == 0:
        wait(directory, "SIGTERM")
    while not (directory / "0-0-waits.json").exists():
        time.sleep(0.02)
    sys.exit(1)


def act(directory: Path, action: str, argument: str) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    actions: dict[str, Callable[[], None]] = {
        "print": lambda: print_lines(rank, int(argument)),
        "timer": lambda: overstay(directory),
        "wait": lambda: wait(directory, argument),
        "deaf": lambda: exit_beside_a_deaf_rank(directory, rank),
    }
    if rank == 1:
        actions |= {"raise": lambda: fail("raise"), "record": record_failure}
        actions |= {"exit": lambda: sys.exit(int(argument)), "die": lambda: die(argument)}
    if attempt == 0:
        actions["fail-once"] = lambda: sys.exit(1)
    if action in actions:
        actions[action]()


def main(directory: Path, action: str = "", argument: str = "-") -> None:
    say(directory, "", report())
    act(directory, action, argument)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:4])
