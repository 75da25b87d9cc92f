"""`redelastic checkpoint` reports the outcome of its request; real jobs are in `agent/test_admission.py`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from redelastic import Run
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Saved
from redelastic.monitoring.sentences import save_answer
from redelastic.redis.connection import Connection
from redelastic.redis.keys import SAVED, RunKeys
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support.commands import with_agent
from tests.support.nodes import NodeFactory
from tests.support.rounds import join_all


def test_workers_that_could_not_be_asked_have_not_saved(
    server: RedisServer, connection: Connection, keys: RunKeys, new_node: NodeFactory
) -> None:
    """The node's workers were asked moments before, and are not asked again."""
    control, nodes = RunControl(connection, keys), [with_agent(new_node(2, 2)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        join_all(pool, *nodes)
    for node, asked in zip(nodes, (0, 2), strict=True):
        control.note(replace(Saved(asked=asked), node=node.node.id))
    store = RedisStore(connection, keys.run_id, epoch=1)
    for rank in range(2):
        store.set(SAVED.format(rank), "9" * 13 + "-0")
    with Run(server.url, keys.run_id, key_prefix=keys.prefix) as run:
        saves = run.checkpoint()
    assert (saves.saved, saves.unsaved, saves.unasked) == (1, [], 1)
    assert "on 1 node no worker could be asked" in save_answer(saves)
