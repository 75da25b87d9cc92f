"""A program that reports what tells a new process from a fork, and then ends in one of several ways.

Usage: probe.py FILE [ENDING]. The report goes into FILE, as JSON.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def report() -> dict[str, Any]:
    """What a new process has, and a fork may have otherwise."""
    main: Any = sys.modules["__main__"]
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr")}
    attributes = ("name", "mode", "encoding", "errors", "newlines", "line_buffering", "write_through", "closed")
    return {
        "main": {
            name: re.sub(" at 0x[0-9a-f]+", "", str(value)) for name, value in vars(main).items() if name[:2] == "__"
        },
        "own globals": main.report is report,
        "loader": str(type(main.__loader__)),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path": sys.path,
        "flags": str(sys.flags),
        "executable": sys.executable,
        "name": Path("/proc/self/comm").read_text(),
        "environment": dict(os.environ),
        "cwd": str(Path.cwd()),
        "files": {fd.name: str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.exists()},
        "streams": {name: [getattr(stream, a) for a in attributes] for name, stream in streams.items()},
        "originals": [getattr(sys, f"__{name}__") is stream for name, stream in streams.items()],
        "signals": {name: status[name] for name in ("SigBlk", "SigIgn", "SigCgt")},
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "umask": status["Umask"],
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "parent": os.getppid(),
        "main thread": threading.current_thread() is threading.main_thread(),
        "native id": threading.get_native_id() == os.getpid(),
        "threads": status["Threads"],
        "limits": [resource.getrlimit(number) for number in range(16)],
        "nice": os.nice(0),
        "cores": sorted(os.sched_getaffinity(0)),
        "faulthandler": faulthandler.is_enabled(),
        "gc": [gc.isenabled(), gc.get_threshold()],
        "warnings": str(warnings.filters),
        "hooks": [sys.excepthook is sys.__excepthook__, sys.gettrace() is None, len(sys.meta_path)],
        "customized": str(sys.modules.get("sitecustomize")),
        "process": [multiprocessing.current_process().name, multiprocessing.parent_process()],
    }


def fail() -> None:
    raise ValueError("told to")


def double(number: int) -> int:
    return 2 * number


def spawn() -> None:
    """Call a function of this module in a child: it has to find the main module."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sys.stdout.write(f"{pool.map(double, [1, 2])}\n")


def leave_late() -> None:
    atexit.register(lambda: sys.stdout.write("at exit\n"))
    sys.stdout.write("no line end; ")


ENDINGS: dict[str, Callable[[], object]] = {
    "": lambda: None,
    "exit 3": lambda: sys.exit(3),
    "exit with a text": lambda: sys.exit("enough"),
    "exit with nothing": lambda: sys.exit(None),
    "exception": fail,
    "keyboard interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "at once": lambda: os._exit(5),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "broken pipe": lambda: os.kill(os.getpid(), signal.SIGPIPE),
    "segmentation fault": lambda: ctypes.string_at(0),
    "late": leave_late,
    "spawn": spawn,
}

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(report()))
    ENDINGS["".join(sys.argv[2:3])]()
