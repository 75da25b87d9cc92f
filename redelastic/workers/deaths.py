"""Deaths: when each worker ended, as the kernel reports it: the agent checks at once, and knows who failed first."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Mapping

# Read the status, and leave it to the code that waits for the worker.
EXITED = os.WEXITED | os.WNOWAIT if hasattr(os, "WNOWAIT") else 0


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
