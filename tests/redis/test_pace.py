"""How often a process tries a server that is away."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.errors import UnreachableError
from redelastic.redis.pace import EARLY_PAUSE
from tests.support.calls import increment
from tests.support.peers import peer
from tests.support.servers import HOST

ATTEMPT, TIMEOUT, THREADS = 0.5, 3.0, 8


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
