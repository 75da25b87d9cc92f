"""A real server whose keys hold anything: nodes, stores and commands take it, or say so in our own words."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous.api import RendezvousError

from redelastic import RedisRendezvousBackend, RedisStore
from redelastic.monitoring.control import RunControl, UnknownNodeError, UnknownRunError
from redelastic.monitoring.events import Failed, Hung, Left, Unwatched
from redelastic.monitoring.history import replay
from redelastic.redis.connection import Connection
from redelastic.redis.errors import RedelasticError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.candidate import Candidate
from redelastic.rendezvous.keeper import Keeper
from redelastic.rendezvous.node import News, Node
from redelastic.rendezvous.replies import Complete
from redelastic.rendezvous.settings import Settings
from redelastic.rendezvous.view import View
from tests.support.fuzzing import INPUTS, SEED, no_logs, plant, spoil_keys
from tests.support.hostile import NODES, Dice

pytestmark = pytest.mark.timeout(3600 if "REDELASTIC_FUZZ" in os.environ else 120)


def operations(connection: Connection, keys: RunKeys, dice: Dice) -> Iterator[Callable[[], object]]:
    settings = Settings(run_id=keys.run_id, min_nodes=1, max_nodes=3, ttl=60)
    node = Node(connection, keys, settings, "127.0.0.1")
    node.watch.update(View.become, dice.choice((NODES[0], NODES[2], "new-1-0123456789ab")))
    keeper = Keeper(node)
    joining = Candidate(keeper, 1234, 0.0)
    control, backend = RunControl(connection, keys), RedisRendezvousBackend(connection, keys.run_id)
    store = RedisStore(connection, keys.run_id, epoch=2, timeout=0.05)

    def join() -> None:
        reply = joining.ask()
        if isinstance(reply, Complete):  # without a thread: beats are the test's
            node.watch.update(View.enter, joining.round_from(reply))

    def hear() -> None:
        for entries in connection.read({keys.wake.encode(): "0"}, 0.001).values():
            keeper.hear(entries)

    yield from (join, keeper.beat, hear)
    failure = Failed(message="why")
    yield from (
        lambda: node.charge(time.monotonic(), 3, News.STEP, failure, (3, 3, 3), final=False),
        node.is_run_closed,
    )
    yield from (
        control.state,
        lambda: replay(control.events()),
        lambda: control.find("a"),
        lambda: control.failures("a"),
    )
    yield from (
        lambda: control.note(dice.choice((Unwatched, Hung))(node="y", stacks=2000 * "stack")),
        lambda: control.drain(NODES[0], "why", 1),
        lambda: control.readmit("a", "b"),
    )
    yield from (backend.get_state, lambda: backend.set_state(b"x", 1), lambda: backend.set_state(b"x"))
    yield from (
        lambda: store.add("n", 1),
        lambda: store.get("text"),
        lambda: store.append("text", "x"),
        store.list_keys,
    )
    yield from (lambda: store.compare_set("text", "", "x"), lambda: store.delete_key("n"), store.num_keys)
    yield from (
        lambda: store.queue_pop("q", block=False),
        lambda: store.wait(["none"], timedelta(0)),
        lambda: store.check(["n"]),
    )
    yield from (lambda: node.leave(Left(cause="exited"), timeout=0), lambda: control.close("why", stop=True, ttl=60))
    store.close()


@pytest.mark.fault("hostile values in Redis, options and requests", "only our own errors come out")
def test_keys_that_hold_anything(
    server: RedisServer, connection: Connection, keys: RunKeys, measured: Callable[..., None]
) -> None:
    """The scripts as well: they meet what is in the keys first."""
    count, tried, refused = max(20, INPUTS // 300), 0, 0
    with server.get_client() as client, no_logs():
        for number in range(count):
            dice = Dice(SEED * 1_000_003 + number)
            for operation in operations(connection, keys, dice):
                plant(client, keys)
                spoil_keys(dice, client, keys)
                tried += 1
                try:
                    operation()
                except (RedelasticError, RendezvousError, DistError, UnknownRunError, UnknownNodeError):
                    refused += 1
                except Exception as e:
                    if not str(e).startswith("Cannot add 1"):  # a ValueError that `add` promises
                        raise AssertionError(f"input {number} of seed {SEED}, operation {tried}: {e!r:.300}") from e
    assert refused < 0.7 * tried, "the others came to what they are for"
    measured("inputs", tried, "")
