"""A node's part in a roll call: it calls even over a connection that dies, and nothing delays its answer."""

from __future__ import annotations

import time
from typing import Final

import pytest
import redis

from redelastic.redis import scripts
from redelastic.redis.server import RedisServer
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join
from tests.support.servers import HOST, port_of

CONF: Final = {"keep_alive_interval": 20, "roll_call_timeout": 10.0, "last_call_timeout": 60}


@pytest.mark.parametrize("loss", ["request", "reply"])
def test_a_roll_call_over_a_connection_that_dies_is_repeated(
    loss: str, server: RedisServer, client: redis.Redis, new_node: NodeFactory
) -> None:
    client.script_load(scripts.ROLL_CALL.text)
    with FaultyProxy(HOST, port_of(server)) as proxy:
        through = server.url.replace(str(port_of(server)), str(proxy.port))
        nodes = [new_node(1, 2, url=through, **CONF) for _ in range(2)]
        join(*nodes)
        digest = scripts.ROLL_CALL.digest.encode()
        fault = proxy.add(Fault(digest, lose_request=loss == "request", hold=0))
        nodes[0].node.call_roll(time.monotonic() - 0.1)
        assert fault.fired.is_set()
        assert not nodes[0].wait_for_loss(), "long before the lease of a minute"
        assert len(events(nodes[0], "roll_call")) == 1
        for node in nodes:
            node.shutdown()


def test_an_answer_that_is_due_stays_due(new_node: NodeFactory) -> None:
    keeper = new_node(keep_alive_interval=30).keeper
    keeper.answer(7)
    for put_off in (
        lambda: keeper._schedule_lease_check(10.0, 1),
        lambda: keeper.schedule(30),
        lambda: keeper.apply_join(answered=6),
    ):
        put_off()
        due, urgent = keeper.due()
        assert due <= time.monotonic()
        assert urgent
    keeper.apply_join(answered=7)
    assert keeper.due()[0] > time.monotonic() + 9
    keeper.answer(0)
    assert keeper.due()[0] > time.monotonic() + 9


def test_an_answer_that_failed_is_tried_again_soon(own_server: RedisServer, new_node: NodeFactory) -> None:
    node = new_node(1, 1, url=own_server.url, keep_alive_interval=30)
    keeper = node.keeper
    keeper.answer(7)
    own_server.kill()
    before = time.monotonic()
    with pytest.raises(Exception, match="could not be reached"):
        keeper.beat()
    due, urgent = keeper.due()
    assert before < due < time.monotonic() + 1, "after a read: wake-ups arrive while writes are refused"
    assert urgent
    own_server.start()
    keeper.beat()
    assert keeper.due()[0] > time.monotonic() + 9


def test_a_node_answers_again_a_server_that_did_not_get_the_answer(new_node: NodeFactory) -> None:
    """It may be a replica that has taken over."""
    nodes = [new_node(1, 2, **CONF) for _ in range(2)]
    join(*nodes)
    nodes[0].node.call_roll(time.monotonic())
    assert not nodes[0].wait_for_loss()
    heard = nodes[1].node.view.roll_call
    assert heard > 0
    nodes[1].keeper.answer(heard)
    due, urgent = nodes[1].keeper.due()
    assert due <= time.monotonic() + 1
    assert urgent
