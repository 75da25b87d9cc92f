"""A TCP proxy that loses and delays requests and replies.

A test adds faults, each of which reports that it has happened, or has them drawn at random; the proxy counts both.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from types import TracebackType
from typing import Final

from typing_extensions import Self

WAIT = 20.0  # limit of what a test holds back, in seconds


@dataclass
class Fault:
    """What happens to the next request that contains ``match``.

    Attributes:
        keep: bytes of the reply that reach the client before its connection is cut; below 0, all but so many. None: the
            whole reply reaches it, and nothing is cut.
        lose_request: the request does not reach the server before ``release``; the client's connection is cut.
        meanwhile: called once the request has taken effect or is lost, before the client sees any of it.
        hold_request: the request does not reach the server before ``release``; the client waits.
        hold_reply: the reply waits for ``release``.
        hold: limit of the wait for ``release``, in seconds.
        late: a lost request reaches the server after ``hold``, if nobody calls ``release`` before.
        kind: the name under which it is counted.
        taken: whether the request has been seen.
        fired: set once the fault has happened.
        arrived: set once what was held back has reached the other side.
        released: set by ``release``.
    """

    match: bytes = b""
    keep: int | None = 0
    lose_request: bool = False
    hold_request: bool = False
    hold_reply: bool = False
    meanwhile: Callable[[], object] = lambda: None
    hold: float = WAIT
    late: bool = False
    kind: str = ""
    taken: bool = False
    fired: threading.Event = field(default_factory=threading.Event)
    arrived: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Release the request or reply that is held back; returns once it has arrived."""
        self.released.set()
        assert self.arrived.wait(WAIT)


class Chance:
    """Draws the fault of each request through a proxy, the same ones for the same seed.

    Args:
        seed: seed of the draws.
        rate: probability that a request meets a fault.
        silence: how long a reply is withheld, so that the client's attempt times out, in seconds.
    """

    RARE: Final = "reply withheld"  # it costs the client its whole timeout
    KINDS: Final = ("request lost", "request late", "reply lost", "reply cut short", "reply late", RARE)

    def __init__(self, seed: str, rate: float, silence: float) -> None:
        self._random, self._rate, self._silence = Random(seed), rate, silence

    def __call__(self) -> Fault | None:
        if self._random.random() >= self._rate:
            return None
        [kind] = self._random.choices(self.KINDS, (10, 10, 10, 10, 10, 1))
        soon = self._random.uniform(0, 0.02)
        match kind:
            case "request lost":
                return Fault(kind=kind, lose_request=True, hold=0)
            case "request late":  # after the client has lost the connection and perhaps sent it again
                return Fault(kind=kind, lose_request=True, hold=soon, late=True)
            case "reply lost":
                return Fault(kind=kind)
            case "reply cut short":  # the shortest reply has three bytes
                return Fault(kind=kind, keep=self._random.choice((1, 2, -1, -2)))
            case _:
                return Fault(kind=kind, keep=None, hold_reply=True, hold=self._silence if kind == self.RARE else soon)


class FaultyProxy:
    """Forwards each connection to ``host:port``.

    A request meets the first fault that matches, in the order in which they were added, or else what ``chance`` draws.

    Attributes:
        happened: how often each kind of fault has happened.
        accepted: how many connections have been accepted.
        sent: the last requests, as they came.
    """

    def __init__(self, host: str, port: int, chance: Callable[[], Fault | None] = lambda: None) -> None:
        self._target = (host, port)
        self._chance = chance
        self.happened: Counter[str] = Counter()
        self.accepted = 0
        self.sent: deque[bytes] = deque(maxlen=1000)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
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
        for thread in tuple(self._threads):
            thread.join(WAIT)
        self._listener.close()

    def add(self, fault: Fault) -> Fault:
        """Add a fault for the next request that it matches; returns it."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.add(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.accepted += 1
            try:
                upstream = socket.create_connection(self._target)
            except OSError:  # the server does not run
                client.close()
                continue
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
            return self._chance()

    def _forward(self, client: socket.socket, upstream: socket.socket) -> None:
        try:
            self._pump(client, upstream)
        except OSError:
            pass  # one side has ended: close the other one too
        finally:
            with self._lock:
                self._sockets -= {client, upstream}
            client.close()
            upstream.close()
            self._threads.discard(threading.current_thread())

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
                self.sent.append(request)
                fault = fault or self._take(request)  # a client that pipelines may send several requests first
                if fault is not None and fault.lose_request:
                    self._hold(fault, request, client, upstream)
                    return
                if fault is not None and fault.hold_request:
                    self._fire(fault)
                    fault.released.wait(fault.hold)
                upstream.sendall(request)

    def _fire(self, fault: Fault) -> None:
        with self._lock:
            self.happened[fault.kind] += 1
        fault.fired.set()

    def _deliver(self, fault: Fault, reply: bytes, client: socket.socket) -> bool:
        """Send a reply as the fault says; returns whether the connection stays."""
        fault.meanwhile()
        if not fault.hold_request:
            self._fire(fault)
        if fault.hold_reply:
            fault.released.wait(fault.hold)
        client.sendall(reply if fault.keep is None else reply[: fault.keep])
        fault.arrived.set()
        return fault.keep is None

    def _hold(self, fault: Fault, request: bytes, client: socket.socket, upstream: socket.socket) -> None:
        """Cut the client's connection, and send its request late or never."""
        fault.meanwhile()
        self._fire(fault)
        client.close()
        if fault.released.wait(fault.hold) or fault.late:
            upstream.sendall(request)
            upstream.recv(1 << 20)
            fault.arrived.set()


if __name__ == "__main__":  # a process, so that a test can freeze it: it prints its port, and ends with its stdin
    with FaultyProxy(sys.argv[1], int(sys.argv[2])) as running:
        sys.stdout.write(f"{running.port}\n")
        sys.stdout.flush()
        sys.stdin.read()
