"""TCP servers that stand where a client expects Redis: strangers, and a proxy that loses replies."""

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
    """A TCP server, its accepted connections and their number."""

    port: int
    accepted: int = 0
    sockets: list[socket.socket] = field(default_factory=list)


@contextlib.contextmanager
def peer(serve: Callable[[socket.socket], None]) -> Iterator[Peer]:
    """Listen on a free port and run `serve` in a thread for each connection; at the end, close all connections."""
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
    """How many replies the proxy still has to lose, and the requests that it has forwarded."""

    losses: int = 0
    sent: list[bytes] = field(default_factory=list)

    def sends_of(self, command: bytes) -> int:
        """How often a command has been sent."""
        return sum(request.count(b"\r\n" + command + b"\r\n") for request in self.sent)


@contextlib.contextmanager
def lossy_proxy(server: RedisServer, command: bytes = b"EVALSHA") -> Iterator[tuple[str, ReplyLoss]]:
    """A proxy that drops the reply to `command` and the connection, as often as `losses` says.

    Yields the URL through the proxy, and its control.
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
