"""Gets a process out of gloo's collectives: gloo has no abort, and only a dead peer's neighbours notice its death."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from typing import Final

DESCRIPTORS: Final = "/proc/self/fd"


class Cutter:
    """Ends reading from the sockets of one process group, so that its operations fail at once.

    Make it before the group, and :meth:`mark` when the group is made: its sockets are those that came into being in
    between. Until then every new socket is cut. Nothing reaches a peer before :meth:`release`: a descriptor of each
    socket is held back, so that the kernel sends no FIN or RST when gloo closes its own.

    Only reading is shut down: with writing too, a thread of gloo can miss its wake-up, and waits in
    ``UnboundBuffer::waitSend`` for ever. Listening sockets are left alone: gloo aborts the process if one fails.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._own: set[tuple[int, int]] | None = None
        self._held: dict[int, socket.socket] = {}  # by inode

    def mark(self) -> None:
        """Cut no later sockets than those that exist now: they may be the script's own."""
        self._own = _sockets() - self._before

    def cut(self) -> None:
        """Cut the sockets; call it again until the operations have failed: gloo may be connecting."""
        for fd, inode in (_sockets() - self._before) if self._own is None else self._own:
            if inode not in self._held:
                with contextlib.suppress(OSError):  # it has just been closed, or has no peer
                    self._cut(fd, inode)

    def _cut(self, fd: int, inode: int) -> None:
        held = socket.socket(fileno=os.dup(fd))
        try:
            same = os.fstat(held.fileno()).st_ino == inode
            internet = held.family in (socket.AF_INET, socket.AF_INET6) and held.type == socket.SOCK_STREAM
            if same and internet and not held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                held.shutdown(socket.SHUT_RD)
                self._held[inode] = held
        finally:
            if self._held.get(inode) is not held:
                held.close()

    def release(self) -> None:
        """Close what was held back, now that every peer has left the group."""
        for held in self._held.values():
            held.close()
        self._held.clear()


def _sockets() -> set[tuple[int, int]]:
    """The sockets of this process, as descriptors and inodes."""
    found = set()
    for name in os.listdir(DESCRIPTORS):  # noqa: PTH208  # several times as quick as pathlib
        with contextlib.suppress(OSError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
