"""A TCP proxy that loses what a network loses: once for each fault, and each fault tells that it fired."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from typing_extensions import Self

WAIT = 20.0  # how long a test may take to release what it holds back, in seconds


@dataclass
class Fault:
    """What happens to the next request that contains ``match``.

    Attributes:
        keep: bytes of the reply that still reach the client before its connection is cut; None: all of them, no cut.
        lose_request: the request does not reach the server before ``release``; the client's connection is cut.
        meanwhile: called once the request has had its effect, before the client learns anything.
        hold_reply: the reply waits for ``release``.
        taken: the request has been seen.
        fired: set once the fault has happened.
    """

    match: bytes
    keep: int | None = 0
    lose_request: bool = False
    hold_reply: bool = False
    meanwhile: Callable[[], object] = lambda: None
    taken: bool = False
    fired: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let go of the request or reply that is held back; returns once it has arrived."""
        self.released.set()
        assert self.arrived.wait(WAIT)


class FaultyProxy:
    """Forwards each connection to ``host:port``, and runs the faults in the order in which they were added."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._lock:
            self._closed = True
            for each in (self._listener, *self._sockets):
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for fault in self._faults:
                fault.released.set()
        for thread in self._threads:
            thread.join(WAIT)
        self._listener.close()

    def add(self, fault: Fault) -> Fault:
        with self._lock:
            self._faults.append(fault)
        return fault

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                upstream = socket.create_connection(self._target)
            except OSError:
                return
            for each in (client, upstream):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, upstream}
                if self._closed:
                    return
            self._start(self._forward, client, upstream)

    def _take(self, request: bytes) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if not fault.taken and fault.match in request:
                    fault.taken = True
                    return fault
        return None

    def _forward(self, client: socket.socket, upstream: socket.socket) -> None:
        try:
            self._pump(client, upstream)
        except OSError:
            pass  # a side has gone: the other goes too
        finally:
            with self._lock:
                self._sockets -= {client, upstream}
            client.close()
            upstream.close()

    def _pump(self, client: socket.socket, upstream: socket.socket) -> None:
        fault: Fault | None = None
        while True:
            readable, _, _ = select.select([client, upstream], [], [])
            if upstream in readable:
                reply = upstream.recv(1 << 20)
                if fault is not None and not self._deliver(fault, reply, client):
                    return
                if fault is None:
                    client.sendall(reply)
                fault = None
                if not reply:
                    return
            elif client in readable:
                request = client.recv(1 << 20)
                if not request:
                    return
                fault = self._take(request)
                if fault is not None and fault.lose_request:
                    self._hold(fault, request, client, upstream)
                    return
                upstream.sendall(request)

    @staticmethod
    def _deliver(fault: Fault, reply: bytes, client: socket.socket) -> bool:
        """Do to a reply what the fault says; returns whether the connection goes on."""
        fault.meanwhile()
        fault.fired.set()
        if fault.hold_reply:
            fault.released.wait(WAIT)
        client.sendall(reply if fault.keep is None else reply[: fault.keep])
        fault.arrived.set()
        return fault.keep is None

    @staticmethod
    def _hold(fault: Fault, request: bytes, client: socket.socket, upstream: socket.socket) -> None:
        fault.fired.set()
        client.close()
        if fault.released.wait(WAIT):
            upstream.sendall(request)
            upstream.recv(1 << 20)
            fault.arrived.set()
