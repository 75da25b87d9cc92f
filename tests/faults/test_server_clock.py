"""The server's clock jumps, live or by a failover to a host with another clock: nobody is evicted (I9).

Needs libfaketime (Debian's package of that name). REDELASTIC_LONG=1 runs every jump in every situation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest

from redelastic.redis.keys import DEFAULT_TTL
from redelastic.redis.server import RedisServer, find_binary
from tests.support.fault_matrix import Measured
from tests.support.faulty_proxy import FaultyProxy
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.rounds import events, join, record, state
from tests.support.servers import HOST, port_of, server_binaries, wait_until

LIBRARY: Final = next(Path("/usr").glob("lib*/**/faketime/libfaketime.so.1"), None)
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(LIBRARY is None, reason="needs libfaketime: apt-get install libfaketime"),
]

# When the clock goes back, a blocked read ends with its socket's timeout: 1.05 s of a lease of 2.1 s.
INTERVAL: Final = 0.7
HOURS: Final = DEFAULT_TTL + 3600  # more than the run's keys have to live
PROMISE: Final = "I6, I7, I9: nobody is evicted, no round breaks, joins complete, a later death is known"


@dataclass
class Clock:
    """The clock of a server, set by a file that libfaketime reads at each query of the time."""

    file: Path
    ahead: float = 0.0

    def jump(self, seconds: float) -> None:
        self.ahead += seconds
        draft = self.file.with_suffix(".draft")
        draft.write_text(f"{self.ahead:+.3f}\n")
        draft.replace(self.file)  # atomically: the server may read it now

    def shown_by(self, server: RedisServer) -> float:
        """How far the clock of a server really is ahead."""
        with server.get_client() as client:
            now: tuple[int, int] = client.time()
        return now[0] + now[1] / 1e6 - time.time()


def clocked(folder: Path, clock: Clock, binary: str | None = None, **options: Any) -> RedisServer:
    """A server, not yet started, whose time is that of `clock`."""
    clock.jump(0)
    wrapper = folder / f"{clock.file.name}-server"
    # With libc.so.6 named too, malloc is libc's: jemalloc asks for the time as it starts, which hangs.
    settings = f"FAKETIME_TIMESTAMP_FILE='{clock.file}' FAKETIME_NO_CACHE=1 FAKETIME_DONT_FAKE_MONOTONIC=1"
    command = f"env LD_PRELOAD='{LIBRARY} libc.so.6' {settings} '{binary or find_binary()}'"
    wrapper.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    wrapper.chmod(0o700)
    return RedisServer(wrapper, **options)


@dataclass
class Site:
    """A Redis whose clock is about to jump."""

    url: str
    seconds: float
    jump: Callable[[], None]


def live(stack: ExitStack, folder: Path, seconds: float) -> Site:
    clock = Clock(folder / "clock")
    server = stack.enter_context(clocked(folder, clock))

    def jump() -> None:
        clock.jump(seconds)
        assert abs(clock.shown_by(server) - clock.ahead) < 5, "the server's time is that of its clock"

    return Site(server.url, seconds, jump)


def restarted(stack: ExitStack, folder: Path, seconds: float) -> Site:
    clock = Clock(folder / "clock")
    server = stack.enter_context(clocked(folder, clock, data_dir=folder / "data"))

    def jump() -> None:
        server.kill()
        clock.jump(seconds)
        server.start()
        assert abs(clock.shown_by(server) - seconds) < 5, "the server's time is that of its clock"

    return Site(server.url, seconds, jump)


def promoted(stack: ExitStack, folder: Path, seconds: float) -> Site:
    """Clients connect through a proxy, which the jump points to the replica."""
    clocks = Clock(folder / "clock"), Clock(folder / "other-clock", seconds)
    master = stack.enter_context(clocked(folder, clocks[0], config={"repl-diskless-sync-delay": "0"}))
    follows = {"replicaof": f"{HOST} {port_of(master)}", "masterauth": master.password}
    replica = clocked(folder, clocks[1], config=follows)
    replica.password = master.password
    stack.enter_context(replica)
    with replica.get_client() as client:
        wait_until(lambda: client.info("replication")["master_link_status"] == "up", "the replica is in step")
    proxy = stack.enter_context(FaultyProxy(HOST, port_of(master)))

    def jump() -> None:
        with replica.get_client() as client:
            client.replicaof("NO", "ONE")
        proxy._target = (HOST, port_of(replica))
        master.kill()
        assert abs(clocks[1].shown_by(replica) - seconds) < 5, "the server's time is that of its clock"

    return Site(f"redis://:{master.password}@{HOST}:{proxy.port}", seconds, jump)


How = Callable[[ExitStack, Path, float], Site]
ALL: Final = (10.0, -10.0, 600.0, -600.0, HOURS, -HOURS)
WAYS: Final[dict[How, str]] = {
    live: "the clock of a running Redis jumps",
    restarted: "Redis restarts with its data, its clock",
    promoted: "a replica takes over, its clock",
}


def by(*chosen: tuple[How, float]) -> Callable[[Any], Any]:
    """Runs a test with these jumps, and in a long run with all of them."""
    cases = []
    for how, what in WAYS.items():
        for seconds in ALL:
            size = f"{abs(seconds):g} s" if abs(seconds) < 60 else f"{abs(seconds) / 60:g} min"
            text = f"{what} {size} {'ahead' if seconds > 0 else 'back'}"
            mark = pytest.mark.fault(text, PROMISE) if (how, seconds) in chosen else pytest.mark.long
            cases.append(pytest.param((how, seconds), id=f"{how.__name__}{seconds:+g}", marks=mark))
    return pytest.mark.parametrize("site", cases, indirect=True)


@pytest.fixture
def site(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Site]:
    how, seconds = request.param
    with ExitStack() as stack:
        yield how(stack, tmp_path, seconds)


@pytest.mark.parametrize("binary", quick_first(server_binaries()))
def test_a_server_runs_by_the_clock_that_it_is_given(binary: str, tmp_path: Path) -> None:
    """All tests below depend on this."""
    clock = Clock(tmp_path / "clock")
    with clocked(tmp_path, clock, binary) as server, server.get_client() as client:
        for seconds in ALL:
            client.set("key", "value", px=7_200_000)
            clock.jump(seconds)
            assert abs(clock.shown_by(server) - seconds) < 5
            assert client.exists("key") == (seconds < HOURS), "keys that outlived their time are gone"
            clock.jump(-seconds)


@by((live, 600), (live, -600), (restarted, -600), (promoted, 600))
def test_a_running_group_goes_on(site: Site, new_node: NodeFactory, measured: Measured) -> None:
    nodes = [new_node(1, 3, url=site.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        infos = [future.result(60) for future in [pool.submit(node.next_rendezvous) for node in nodes]]
        before = record(nodes[0])
        waiting = pool.submit(infos[0].store.get, "key")
        site.jump()
        jumped = time.monotonic()

        def fresh() -> bool:
            run = state(nodes[0])
            return run is not None and all(abs(node.silence) < 2 * INTERVAL for node in run.members)

        wait_until(lambda: record(nodes[0]) == before and fresh(), "all beat again", 20)
        measured("all beat again", time.monotonic() - jumped)
        infos[1].store.set("key", "value")
        assert waiting.result(20) == b"value", "a wait on the round's store outlives it too"
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0, 0]

    dead, *others = nodes
    dead.node.stop()
    silent = time.monotonic()
    wait_until(lambda: all(node.num_nodes_waiting() for node in others), "its death is known", 20)
    measured("a later death known", time.monotonic() - silent)
    assert sorted(join(*others)) == [(0, 2), (1, 2)]
    assert [event.node for event in events(others[0], "lost")] == [dead.node.id], "and nobody else was lost"
    assert [event.epoch for event in events(others[0], "completed")][-1] == 2


@by((live, 600), (live, -600))
def test_a_node_that_died_before_is_known_a_lease_later(site: Site, new_node: NodeFactory, measured: Measured) -> None:
    nodes = [new_node(1, 2, url=site.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(2)]
    join(*nodes)
    nodes[1].node.stop()
    site.jump()
    jumped = time.monotonic()
    wait_until(nodes[0].num_nodes_waiting, "its death is known", 20)
    measured("an earlier death known", time.monotonic() - jumped)
    # A jump beyond the keys' time to live deletes the record, and with it the name of the node that does not come back.
    forgotten = bool(events(nodes[0], "restored"))
    assert [e.node for e in events(nodes[0], "lost")] == ([] if forgotten else [nodes[1].node.id])
    assert join(nodes[0]) == [(0, 1)]


@by((live, 600))
def test_a_group_that_forms_completes(site: Site, new_node: NodeFactory) -> None:
    """Two of three wait for the last call to end: a jump ahead ends it, a jump back begins it again."""
    config = {"keep_alive_interval": INTERVAL, "join_timeout": 120, "last_call_timeout": 8}
    nodes = [new_node(2, 3, url=site.url, **config) for _ in range(3)]
    with ThreadPoolExecutor(3) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_until(lambda: (run := state(nodes[0])) is not None and len(run.candidates) == 2, "two wait", 20)
        site.jump()
        assert sorted((info.rank, info.world_size) for info in [e.result(60) for e in early]) == [(0, 2), (1, 2)]
        late = pool.submit(nodes[2].next_rendezvous)
        wait_until(lambda: all(node.num_nodes_waiting() for node in nodes[:2]), "the third waits to join", 20)
        infos = [future.result(60) for future in (*(pool.submit(node.next_rendezvous) for node in nodes[:2]), late)]
    assert sorted((info.rank, info.world_size) for info in infos) == [(0, 3), (1, 3), (2, 3)]
    assert not events(nodes[0], "lost")


@by((live, HOURS))
def test_a_group_that_regroups_waits_for_its_last_member(site: Site, new_node: NodeFactory) -> None:
    nodes = [new_node(1, 3, url=site.url, keep_alive_interval=INTERVAL, join_timeout=120) for _ in range(3)]
    places = join(*nodes)
    with ThreadPoolExecutor(2) as pool:
        early = [pool.submit(node.next_rendezvous) for node in nodes[:2]]
        wait_until(lambda: (run := state(nodes[0])) is not None and len(run.candidates) == 2, "two wait", 20)
        wait_until(lambda: nodes[2].num_nodes_waiting() > 0, "the third is to regroup", 20)
        site.jump()
        [late] = join(nodes[2])
        again = [future.result(60) for future in early]
    assert [(info.rank, info.world_size) for info in again] + [late] == places, "with their old ranks"
    assert not events(nodes[0], "lost")
    run = state(nodes[0])
    assert run is not None
    assert run.epoch == 2


@pytest.mark.fault("many small jumps ahead, each below 1.5 intervals", "PROTOCOL.md: may cost a node its lease")
@pytest.mark.parametrize("site", [(live, 140.0)], indirect=True)
def test_small_jumps_ahead_count_as_time(site: Site, new_node: NodeFactory) -> None:
    """As PROTOCOL.md warns: one jump is harmless, but a clock that runs fast outruns the nodes' clocks."""
    nodes = [new_node(1, 2, url=site.url, keep_alive_interval=100.0) for _ in range(2)]
    join(*nodes)
    beating, other = nodes
    site.jump()
    beating.keeper.beat()
    assert [node.num_nodes_waiting() for node in nodes] == [0, 0], "one is harmless"
    other.keeper.beat()
    for _ in range(3):  # within less than an interval of the other's own time
        site.jump()
        beating.keeper.beat()
    assert [event.node for event in events(nodes[0], "lost")] == [other.node.id]
    assert not events(nodes[0], "outage"), "no jump was taken for an outage"
    wait_until(lambda: all(node.num_nodes_waiting() for node in nodes), "both are to regroup", 20)
    with ThreadPoolExecutor(1) as pool:
        again = pool.submit(nodes[1].next_rendezvous)
        wait_until(lambda: (run := state(nodes[0])) is not None and run.candidates, "it waits to join", 20)
        assert sorted([*join(nodes[0]), (again.result(20).rank, 2)]) == [(0, 2), (1, 2)]
