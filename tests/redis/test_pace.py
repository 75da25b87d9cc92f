"""How often a process tries a server that is away."""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import redis.exceptions as rx

from redelastic.redis import pace
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.errors import UnreachableError
from redelastic.redis.pace import EARLY_PAUSE, LATE_PAUSE, Pace
from tests.support.calls import increment
from tests.support.interrupts import assert_thread_finishes, interrupt_everywhere
from tests.support.peers import peer
from tests.support.servers import HOST

ATTEMPT, TIMEOUT, THREADS = 0.5, 3.0, 8


def fail() -> None:
    raise rx.ConnectionError("away")


@pytest.mark.fault("Redis is away for long", "each node tries to connect about once a second, at random moments")
def test_the_threads_of_a_process_share_the_tries_of_an_outage() -> None:
    def hang_up(connection: socket.socket) -> None:
        connection.recv(4096)

    with peer(hang_up) as away:
        connection = Connection(parse_endpoint(f"redis://{HOST}:{away.port}").open(ATTEMPT), owned=True)

        def call(_: int) -> None:
            with pytest.raises(UnreachableError):
                connection.call(increment, TIMEOUT)

        started = time.monotonic()
        with ThreadPoolExecutor(THREADS) as threads:
            list(threads.map(call, range(THREADS)))
        took = time.monotonic() - started
        assert away.accepted <= THREADS + took / EARLY_PAUSE[0]  # the first try of each thread, and those in turn


def test_the_pause_grows_once_an_outage_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, pauses = [0.0], []

    def pause(*limits: float) -> float:
        pauses.append(limits)
        return 0.0

    monkeypatch.setattr(pace, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(pace, "random", SimpleNamespace(uniform=pause))
    of_node = Pace(3.0)
    for clock[0] in (0.0, 1.0, 5.0, 6.5, 60.0):
        with contextlib.suppress(rx.ConnectionError):
            of_node.run(fail)
    assert pauses == [EARLY_PAUSE, EARLY_PAUSE, LATE_PAUSE, LATE_PAUSE]


def test_an_interrupt_amid_an_outage_holds_up_no_other_thread() -> None:
    """A node's heartbeats come from another thread than the one that signal handlers run in."""
    of_node = Pace(0.01)

    def try_twice() -> None:
        for _ in range(2):  # the second try waits for its turn
            with contextlib.suppress(rx.ConnectionError):
                of_node.run(fail)

    def come_back() -> None:
        assert_thread_finishes(lambda: of_node.note(rx.ResponseError("here again")))
        assert of_node.is_up

    assert interrupt_everywhere(try_twice, come_back) > 20
