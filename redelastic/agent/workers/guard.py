"""The agent's side of its warden: starts it, briefs it, and replaces it when it is gone."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from typing import Final

from redelastic.agent.signal_names import signal_name
from redelastic.redis.endpoint import URL_VARIABLE

from . import warden
from .warden import Process

log = logging.getLogger(__name__)

TOKEN_VARIABLE: Final = "REDELASTIC_AGENT"  # noqa: S105
WITHOUT: Final = "Until one stays up, workers would survive this process if it got SIGKILL."
SETTLED: Final = 60.0  # a warden that ends after this many seconds did not fail at its start
LONGEST_PAUSE: Final = 60.0  # between the end of one that did not settle and the next start, in seconds


class Guard:
    """Keeps a warden for the tree with ``token``, if there is /proc.

    Args:
        token: of the tree.
        last_words: what the warden sends when this process and all workers are gone, as
            :func:`redelastic.redis.last_words.last_words` writes it; asked at each briefing, and empty for "as before".
    """

    def __init__(self, token: str, last_words: Callable[[], bytes]) -> None:
        self._token, self._last_words = token, last_words
        self._warden: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._start_at = 0.0  # on the monotonic clock
        self._pause = 0.0  # before the next start
        self._complaint = ""  # about the last one
        self._told: set[tuple[int, float]] = set()
        self._words = b""
        self._unsent = b""

    @property
    def pid(self) -> int | None:
        """Pid of the warden; None while there is none."""
        return self._warden.pid if self._warden else None

    def brief(self, members: Collection[Process]) -> None:
        """Tell the warden what is new in the tree and the last words; start one if there is none."""
        if self._warden is not None and self._warden.poll() is not None:
            self._bury(self._warden)
        if self._warden is None and warden.HAS_PROC and time.monotonic() >= self._start_at:
            self._warden = self._start()
        if self._warden is None or self._warden.stdin is None:
            return
        living = {(process.pid, process.start) for process in members}
        for pid, start in living - self._told:
            self._unsent += b"%d %d\n" % (pid, start)
        self._told = living
        if (words := self._last_words()) and words != self._words:
            self._unsent += warden.WORDS + b" " + words + b"\n"
            self._words = words
        with contextlib.suppress(BrokenPipeError):  # it is dead: the next briefing finds out why
            while self._unsent and (sent := self._warden.stdin.write(self._unsent)):  # None: the pipe is full
                self._unsent = self._unsent[sent:]

    def close(self) -> None:
        """Dismiss the warden: it no longer does or says anything."""
        if self._warden is not None:
            self._warden.kill()
            self._warden.communicate()
            self._warden = None

    def _start(self) -> subprocess.Popen[bytes] | None:
        secret = (TOKEN_VARIABLE, URL_VARIABLE)
        arguments = [self._token, str(os.getpid()), str(os.getsid(0))]
        try:
            started = subprocess.Popen(
                [sys.executable, "-I", "-S", warden.__file__, *arguments],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                cwd="/",
                env={name: value for name, value in os.environ.items() if name not in secret},
                start_new_session=True,
            )
        except OSError as e:
            self._failed(f"No warden could be started ({e}). {WITHOUT}")
            return None
        self._started = time.monotonic()
        self._told, self._words, self._unsent = set(), b"", b""
        if started.stdin is not None:
            os.set_blocking(started.stdin.fileno(), False)
        return started

    def _bury(self, dead: subprocess.Popen[bytes]) -> None:
        said = dead.communicate()[1].decode(errors="replace").strip()[-1000:]
        self._warden = None
        if time.monotonic() - self._started >= SETTLED:
            self._pause, self._complaint = 0.0, ""
        status = dead.returncode
        how = f"exited with {status}" if status >= 0 else f"was ended by {signal_name(-status)}"
        self._failed(f"The warden of the workers' processes {how}. {WITHOUT}" + (f"\n{said}" if said else ""))

    def _failed(self, complaint: str) -> None:
        """Log it, but the same complaint only once, and wait longer and longer before the next start."""
        if complaint != self._complaint:
            log.warning("%s", complaint)
        self._complaint = complaint
        self._start_at = time.monotonic() + self._pause
        self._pause = min(max(1.0, 2 * self._pause), LONGEST_PAUSE)
