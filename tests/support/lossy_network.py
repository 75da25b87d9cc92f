"""A server behind a lossy network, and concurrent calls, for the batches of `tests/proofs/lossy_campaign.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from typing import Final, TypeVar

from redelastic.redis import scripts
from redelastic.redis.scripts import Script
from redelastic.redis.server import RedisServer
from tests.support.faulty_proxy import Chance, FaultyProxy

T = TypeVar("T")

ATTEMPT_TIMEOUT: Final = 0.4  # of one attempt, in seconds
SILENCE: Final = 1.0  # how long a reply is withheld, in seconds: longer than an attempt
CALL_TIMEOUT: Final = 60.0  # of a call with all its retries, in seconds


def address_of(server: RedisServer) -> tuple[str, int]:
    """Host and port."""
    host, _, port = server.endpoint.rpartition(":")
    return host, int(port)


class LossyNetwork:
    """A server, and proxies to it that lose and delay a share of the traffic.

    Args:
        stack: closes the server and the proxies.
        seed: of the faults; each proxy draws others.
        rate: share of requests that meet a fault.
    """

    def __init__(self, stack: ExitStack, seed: str, rate: float) -> None:
        self._seed, self._rate = seed, rate
        self.server = stack.enter_context(RedisServer())
        self._paths = stack.enter_context(ExitStack())
        self.proxies: list[FaultyProxy] = []
        with self.server.get_client() as client:
            for script in vars(scripts).values():
                if isinstance(script, Script):
                    client.script_load(script.text)  # else a verb's first requests fail with NOSCRIPT

    def url(self) -> str:
        """The server's URL, through a new proxy."""
        chance = Chance(f"{self._seed}, network of {len(self.proxies)}", self._rate, SILENCE)
        proxy = self._paths.enter_context(FaultyProxy(*address_of(self.server), chance))
        self.proxies.append(proxy)
        return self.server.url.replace(self.server.endpoint, f"127.0.0.1:{proxy.port}")

    def close(self) -> None:
        """Close all proxies; requests that they hold back never reach the server."""
        self._paths.close()


def all_at_once(*calls: Callable[[], T]) -> list[T]:
    """Run each call in a thread. The first failure is raised at once, since the other calls may wait for ever then."""
    futures: list[Future[T]] = [Future() for _ in calls]

    def run(call: Callable[[], T], future: Future[T]) -> None:
        try:
            future.set_result(call())
        except BaseException as e:  # noqa: BLE001
            future.set_exception(e)

    for each in zip(calls, futures, strict=True):
        threading.Thread(target=run, args=each, daemon=True).start()
    done, _ = wait(futures, 2 * CALL_TIMEOUT, FIRST_EXCEPTION)
    for future in done:
        future.result()
    assert len(done) == len(futures), f"not within {2 * CALL_TIMEOUT:g} s"
    return [future.result() for future in futures]
