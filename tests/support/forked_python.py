"""Stands in for Python where xdist starts a process: `python -c CODE` becomes a fork of one that has imported torch."""

from __future__ import annotations

import contextlib
import os
import select
import shlex
import signal
import sys
from pathlib import Path
from typing import Final

PYTHON: Final = shlex.join([sys.executable, __file__])  # how it is called


def main() -> int:
    """Fork, and end as the fork does; Ctrl-C is for pytest's main process."""
    from tests.support.launchers import Template

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    *_, option, code = sys.argv
    process = Template().start([sys.executable, option, code], os.environ, [0, 1, 2], Path.cwd())
    with contextlib.suppress(OSError):  # a kernel without pidfd, where `wait` polls
        select.select([os.pidfd_open(process.pid)], [], [])
    if status := process.wait():
        print(f"A process of pytest has ended with {status}", file=sys.stderr)  # noqa: T201
    return status


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    sys.exit(main())
