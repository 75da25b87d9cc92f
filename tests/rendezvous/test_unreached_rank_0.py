"""A rank 0 whose address its peers cannot reach is reported, once in a round."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Left, Unreached
from redelastic.monitoring.sentences import sentence
from redelastic.redis.connection import Connection
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import REACH_THREAD, RedisRendezvousHandler, handler_from_parameters
from tests.support import two_hosts
from tests.support.namespaces import Network, both_ways
from tests.support.servers import wait_until
from tests.support.torchrun_job import LIMIT
from tests.support.two_hosts import NAMES

pytestmark = pytest.mark.timeout(300)

CUT: Final = "peers cannot reach the address that rank 0 announced, and get no answer"

network, redis, _environment = two_hosts.network, two_hosts.redis, two_hosts.own_interface_variables


@contextmanager
def pair(network: Network, redis: RedisServer, **local_addr: str) -> Iterator[list[RedisRendezvousHandler]]:
    """Handlers on both hosts, in the order of their ranks; call them on their host."""
    run_id, made = f"test-{uuid.uuid4().hex[:12]}", []
    try:
        for name in NAMES:
            with network.inside(name):
                options: dict[str, Any] = {"node_name": name, "topology": name, "join_timeout": LIMIT}
                params = RendezvousParameters("redis", redis.url, run_id, 2, 2, local_addr.get(name), **options)
                handler = handler_from_parameters(params)
            assert isinstance(handler, RedisRendezvousHandler)
            made.append(handler)
        with ThreadPoolExecutor(2) as pool:
            joins = []
            for name, handler in zip(NAMES, made, strict=True):

                def join(name: str = name, handler: RedisRendezvousHandler = handler) -> int:
                    with network.inside(name):
                        return handler.next_rendezvous().rank

                joins.append(pool.submit(join))
            assert [join.result(LIMIT) for join in joins] == [0, 1], "by their labels"
        yield made
    finally:
        for handler in made:
            handler.shutdown()


def has_tried() -> bool:
    return all(thread.name != REACH_THREAD for thread in threading.enumerate())


def unreached(redis: RedisServer, of: RedisRendezvousHandler) -> list[str]:
    connection = Connection.open(redis.url)
    try:
        return [sentence(e) for e in RunControl(connection, of.backend.keys).events() if isinstance(e, Unreached)]
    finally:
        connection.close()


@pytest.fixture
def reach_within(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time within which a node has to connect to rank 0, in seconds."""
    return partial(monkeypatch.setattr, "redelastic.rendezvous.handler.REACH_TIMEOUT")


@pytest.mark.parametrize(
    ("fault", "local_addr"),
    [
        pytest.param(True, "eth0", id="cut", marks=pytest.mark.fault(CUT, "log and events name address, port, node")),
        pytest.param(False, "127.0.0.1", id="a loopback"),
    ],
)
def test_a_rank_0_that_cannot_be_reached_is_reported(
    network: Network,
    redis: RedisServer,
    reach_within: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
    local_addr: str,
    *,
    fault: bool,
) -> None:
    reach_within(1.0)
    with ExitStack() as opened:
        first, second = opened.enter_context(pair(network, redis, a=local_addr))
        place = second._entered
        assert place is not None
        if fault:
            opened.enter_context(network.cut(both_ways("b", ["a"])))
        with network.inside("b"):
            assert second.num_nodes_waiting() == 0
        wait_until(has_tried, "it has tried")
        [said] = unreached(redis, second)
        assert f"rank 0, node {first.node.id}," in said
        assert f"at {place.host} port {place.port}, but from {network.addresses['b']}" in said
        assert "--local-addr" in said
        assert [said in record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [True]
        with network.inside("b"):
            second.num_nodes_waiting()
        assert has_tried(), "once in a round"


def test_a_rank_0_that_can_be_reached_is_not_reported(network: Network, redis: RedisServer) -> None:
    with pair(network, redis) as (first, second):
        with network.inside("a"):
            first.num_nodes_waiting()
        assert has_tried(), "rank 0 reaches itself"
        with network.inside("b"):
            second.num_nodes_waiting()
        wait_until(has_tried, "it has tried")
        assert unreached(redis, second) == []


def test_an_unreached_rank_0_of_an_old_round_is_not_reported(
    network: Network, redis: RedisServer, reach_within: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    reach_within(LIMIT)
    with pair(network, redis, a="127.0.0.1") as (first, second):
        with network.inside("b"):
            second.num_nodes_waiting()
        assert not has_tried(), "it tries for a minute"
        first.end(Left(cause="exited"), "goes on")
        wait_until(has_tried, "it tries no longer")
        assert unreached(redis, second) == []
    assert not [record for record in caplog.records if record.levelno == logging.ERROR]
