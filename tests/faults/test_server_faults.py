"""Redis answers, but not as it should: rounds outlive it, joins wait for it or say why (I9).

REDELASTIC_LONG=1 adds faults that end before a lease has passed, and a regrouping under all of them.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError

from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from tests.support.fault_matrix import Measured
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record, state
from tests.support.server_faults import (
    AT_ONCE,
    FAULTS,
    INTERVAL,
    LEASE,
    Fault,
    configured,
    full_memory,
    group,
    read_only,
    waiting_counts,
)
from tests.support.servers import wait_until

pytestmark = pytest.mark.timeout(180)

PROMISE: Final = "I9: nobody is evicted, joins of known nodes wait and say why, all goes on once it is over"


def cases(*quick: Fault, lasting: bool) -> list[Any]:
    """All faults; the ones that are not named run in long runs only."""
    return [
        pytest.param(
            (inflicted, says),
            id=inflicted.__name__,
            marks=[pytest.mark.fault(what, PROMISE), *([pytest.mark.long] if quick and inflicted not in quick else [])],
        )
        for inflicted, what, says, writes_fail in FAULTS
        if writes_fail or not lasting
    ]


def wait_for_a_lease(nodes: list[RedisRendezvousHandler], joins: list[Future[Any]]) -> None:
    """Until all have noticed the fault, and a lease has passed; their joins go on waiting."""
    over = time.monotonic() + LEASE

    def noticed() -> bool:
        for ended in (one for one in joins if one.done()):
            raise AssertionError(f"a join did not wait: {ended.exception() or ended.result()!r}")
        return time.monotonic() > over and all(node.node.watch.away for node in nodes)

    wait_until(noticed, "all notice it")


def said(caplog: pytest.LogCaptureFixture, node: RedisRendezvousHandler) -> list[str]:
    """The lines that a node has logged about the outage."""
    return [text for text in caplog.messages if "keeps its place" in text and node.node.id in text]


@pytest.mark.parametrize("away", quick_first([1.5 * LEASE, LEASE / 2]))
@pytest.mark.parametrize("fault", cases(lasting=False))
def test_a_running_round_outlives_a_fault(
    fault: tuple[Fault, str], away: float, own_server: RedisServer, new_node: NodeFactory, measured: Measured
) -> None:
    nodes = group(new_node, own_server, 1, 3)
    join(*nodes)
    before = record(nodes[0])
    with fault[0](own_server):
        ends = time.monotonic() + away
        while time.monotonic() < ends:
            assert waiting_counts(nodes) == [0, 0, 0]
            time.sleep(0.02)
    over = time.monotonic()

    def fresh() -> bool:
        run = state(nodes[0])
        return run is not None and all(node.silence < 2 * INTERVAL for node in run.members)

    wait_until(lambda: record(nodes[0]) == before and fresh(), "all beat again", 20)
    measured("all beat again", time.monotonic() - over)
    assert waiting_counts(nodes) == [0, 0, 0]

    dead, *others = nodes
    dead.node.stop()
    silent = time.monotonic()
    wait_until(lambda: all(waiting_counts(others)), "its death is known", 20)
    measured("a later death known", time.monotonic() - silent)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]
    assert [event.node for event in events(others[0], "lost")] == [dead.node.id], "and nobody else was lost"


@pytest.mark.parametrize("fault", cases(full_memory, read_only, lasting=True))
def test_a_rendezvous_of_known_nodes_waits_for_the_fault_to_end(
    fault: tuple[Fault, str],
    own_server: RedisServer,
    new_node: NodeFactory,
    caplog: pytest.LogCaptureFixture,
    measured: Measured,
) -> None:
    """Two nodes wait for a third when the fault begins; the third joins when it has ended."""
    inflicted, says = fault
    nodes = group(new_node, own_server, 3, 3)
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_until(lambda: (run := state(nodes[0])) is not None and len(run.candidates) == 2, "two wait", 20)
        with inflicted(own_server):
            wait_for_a_lease(nodes[:2], early)

            def both_say_why() -> bool:  # a blocked read may end, for other reasons, before the first write fails
                return all(re.search(says, "".join(said(caplog, node)[-1:])) for node in nodes[:2])

            wait_until(both_say_why, "both say why")  # a node records the outage before it logs it
            for node in nodes[:2]:
                complaints = said(caplog, node)
                kinds = {re.sub(r"[0-9]+", "", text) for text in complaints}
                assert len(complaints) == len(kinds) <= 3, complaints  # each kind of error once
        over = time.monotonic()
        infos = [pool.submit(nodes[2].next_rendezvous).result(60), *(future.result(60) for future in early)]
    measured("rendezvous complete", time.monotonic() - over)
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert [event.epoch for event in events(nodes[0], "completed")] == [1], "it completes once"
    assert not events(nodes[0], "lost")


@pytest.mark.parametrize("fault", cases(read_only, lasting=True))
def test_a_regrouping_waits_for_the_fault_to_end(
    fault: tuple[Fault, str], own_server: RedisServer, new_node: NodeFactory
) -> None:
    """One of three nodes waits for the next round when the fault begins; the others, known ones, join during it."""
    nodes = group(new_node, own_server, 1, 3)
    places = join(*nodes)
    with ThreadPoolExecutor(3) as pool:
        again = [pool.submit(nodes[0].next_rendezvous)]
        wait_until(lambda: all(waiting_counts(nodes[1:])), "the others are to regroup", 20)
        with fault[0](own_server):
            again += [pool.submit(node.next_rendezvous) for node in nodes[1:]]
            wait_for_a_lease(nodes, again)
        infos = [future.result(60) for future in again]
    assert [(info.rank, info.world_size) for info in infos] == places, "with their old ranks"
    assert not events(nodes[0], "lost")


@pytest.mark.fault("maxmemory is reached until the join timeout", "a join of a known node ends then, and says why")
@pytest.mark.parametrize("known", ["as a candidate", "as a member"])
def test_a_join_gives_up_at_its_timeout_and_says_why(
    known: str, own_server: RedisServer, new_node: NodeFactory
) -> None:
    least = 1 if known == "as a member" else 2
    patience = 3 if known == "as a member" else 8  # a candidate begins to wait before the memory is full
    config = {"keep_alive_interval": INTERVAL, "last_call_timeout": 0, "join_timeout": patience, "read_timeout": 1}
    node = new_node(least, 2, url=own_server.url, **config)
    if least == 1:
        join(node)
    with ThreadPoolExecutor(1) as pool:
        if least == 1:
            with full_memory(own_server):
                waiting = pool.submit(node.next_rendezvous)
                error = waiting.exception(30)
        else:
            waiting = pool.submit(node.next_rendezvous)
            wait_until(lambda: (run := state(node)) is not None and len(run.candidates) == 1, "it waits", 20)
            with full_memory(own_server):
                error = waiting.exception(30)
    assert isinstance(error, RendezvousConnectionError)
    assert "is out of memory" in str(error)


@pytest.mark.parametrize(
    ("inflicted", "says"),
    [
        pytest.param(
            inflicted,
            says,
            marks=pytest.mark.fault(f"{what} before a node has joined", "its join fails at once, and says why"),
        )
        for inflicted, what, says, _ in FAULTS
        if inflicted in (full_memory, read_only)
    ],
)
def test_a_join_that_was_never_served_fails_at_once(
    inflicted: Fault, says: str, own_server: RedisServer, new_node: NodeFactory
) -> None:
    node = new_node(1, 1, url=own_server.url, join_timeout=120)
    started = time.monotonic()
    with inflicted(own_server), pytest.raises(RendezvousConnectionError, match=says):
        node.next_rendezvous()
    assert time.monotonic() - started < AT_ONCE
    assert join(node) == [(0, 1)], "and may try again"


@pytest.mark.fault("a node may not write (NOPERM) before it has joined", "its join fails at once, and says why")
def test_a_join_without_permission_fails_at_once(own_server: RedisServer, new_node: NodeFactory) -> None:
    with own_server.get_client() as admin:
        admin.acl_setuser("reader", enabled=True, passwords=["+pw"], keys=["*"], commands=["+@read", "+@connection"])
    url = own_server.url.replace(f":{own_server.password}@", "reader:pw@")
    node = new_node(1, 1, url=url, join_timeout=120)
    started = time.monotonic()
    with pytest.raises(RendezvousConnectionError, match=r"denies this user a key or command.*ACL|needs the rules"):
        node.next_rendezvous()
    assert time.monotonic() - started < AT_ONCE


@pytest.mark.fault("maxclients is reached before a node has joined", "it connects and joins once there is room")
def test_a_node_waits_for_a_connection(own_server: RedisServer, new_node: NodeFactory) -> None:
    with ThreadPoolExecutor(1) as pool, configured(own_server, maxclients=1) as admin:
        made = pool.submit(new_node, 1, 1, url=own_server.url)
        wait_until(lambda: admin.info("stats")["rejected_connections"] > 2, "it tries again")
        admin.config_set("maxclients", 100)
        assert join(made.result(30)) == [(0, 1)]
