"""How workers end: when, as the kernel reports it at once; by which exception; and whether because of a peer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

# Read the status, and leave it to the code that waits for the worker.
EXITED = os.WEXITED | os.WNOWAIT if hasattr(os, "WNOWAIT") else 0
# By how much a file's time of change may lag behind the clock, in seconds: before 6.13, Linux counts it in ticks.
_TICK: Final = 0.02
# How gloo, NCCL, torch's stores and its process groups report that another process is gone or silent.
_PEER: Final = re.compile(
    r"connection (?:was )?(?:closed|aborted) by (?:remote )?peer|connection (?:reset|refused)|broken pipe|"
    r"remote process exited|ncclRemoteError|timed out (?:waiting|after)|gloo/transport|DistNetworkError|"
    r"DistStoreError|ConnectionError|watchdog caught collective operation timeout|RoundBrokenError",
    re.IGNORECASE,
)
# What Python prints last, perhaps after torch's "[rank1]: "; and what C++ does.
_EXCEPTION: Final = re.compile(
    r"^(?:\[rank(\d+)\]: ?)?((?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout)\b.*)$|"
    r"^ *(what\(\):.*)$",
    re.MULTILINE,
)


class Deaths:
    """Watches the workers of one group; if the kernel has no pidfd (Linux before 5.3), it finds an end only when asked.

    Args:
        pids: of the workers, children of this process, by local rank.
        notify: called after each end, from a thread.

    Attributes:
        sees_all: whether it sees every worker's end.
    """

    def __init__(self, pids: Mapping[int, int], notify: Callable[[], None]) -> None:
        self._notify = notify
        self._ended: dict[int, tuple[float, bool]] = {}  # when, on the monotonic clock; whether it failed
        self._poll = select.poll()
        self._ranks: dict[int, int] = {}
        self._pids = pids
        for local_rank, pid in pids.items():
            with contextlib.suppress(AttributeError, OSError):
                fd = os.pidfd_open(pid)
                self._ranks[fd] = local_rank
                self._poll.register(fd, select.POLLIN)
        self.sees_all = len(self._ranks) == len(pids)
        threading.Thread(target=self._watch, name="redelastic-deaths", daemon=True).start()

    def ended(self, local_rank: int) -> bool:
        """Whether a worker has ended."""
        return local_rank in self._ended or (not self.sees_all and _has_ended(self._pids[local_rank]))

    @property
    def failed(self) -> dict[int, float]:
        """When workers ended by a signal or with a status other than 0: on the monotonic clock, by local rank."""
        return {local_rank: at for local_rank, (at, failed) in list(self._ended.items()) if failed}

    def _watch(self) -> None:
        while self._ranks:
            for fd, _ in self._poll.poll():
                now, failed = time.monotonic(), False
                with contextlib.suppress(OSError, AttributeError):  # already waited for, or Linux 5.3
                    status = os.waitid(os.P_PIDFD, fd, EXITED)
                    failed = status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0)
                self._poll.unregister(fd)
                self._ended[self._ranks.pop(fd)] = now, failed
                os.close(fd)
            self._notify()


def _has_ended(child: int) -> bool:
    try:
        return os.waitid(os.P_PID, child, EXITED | os.WNOHANG) is not None
    except ChildProcessError:  # it has been waited for already
        return True


def signal_name(number: int) -> str:
    """The name of a signal, such as SIGKILL or SIGRTMIN+5; Python has none for most real-time signals."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if number > signal.SIGRTMIN else f"signal {number}"


# -- last words: the exception that ended a worker


def names_a_peer(words: str) -> bool:
    """Whether an exception, as its class and message, says that a peer is gone: then the cause lies with that one."""
    return _PEER.search(words) is not None


def last_exception(log: str, rank: int | None = None) -> str:
    """The last line of a log that names an exception, from Python or C++; empty if none does.

    Args:
        log: its text.
        rank: of the worker; lines of other ranks, which torch begins with theirs, are passed over.
    """
    for of_rank, python, cpp in reversed(_EXCEPTION.findall(log)):
        if rank is None or of_rank in {"", str(rank)}:
            return str(python or cpp)
    return ""


class Error(NamedTuple):
    """What a worker has written to the file that torch names it for that.

    Attributes:
        message: the exception's class and message.
        at: when it was raised, in seconds since 1970 on the worker's host.
    """

    message: str
    at: float


def error_in(path: str) -> Error | None:
    """Read an error file; None if there is none, or it is not whole: torch could not read it either."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            changed, content = os.fstat(file.fileno()).st_mtime, json.load(file)
        message: Any = content["message"]
        if isinstance(message, str):
            second = int(content.get("timestamp", changed))
        else:
            second, message = int(message["extraInfo"]["timestamp"]), message.get("message", "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    # The file has full seconds only. It is written at once, unless the disk is slow or has a clock of its own.
    at = max(second, changed) if second - _TICK <= changed < second + 1 else second + 1
    return Error(str(message), at)
