"""A process group with two collectives for workers that do not import torch, which takes 2 s.

As with gloo, rank 0 is at MASTER_ADDR, and a collective waits for all ranks, and fails once a peer has ended.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Group:
    """The workers of a round; a collective raises ConnectionError once one of them has ended."""

    def __init__(self) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        # Sockets: rank 0 has one to each other rank, each other rank one to rank 0. They are file descriptors, which
        # the kernel closes when this process has ended, not earlier: so the first worker to fail is the one that failed
        # by itself.
        self._peers: list[int] = []

    def connect(self, directory: Path) -> None:
        """Connect to the other ranks; rank 0 writes its port into a file in the directory."""
        host = os.environ["MASTER_ADDR"]
        port = directory / f"port-{os.environ['TORCHELASTIC_RUN_ID']}-{os.environ['REDELASTIC_EPOCH']}"
        if self.rank == 0:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            with socket.create_server((host, 0), family=family) as server:
                new = port.with_suffix(".new")
                new.write_text(str(server.getsockname()[1]))
                new.replace(port)
                self._peers = [server.accept()[0].detach() for _ in range(1, self.size)]
        else:
            while not port.exists():
                time.sleep(0.02)
            self._peers = [socket.create_connection((host, int(port.read_text()))).detach()]

    def maximum(self, *numbers: int) -> list[int]:
        """The elementwise maximum over all ranks' numbers."""
        return self._reduce(max, "q", numbers)

    def total(self, *numbers: float) -> list[float]:
        """The elementwise sum over all ranks' numbers."""
        return self._reduce(lambda *all_ranks: sum(all_ranks), "d", numbers)

    def _reduce(self, reduction: Callable[..., Any], kind: str, numbers: tuple[Any, ...]) -> list[Any]:
        form = struct.Struct(f"{len(numbers)}{kind}")
        if self.rank == 0:
            all_numbers = [numbers, *(form.unpack(_read(peer, form.size)) for peer in self._peers)]
            numbers = tuple(map(reduction, *all_numbers)) if len(all_numbers) > 1 else numbers
        for peer in self._peers:
            os.write(peer, form.pack(*numbers))
        return list(numbers) if self.rank == 0 else list(form.unpack(_read(self._peers[0], form.size)))

    def close(self) -> None:
        """Close the sockets, so that the other ranks' next collective fails; a signal handler may call it."""
        for peer in self._peers:
            os.close(peer)


def _read(peer: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = os.read(peer, size - len(data))
        if not part:
            raise ConnectionError("a peer has ended")
        data += part
    return data
