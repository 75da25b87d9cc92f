"""Torch's own handler on RedisRendezvousBackend: `protocol=dynamic`."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from redelastic import create_backend, create_handler
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.processes import Processes


def dynamic_node(url: str, run_id: str, low: int, high: int, **config: Any) -> RendezvousHandler:
    """A node of torch's, whose lease outlasts the pauses of a busy machine."""
    given: dict[str, Any] = {"protocol": "dynamic", "join_timeout": 80, "keep_alive_interval": 60} | config
    params = RendezvousParameters("redis", url, run_id, low, high, **given)
    backend, store = create_backend(params)
    store.close()
    handler = create_handler(backend, params)
    assert isinstance(handler, DynamicRendezvousHandler)
    return handler


def form_a_round_and_close(url: str, run_id: str) -> None:
    nodes = [dynamic_node(url, run_id, 3, 3) for _ in range(3)]
    assert {(node.get_backend(), node.get_run_id()) for node in nodes} == {("redis", run_id)}
    with ThreadPoolExecutor(3) as pool:
        infos = list(pool.map(lambda node: node.next_rendezvous(), nodes))
        assert sorted(info.rank for info in infos) == [0, 1, 2]
        assert {info.world_size for info in infos} == {3}
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]
        infos[0].store.set("k", b"v")
        assert [info.store.get("k") for info in infos] == [b"v"] * 3
        nodes[1].set_closed()
        servers.wait_until(lambda: all(node.is_closed() for node in nodes), "every node knows that the run is closed")
        with pytest.raises(RendezvousClosedError):
            nodes[2].next_rendezvous()
        assert all(pool.map(lambda node: node.shutdown(), nodes))


def admit_a_late_node(url: str, run_id: str) -> None:
    # torch reads the state once a second, and the first node of the second round sets its last call: it has to be long
    # enough for the other node, which would otherwise wait for a third round
    early, late = (dynamic_node(url, run_id, 1, 2, last_call_timeout=seconds) for seconds in (5, 30))
    with ThreadPoolExecutor(2) as pool:
        assert early.next_rendezvous().world_size == 1
        waiting = pool.submit(late.next_rendezvous)
        servers.wait_until(lambda: early.num_nodes_waiting() == 1, "the late node waits")
        again = early.next_rendezvous()
        assert {again.rank, waiting.result(80).rank} == {0, 1}
        assert again.world_size == 2
        assert early.shutdown()
        servers.wait_until(late.is_closed, "the other node knows it")
        assert late.shutdown()


def test_torchs_handler_forms_a_round_and_closes(server: RedisServer, run_id: str, processes: Processes) -> None:
    # In a small process, as an agent is: torch calls inspect.stack() between a write that lost to another node's
    # heartbeat and the next one. With pytest's deep stack and thousands of modules it takes too long to ever win.
    processes.start(form_a_round_and_close, server.url, run_id)
    processes.values()


def test_torchs_handler_admits_a_late_node(server: RedisServer, run_id: str, processes: Processes) -> None:
    # with a shared store torch keeps the first round's address for ever, and never gives it to a late node
    processes.start(admit_a_late_node, server.url, run_id, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    processes.values()


def test_torchs_handler_gets_torchs_errors(own_server: RedisServer, run_id: str) -> None:
    node = dynamic_node(own_server.url, run_id, 1, 1, heartbeat_timeout=0.3, read_timeout=4)
    with own_server.get_client() as admin:
        admin.set(RunKeys(run_id).state, "theirs")
    with pytest.raises(RendezvousStateError, match=rf"{run_id}.*is a string, but a run needs a hash"):
        node.next_rendezvous()
    own_server.kill()
    started = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match="could not be reached"):
        node.next_rendezvous()
    with pytest.raises(RendezvousError):
        node.set_closed()
    assert time.monotonic() - started < 20
