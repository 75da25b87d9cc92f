"""Peers that are not Redis, or that break a connection to Redis; each for one block."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from redelastic.redis.server import RedisServer
from tests.support.servers import HOST, port_of


@dataclass
class Peer:
    """A TCP server whose behaviour is a function of each connection."""

    port: int
    accepted: int = 0
    sockets: list[socket.socket] = field(default_factory=list)


@contextlib.contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[Peer]:
    """Listens on a free port and runs `serve` in a thread for each connection; closes them all at the end."""
    listener = socket.create_server((HOST, 0))
    made = Peer(listener.getsockname()[1])
    threads: list[threading.Thread] = []

    def run(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            serve(connection)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                made.accepted += 1
                made.sockets.append(connection)
                threads.append(threading.Thread(target=run, args=(connection,), daemon=True))
                threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield made
    finally:
        for opened in (listener, *made.sockets):
            with contextlib.suppress(OSError):
                opened.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(5)
        for thread in threads:
            thread.join(5)


def say_nothing(connection: socket.socket) -> None:
    while connection.recv(4096):
        pass


def speak_http(connection: socket.socket) -> None:
    connection.recv(4096)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


@dataclass
class ReplyLoss:
    """How many replies are still to be lost, and what was sent to the server."""

    losses: int = 0
    sent: list[bytes] = field(default_factory=list)

    def sends_of(self, command: bytes) -> int:
        return sum(request.count(b"\r\n" + command + b"\r\n") for request in self.sent)


@contextlib.contextmanager
def lossy_proxy(server: RedisServer, command: bytes = b"EVALSHA") -> Iterator[tuple[str, ReplyLoss]]:
    """A proxy that cuts the connection after the server has answered `command`, as often as `losses` says.

    Yields the URL that leads through it, and the control.
    """
    control = ReplyLoss()

    def serve(connection: socket.socket) -> None:
        with socket.create_connection((HOST, port_of(server))) as upstream:
            while request := connection.recv(1 << 20):
                control.sent.append(request)
                upstream.sendall(request)
                reply = upstream.recv(1 << 20)
                if control.losses > 0 and b"\r\n" + command + b"\r\n" in request:
                    control.losses -= 1
                    return
                connection.sendall(reply)

    with peer(serve) as proxy:
        yield f"redis://:{server.password}@{HOST}:{proxy.port}", control
