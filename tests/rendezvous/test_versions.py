"""Runs of another protocol and of another incarnation: both are recognized, and do no harm."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from torch.distributed.elastic.rendezvous.api import RendezvousStateError

from redelastic.cli import main
from redelastic.redis import scripts
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join
from tests.support.servers import HOST, port_of, wait_until

REFUSED = r"protocol 1, and this version of redelastic has 2: start all nodes of a run .* or use a new run id\.$"


@pytest.mark.fault(
    "a node joins a run of another version of redelastic",
    "it is refused; the error names both protocols and what to do",
)
def test_a_run_of_another_protocol(
    client: redis.Redis, new_node: NodeFactory, keys: RunKeys, server: RedisServer, capsys: pytest.CaptureFixture[str]
) -> None:
    # What 0.1.0 writes when two nodes have formed a round; it has no protocol number.
    settings: dict[Any, Any] = {"min": 1, "max": 3, "lease": 6000, "interval": 2000, "ttl": 60_000}
    client.hset(keys.run, mapping={"epoch": 1, "size": 2, **settings})
    before = client.hgetall(keys.run)
    with pytest.raises(RendezvousStateError, match=REFUSED):
        new_node(1, 3).next_rendezvous()
    for command in (["status", keys.run_id], ["close", keys.run_id], ["drain", keys.run_id, "0"]):
        assert main([*command, "--endpoint", server.url])
        assert "start all nodes of a run with the same version" in capsys.readouterr().err
    assert main(["list", "--endpoint", server.url]) == 0
    assert client.hgetall(keys.run) == before, "nothing has changed it"


@pytest.mark.fault(
    "Redis is emptied and a job started again under its run id; a node of the old job, cut off since, comes back",
    "I4, I9: it is fenced, and puts nothing back; the new job's round stands",
)
def test_a_node_of_a_run_that_was_removed(
    server: RedisServer, client: redis.Redis, new_node: NodeFactory, keys: RunKeys
) -> None:
    with FaultyProxy(HOST, port_of(server)) as proxy:
        old = new_node(1, 2, url=server.url.replace(str(port_of(server)), str(proxy.port)), last_call_timeout=0)
        for epoch in range(1, 4):
            old.next_rendezvous()
            assert held(old) == epoch
        client.script_load(scripts.BEAT.text)
        cut_off = proxy.add(Fault(scripts.BEAT.digest.encode(), hold_request=True))
        wait_until(lambda: cut_off.taken, "the old node's next heartbeat is in flight")
        client.delete(*keys.types, keys.status(old.node.id))
        nodes = [new_node(1, 2, last_call_timeout=60) for _ in range(2)]
        join(*nodes)
        created_at = int(client.hget(keys.run, "created_at") or 0)  # make the run's record say that it was long ago
        client.hset(keys.run, "created_at", created_at - 2000)
        cut_off.release()
        wait_until(lambda: old.node.view.fenced, "the old node knows that it is out")
        for kind, times in (("completed", 1), ("restored", 0), ("lost", 0), ("regrouped", 0)):
            assert len(events(nodes[0], kind)) == times, kind
        assert [node.num_nodes_waiting() for node in nodes] == [0, 0]
        assert held(nodes[0]) == 1
        old.shutdown()


def held(node: RedisRendezvousHandler) -> int:
    entered = node.node.view.round
    assert entered
    return entered.epoch
