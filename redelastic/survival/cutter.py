"""Gets a process out of gloo's collectives: gloo has no abort, and only a dead peer's neighbours notice its death."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from typing import Final

DESCRIPTORS: Final = "/proc/self/fd"
CUT_INTERVAL: Final = 0.002  # between two cuts of a group's sockets, in seconds
QUIET: Final = 0.01  # without traffic before a cut, in seconds
QUIET_TIMEOUT: Final = 3.0  # how long to wait for that, in seconds
# The same in times of how late a cut was: where this thread waits for a processor, a peer's may, amid a message.
LATE: Final = 4
COUNTERS: Final = slice(120, 136)  # in Linux' tcp_info: bytes acknowledged, bytes received


class Cutter:
    """Ends reading from the sockets of one process group, so that its operations fail at once.

    Make it before the group, and :meth:`mark` when the group is made: its sockets are those that came into being in
    between. Until then every new socket is cut. Nothing reaches a peer before :meth:`release`: a descriptor of each
    socket is held back, so that the kernel sends no FIN or RST when gloo closes its own.

    Only reading is shut down: with writing too, a thread of gloo can miss its wake-up, and waits in
    ``UnboundBuffer::waitSend`` for ever. Listening sockets are left alone: gloo aborts the process if one fails.
    Nothing is cut amid a message, as gloo wakes no thread that waits for the rest of one: the peers that live send
    theirs to the end, and then wait as this process does. A peer that dies amid a message, or stands still there for
    longer than a cut waits, leaves a thread waiting.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._own: set[tuple[int, int]] | None = None
        self._lock = threading.Lock()  # one thread cuts while another holds
        self._held: dict[int, int] = {}  # descriptors, by inode; socket.dup() would make gloo's sockets blocking
        self._traffic: dict[int, bytes] = {}  # of each socket when it was last looked at, by inode
        self._begun = self._changed = 0.0  # of the first cut, and of the last traffic, on the monotonic clock
        self._ended = self._late = 0.0  # of the last cut; the longest that one came too late, in seconds

    def mark(self) -> None:
        """Cut no later sockets than those that exist now: they may be the script's own."""
        self._own = _sockets() - self._before

    def cut(self) -> None:
        """Cut the sockets once they are quiet; call it every ``CUT_INTERVAL`` until the operations fail."""
        now = time.monotonic()
        if self._begun:
            self._late = max(self._late, now - self._ended - CUT_INTERVAL)
        else:
            self._begun = now
        with self._lock, self._open() as connections:
            before, self._traffic = self._traffic, {inode: _counters(one) for inode, one in connections.items()}
            if self._traffic != before:
                self._changed = now
            if now - self._changed > QUIET + LATE * self._late or now - self._begun > QUIET_TIMEOUT:
                for inode, connection in connections.items():
                    with contextlib.suppress(OSError):  # it has no peer any more
                        connection.shutdown(socket.SHUT_RD)
                        self._held[inode] = os.dup(connection.fileno())
        self._ended = time.monotonic()

    def hold(self) -> None:
        """Hold back all descriptors, before the group is destroyed: its peers may be amid a message of this process."""
        with self._lock, self._open() as connections:
            self._held |= {inode: os.dup(connection.fileno()) for inode, connection in connections.items()}

    @contextlib.contextmanager
    def _open(self) -> Iterator[dict[int, socket.socket]]:
        """The group's connections that are not held back, by inode."""
        with contextlib.ExitStack() as opened:
            found: dict[int, socket.socket] = {}
            for fd, inode in (_sockets() - self._before) if self._own is None else self._own:
                if inode not in self._held and (connection := _connection(fd, inode)):
                    found[inode] = opened.enter_context(connection)
            yield found

    def release(self) -> None:
        """Close what was held back, now that every peer has left the group.

        To what a frozen one sends later, a closed socket would answer with a reset: then, too, gloo can miss a wake-up.
        """
        with self._lock:
            for held in self._held.values():
                os.close(held)
            self._held.clear()


def _connection(fd: int, inode: int) -> socket.socket | None:
    """Another descriptor of a TCP connection; None if it is something else, or was closed meanwhile."""
    try:
        duplicate = os.dup(fd)
    except OSError:
        return None
    status = os.fstat(duplicate)
    if status.st_ino != inode or not stat.S_ISSOCK(status.st_mode):  # another file is in its place
        os.close(duplicate)
        return None
    connection = socket.socket(fileno=duplicate)
    internet = connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM
    if internet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return connection
    connection.close()
    return None


def _counters(connection: socket.socket) -> bytes:
    """How much a connection has sent and received; empty where the kernel does not say."""
    with contextlib.suppress(OSError, AttributeError):
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, COUNTERS.stop)[COUNTERS]
    return b""


def _sockets() -> set[tuple[int, int]]:
    """The sockets of this process, as descriptors and inodes."""
    found = set()
    for name in os.listdir(DESCRIPTORS):  # noqa: PTH208  # several times as quick as pathlib
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
