"""The event stream: simultaneous events of many nodes are merged, and its size in Redis is bounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import redis

import redelastic
from redelastic.monitoring import event_log
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import (
    MAX_TEXT,
    Completed,
    Event,
    Hung,
    Joined,
    Left,
    Log,
    Refused,
    Regrouped,
    Saved,
    Unwatched,
)
from redelastic.monitoring.history import replay
from redelastic.monitoring.sentences import reason_of
from redelastic.redis import scripts
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from tests.proofs.oracle_state import NOTHING, PROTOCOL
from tests.proofs.twin import on_injected_clock
from tests.support.long_tests import quick_first
from tests.support.nodes import NodeFactory
from tests.support.scenes import STORIES
from tests.support.servers import wait_until

LUA = Path(redelastic.__file__).parent / "lua"
FEW, MANY = 16, 64
N = 200


@pytest.fixture
def control(connection: Connection, keys: RunKeys) -> RunControl:
    return RunControl(connection, keys)


class Crowd:
    """Many nodes whose requests all have one millisecond of the server's clock, however slow this machine is."""

    def __init__(self, client: redis.Redis, keys: RunKeys) -> None:
        self.names = [f"gpu-{i:04d}-7-{i:012x}" for i in range(N)]
        self._client, self._keys = client, keys
        seconds, micros = client.time()
        client.rpush(f"{keys.run}:clock", seconds, micros)

    def _send(self, script: scripts.Script, node: str, *args: Any, store: int | None = None) -> None:
        keys = [*self._keys.types, self._keys.status(node)]
        keys += [] if store is None else [self._keys.store(store).data]
        self._client.eval(on_injected_clock(script.text), len(keys), *keys, *args)

    def join(self, n: int = N, after: int = 0, most: int = N, parked: int = 0) -> None:
        """The workers of the first ``parked`` nodes wait for the next round."""
        settings = (most, most, 30_000, 0, 6_000, 2_000, 60_000)
        for i, name in enumerate(self.names[:n]):
            known = NOTHING._replace(incarnation=self.names[0])  # which creates the run
            args = (name, "{}", *settings, *known, after, f"{name} 1", "", 0, 0, int(i < parked))
            self._send(scripts.JOIN, name, *args, store=after)

    def note_of(self, i: int, event: str) -> None:
        self._send(scripts.NOTE, self.names[i], event, self.names[i])

    def note(self, n: int, event_of: Callable[[int], Event]) -> None:
        for i, name in enumerate(self.names[:n]):
            event = event_of(i)
            self._send(scripts.NOTE, name, event.event, name, *event.pairs())

    def leave(self, *reasons: Left) -> None:
        """All nodes leave in equal groups: the first group for the first reason, and so on."""
        settings = (N, N, 30_000, 0, 6_000, 2_000, 60_000)
        for i, name in enumerate(self.names):
            reason = reasons[i * len(reasons) // N]
            self._send(scripts.LEAVE, name, name, "{}", *settings, *NOTHING, "goes on", *reason.pairs())

    def fail(self, n: int, first: int) -> None:
        """Workers of n nodes fail, first those of node number `first`; each node records the end of its log."""
        for i, name in enumerate(self.names[:n]):
            limits = (-1, -1, -1, 0)
            host = name.split("-7-")[0]
            self._send(scripts.CHARGE, name, name, host, 1, 20 if i == first else 10, -1, -1, *limits)
            self._send(scripts.NOTE, name, "log", name, *Log(lines=f"the last lines of {name}").pairs())

    def drain(self, *numbers: int) -> None:
        for name in (self.names[i] for i in numbers):
            self._send(scripts.DRAIN, name, name, "SIGTERM", 30_000)


@pytest.fixture
def crowd(client: redis.Redis, keys: RunKeys) -> Crowd:
    return Crowd(client, keys)


def test_events_of_few_nodes_are_recorded_one_by_one(crowd: Crowd, control: RunControl) -> None:
    crowd.join(FEW)
    assert [(event.node, event.nodes) for event in control.events()] == [(name, ()) for name in crowd.names[:FEW]]


def test_simultaneous_events_of_many_nodes_are_merged_in_order(crowd: Crowd, control: RunControl) -> None:
    crowd.join()
    events = control.events()
    assert [event.event for event in events[:-1]] == ["joined"] * (len(events) - 1)
    assert events[-1].event == "completed", "the round completes after all nodes have joined"
    assert [one.node for event in events for one in event.each() if isinstance(one, Joined)] == crowd.names
    assert [len(event.nodes) for event in events] == [0] * FEW + [MANY, MANY, N - FEW - 2 * MANY] + [0]
    others = ", ".join(crowd.names[FEW + 1 : FEW + 5])
    assert reason_of(events[FEW]) == f"is new (and 63 more nodes: {others}, …)"

    history = replay(events, events[-1].time + 60)
    assert history.complete
    assert [*history.rounds[-1].members] == crowd.names
    assert len(history.nodes) == N
    assert {node.spans[-1].epoch for node in history.nodes} == {1}


def test_new_and_regrouping_nodes_are_merged_separately(crowd: Crowd, control: RunControl) -> None:
    crowd.join()
    crowd.join(after=1)
    events = control.events()
    assert [one.node for e in events if isinstance(e, Regrouped) for one in e.each()] == crowd.names
    assert [event.breaks for event in events if isinstance(event, Regrouped)] == [True] + [False] * (FEW + 3)
    assert [event.epoch for event in events if isinstance(event, Completed)] == [1, 2]
    assert [*replay(events).rounds[-1].members] == crowd.names


def test_nodes_whose_workers_have_parked_are_merged_apart(crowd: Crowd, control: RunControl) -> None:
    crowd.join()
    crowd.join(after=1, parked=N // 2)
    regrouped = [one for event in control.events() for one in event.each() if isinstance(one, Regrouped)]
    assert [(one.node, one.parked) for one in regrouped] == [(name, i < N // 2) for i, name in enumerate(crowd.names)]


def test_a_heartbeat_flushes_merged_events(crowd: Crowd, control: RunControl, new_node: NodeFactory) -> None:
    new_node(1, 1).next_rendezvous()
    crowd.note(FEW + 5, lambda i: Hung(local_rank=i, rank=i, pid=i, idle_ms=1000 * i, stacks="a stack"))
    wait_until(lambda: any(event.nodes for event in control.events()), "a heartbeat flushes the merged events")
    *alone, together = (event for event in control.events() if isinstance(event, Hung))
    assert [(event.node, event.stacks) for event in alone] == [(name, "a stack") for name in crowd.names[:FEW]]
    assert (together.local_rank, together.idle_ms) == (FEW, 1000 * FEW)
    assert together.nodes == tuple(crowd.names[FEW : FEW + 5])
    others = [one for one in together.each() if one.node != together.node]
    assert [one.pairs() for one in others] == [[]] * 4, "fields of one node are not copied to the others"


def test_the_last_node_that_leaves_flushes_merged_events(crowd: Crowd, control: RunControl) -> None:
    crowd.join()
    crowd.leave(Left(cause="drained", reason="SIGTERM"))
    left = [one for event in control.events() for one in event.each() if isinstance(one, Left)]
    assert [one.node for one in left] == crowd.names
    assert {(one.cause, one.reason) for one in left} == {("drained", "SIGTERM")}
    assert all(node.gone for node in replay(control.events()).nodes)


def test_nodes_that_leave_for_different_reasons_are_not_merged(crowd: Crowd, control: RunControl) -> None:
    crowd.join()
    crowd.leave(Left(cause="drained", reason="SIGTERM"), Left(cause="exited"))
    left = [one for event in control.events() for one in event.each() if isinstance(one, Left)]
    assert [(one.cause, one.reason) for one in left] == [("drained", "SIGTERM")] * (N // 2) + [("exited", "")] * (
        N // 2
    )


def test_an_unmerged_event_follows_all_earlier_events(crowd: Crowd, control: RunControl) -> None:
    crowd.join(1)
    dice = Random(7)
    recorded = []
    for i in range(N):
        for kind in dice.choices(("started", "saved", "hung", "x"), (30, 30, 1, 0.2), k=3):
            crowd.note_of(i, kind)
            recorded.append((kind, crowd.names[i]))
    read: list[tuple[str, str]] = []
    for event in control.events()[1:]:
        if not event.nodes:
            before = recorded[: recorded.index((event.event, event.node), len(read))]
            assert sorted(read) == sorted(before)
        read += [(one.event, one.node) for one in event.each()]
    assert any(event.nodes for event in control.events())


def test_the_log_of_the_node_that_failed_first_keeps_its_lines(crowd: Crowd, control: RunControl) -> None:
    crowd.join()
    crowd.fail(FEW + 8, first=FEW + 4)
    logs = {event.node: event.lines for event in control.events() if isinstance(event, Log) and not event.nodes}
    first = crowd.names[FEW + 4]
    assert logs[first] == f"the last lines of {first}"
    assert len(logs) < FEW + 8


def test_after_a_second_events_of_a_kind_are_recorded_alone_again(
    client: redis.Redis, keys: RunKeys, crowd: Crowd, control: RunControl
) -> None:
    crowd.join()
    crowd.note(FEW + 5, lambda _: Saved(drains=("b",)))
    seconds, micros = client.time()
    client.delete(f"{keys.run}:clock")
    client.rpush(f"{keys.run}:clock", seconds + 5, micros)
    crowd.note(1, lambda _: Saved(drains=("c",)))
    *_, together, alone = control.events()
    assert len(together.nodes) == 5
    assert isinstance(alone, Saved)
    assert (alone.drains, alone.nodes) == (("c",), ())


@pytest.mark.fault("workers hang again and again, with long stacks", "the event stream takes at most 8 MiB of Redis")
def test_long_events_are_bounded_by_their_bytes(
    client: redis.Redis, keys: RunKeys, control: RunControl, new_node: NodeFactory
) -> None:
    new_node(1, 1, keep_alive_interval=20).next_rendezvous()  # or a pause of the machine is an event
    for i in range(1500):  # 24 MiB, of a kind that is never merged
        control.note(Unwatched(node=f"gpu-{i}", stacks=f"{i} " + "s" * (MAX_TEXT - 10)))
    taken = client.memory_usage(keys.events, samples=0)
    assert taken is not None
    assert taken < 8 << 20
    kept = control.events()
    assert len(kept) * MAX_TEXT > 3 << 20, "at least 3 MiB are kept"
    assert kept[-1].node == "gpu-1499"
    assert replay(kept).complete is False


def test_an_event_log_keeps_as_much_text_as_redis() -> None:
    """Otherwise a reader that follows a run for days would hold every stack that was ever recorded."""

    class Long(RunControl):
        def __init__(self) -> None:
            self.sent, self.detail = 0, "s" * (event_log.KEPT_TEXT // 120)

        def events(self, *_: Any, **__: Any) -> list[Event]:
            self.sent += 100
            numbers = range(self.sent - 100, self.sent)
            return [Hung(id=f"{i}-0", time=i, epoch=1, size=1, node="a", stacks=self.detail) for i in numbers]

    run = Long()
    kept = event_log.EventLog(run)
    for _ in range(3):
        kept.read()
        assert sum(len(event.stacks) for event in kept.events if isinstance(event, Hung)) <= event_log.KEPT_TEXT
    assert len(kept.events) > 100
    assert kept.last_id == "299-0"
    run.detail *= 121
    kept.read()
    assert [event.id for event in kept.events] == ["399-0"]


def test_events_of_an_unknown_run_create_no_run(client: redis.Redis, keys: RunKeys, control: RunControl) -> None:
    for i in range(2 * FEW):
        control.note(Refused(node=f"gpu-{i}", reason="no room on its disk"))
    assert not client.exists(keys.run)
    assert len(control.events()) == 2 * FEW
    assert client.pttl(keys.events) > 0


def test_draining_all_nodes_sends_only_a_few_wake_ups(
    client: redis.Redis, keys: RunKeys, crowd: Crowd, control: RunControl
) -> None:
    crowd.join()
    crowd.drain(*range(N))
    wake: Any = client.xrange(keys.wake)
    woken = [fields[b"node"].decode() for _, fields in wake if fields[b"event"] == b"drain"]
    assert woken == crowd.names[:FEW]
    assert all(node.draining == "SIGTERM" for node in control.state().nodes), (
        "a heartbeat reports each node's own drain"
    )


def test_a_member_that_drains_with_many_spares_wakes_the_others(
    client: redis.Redis, keys: RunKeys, crowd: Crowd
) -> None:
    members = 3
    crowd.join(N, most=members)
    for i in (*range(members, N), *range(members)):  # the events of all are merged
        crowd.drain(i)
    wake: Any = client.xrange(keys.wake)
    woken = [fields[b"node"].decode() for _, fields in wake if fields[b"event"] == b"drain"]
    assert woken == crowd.names[:1], "spares wake nobody, and members do once a second"


@pytest.mark.parametrize("scene", quick_first(STORIES, 2))
def test_made_up_runs_are_merged_as_the_script_merges_them(
    client: redis.Redis, keys: RunKeys, control: RunControl, scene: str
) -> None:
    """`scenes.py` makes up events for tests of their readers: here its merging is compared with the Lua's."""
    story = STORIES[scene]()
    alone, expected = story.one_by_one(), story.events()
    heartbeat = (
        on_injected_clock("".join((LUA / f"{part}.lua").read_text() for part in ("run", "events")))
        + "\nif run.flush_at and now >= run.flush_at then flush_merged_events() end"
    )
    note = on_injected_clock(scripts.NOTE.text)
    names = [*keys.types]

    def send(script: str, ms: int, *args: str) -> None:
        client.delete(f"{keys.run}:clock")
        client.rpush(f"{keys.run}:clock", ms // 1000, ms % 1000 * 1000)
        client.eval(script, len(names), *names, *args)

    client.hset(keys.run, mapping={"ttl": 7_200_000, "protocol": PROTOCOL})
    for event in alone:
        ms = round(1000 * event.time)
        flush_at = client.hget(keys.run, "flush_at")
        if flush_at and int(flush_at) <= ms:
            send(heartbeat, int(flush_at))
        client.hset(keys.run, mapping={"epoch": event.epoch, "size": event.size})
        broken = ["breaks", "1"] if event.breaks else []
        send(note, ms, event.event, event.node, *broken, *event.pairs())
    flush_at = client.hget(keys.run, "flush_at")
    if flush_at:
        send(heartbeat, int(flush_at))
    found = control.events()
    assert [replace(event, id="", time=0) for event in found] == [replace(event, id="", time=0) for event in expected]
    assert any(event.nodes for event in found) == (scene != "three")
