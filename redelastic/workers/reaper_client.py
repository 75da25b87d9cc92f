"""ReaperClient: starts the agent's reaper, keeps it informed, and replaces it when it is gone."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from typing import Final

from redelastic.redis.endpoint import URL_VARIABLE
from redelastic.workers.deaths import signal_name

from . import reaper
from .board import nameless_file
from .reaper import Process

log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "REDELASTIC_AGENT"  # noqa: S105
RESTART_INTERVAL: Final = 10.0  # between the starts of two reapers, in seconds: one may fail at its start


class ReaperClient:
    """Keeps a reaper for the tree with ``token``.

    Args:
        token: of the tree.
        clock: monotonic, in seconds.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._token, self._clock = token, clock
        self._reaper: subprocess.Popen[bytes] | None = None
        self._briefing = nameless_file()
        self._start_at: float | None = clock()  # None: never again
        self._complaint = ""  # about the last one

    @property
    def pid(self) -> int | None:
        """Pid of the reaper; None while there is none."""
        return self._reaper.pid if self._reaper else None

    def brief(self, members: Iterable[Process]) -> None:
        """Write down the tree for the reaper; start one if there is none."""
        if self._start_at is None:
            return
        content = f"{self._token}\n".encode() + b"".join(reaper.RECORD.pack(*process.identity) for process in members)
        os.pwrite(self._briefing.fileno(), content, 0)
        self._briefing.truncate(len(content))  # only now: if this process is killed in between, too much is written
        if self._reaper is not None and self._reaper.poll() is not None:
            self._report_end(self._reaper)
        if self._reaper is None and self._clock() >= self._start_at:
            self._start()

    def close(self) -> None:
        """End the reaper; the tree lives on."""
        self._start_at = None
        self._briefing.close()
        if self._reaper is not None:
            self._reaper.kill()
            self._reaper.communicate()
            self._reaper = None

    def _start(self) -> None:
        self._start_at = self._clock() + RESTART_INTERVAL
        secret = (TOKEN_VARIABLE, URL_VARIABLE)
        try:
            self._reaper = subprocess.Popen(
                [sys.executable, "-I", "-S", reaper.__file__, str(os.getpid()), str(os.getsid(0))],
                stdin=self._briefing,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in secret},
                start_new_session=True,
            )
        except OSError as e:
            self._complain(f"No reaper could be started ({e}).")

    def _report_end(self, dead: subprocess.Popen[bytes]) -> None:
        self._reaper = None
        output = dead.communicate()[1].decode(errors="replace").strip()[-1000:]
        status = dead.returncode
        how = f"exited with {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
        if self._start_at is not None and self._clock() >= self._start_at:
            self._complaint = ""  # it did not fail at its start
        self._complain(f"The reaper of the workers' processes {how}.", output)

    def _complain(self, complaint: str, output: str = "") -> None:
        """Log a complaint, unless the last reaper failed the same way."""
        if complaint != self._complaint:
            without = "Until one stays up, workers would survive this process if it got SIGKILL."
            log.warning("%s", f"{complaint} {without}\n{output}".rstrip())
        self._complaint = complaint
