"""Relays: output of workers that goes to a pipe of the agent's, as in a container: passed on, and its end kept."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import select
import stat
import termios
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from .logs import SEARCHED_TAIL, end_of

PIPE_BYTES: Final = 1 << 20  # of a relay's pipe: what a worker may write while the agent is held up
CHUNK_BYTES: Final = 1 << 16
KEPT_BYTES: Final = 4 * SEARCHED_TAIL  # of UTF-8
FLUSH_TIMEOUT: Final = 1.0  # for what workers have written before their end to be passed on, in seconds


class Relay:
    """A pipe for one worker, whose contents go to one of this process' own streams.

    Args:
        stream: descriptor of that stream, 1 or 2.

    Attributes:
        path: the pipe's other end, for the worker to open.

    Raises:
        OSError: no descriptor is left.
    """

    def __init__(self, stream: int) -> None:
        self._stream = stream
        self._read, self._write = os.pipe()
        with contextlib.suppress(
            OSError, AttributeError
        ):  # pipes of this user are too large; Python 3.10 for old Linux
            fcntl.fcntl(self._write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.path = f"/proc/{os.getpid()}/fd/{self._write}"
        self._lock = threading.Lock()
        self._kept = bytearray()
        self._is_passing = False
        self._has_ended = False
        threading.Thread(target=self._pass_on, name="redelastic-relay", daemon=True).start()

    def end(self) -> str:
        """The last lines that were written, once all that is in the pipe has been read, without secrets."""
        self._await(lambda: not self._waiting, time.monotonic() + FLUSH_TIMEOUT)
        with self._lock:
            text = self._kept.decode(errors="replace")
        return end_of(text, cut=len(self._kept) >= KEPT_BYTES)

    def close(self, until: float = 0.0) -> None:
        """End it with its last writer.

        Args:
            until: how long to wait for what was written so far to be passed on, on the monotonic clock in seconds.
        """
        self._await(lambda: not self._waiting and not self._is_passing, until)
        os.close(self._write)

    def _await(self, condition: Callable[[], bool], until: float) -> None:
        while time.monotonic() < until:
            with self._lock:
                if self._has_ended or condition():
                    return
            time.sleep(0.001)

    @property
    def _waiting(self) -> int:
        """The number of bytes in the pipe."""
        size = array.array("i", [0])
        fcntl.ioctl(self._read, termios.FIONREAD, size)
        return size[0]

    def _pass_on(self) -> None:
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        try:
            while True:
                poll.poll()
                with self._lock:
                    data = os.read(self._read, CHUNK_BYTES)
                    self._kept += data
                    del self._kept[:-KEPT_BYTES]
                    self._is_passing = bool(data)
                if not data:
                    return
                _write_all(self._stream, data)
                self._is_passing = False
        except OSError:
            pass  # nobody reads the stream any more: the worker finds out as it would without a relay
        finally:
            with self._lock:
                self._has_ended = True
                os.close(self._read)


def _write_all(stream: int, data: bytes) -> None:
    poll = select.poll()
    poll.register(stream, select.POLLOUT)
    rest = memoryview(data)
    while rest:
        poll.poll()
        with contextlib.suppress(BlockingIOError):  # somebody else who has the stream open has made it so
            rest = rest[os.write(stream, rest) :]


class RelayedLogs(LogsSpecs):
    """Torch's log files, with relays for what has none and would go to a pipe or a socket of the agent's.

    A terminal is left to the workers: what they print may depend on it.

    Args:
        given: names and makes the files; contract: torch's ``LogsSpecs``.

    Attributes:
        relays: of the last group of workers, by local rank: of stderr, and of stdout unless both are the same pipe.
    """

    def __init__(self, given: LogsSpecs) -> None:
        self._given = given
        self.relays: dict[int, list[Relay]] = {}

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the files and relays for a group of workers."""
        found = self._given.reify(envs)
        self.relays = {}
        for local_rank in envs:
            for stream, paths in ((2, found.stderrs), (1, found.stdouts)):
                if paths.get(local_rank) == "" and _is_pipe(stream):
                    self._relay(local_rank, stream, paths)
        return found

    def _relay(self, local_rank: int, stream: int, paths: dict[int, str]) -> None:
        made = self.relays.setdefault(local_rank, [])
        if stream == 1 and made and os.path.sameopenfile(1, 2):
            paths[local_rank] = made[0].path  # the order of the two stays
            return
        with contextlib.suppress(OSError):
            relay = Relay(stream)
            if os.access(relay.path, os.W_OK):  # else there is no /proc
                made.append(relay)
                paths[local_rank] = relay.path
            else:
                relay.close()

    @property
    def root_log_dir(self) -> str:
        """The folder of the files."""
        return self._given.root_log_dir


def _is_pipe(stream: int) -> bool:
    try:
        mode = os.fstat(stream).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def without_relays(paths: Mapping[int, str], relays: Mapping[int, list[Relay]]) -> dict[int, str]:
    """The workers' files, by local rank; empty for a relay."""
    own = {relay.path for made in relays.values() for relay in made}
    return {local_rank: "" if path in own else path for local_rank, path in paths.items()}
