"""What stands where a client expects Redis: strangers, and a proxy that loses replies."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from redelastic.redis.server import RedisServer
from tests.support.faulty_proxy import Fault, FaultyProxy
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


class ReplyLoss:
    """Loses the replies to one command, and their connections.

    Attributes:
        proxy: where that happens.
    """

    def __init__(self, proxy: FaultyProxy, command: bytes) -> None:
        self.proxy, self._match = proxy, b"\r\n" + command + b"\r\n"
        self._faults: list[Fault] = []

    @property
    def losses(self) -> int:
        """How many replies it still has to lose."""
        return sum(not fault.fired.is_set() for fault in self._faults)

    @losses.setter
    def losses(self, number: int) -> None:
        self._faults = [self.proxy.add(Fault(self._match)) for _ in range(number)]

    def sends_of(self, command: bytes) -> int:
        """How often a command has been sent."""
        return sum(request.count(b"\r\n" + command + b"\r\n") for request in self.proxy.sent)


@contextlib.contextmanager
def lossy_proxy(server: RedisServer, command: bytes = b"EVALSHA") -> Iterator[tuple[str, ReplyLoss]]:
    """A proxy that loses the reply to `command` and the connection, as often as `losses` says.

    Yields the URL through the proxy, and its control.
    """
    with FaultyProxy(HOST, port_of(server)) as proxy:
        yield f"redis://:{server.password}@{HOST}:{proxy.port}", ReplyLoss(proxy, command)
