"""Runs that the oracle makes up at random, and their events, for tests of what is read from events."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Sequence

from redelastic.monitoring.events import (
    Completed,
    Event,
    Progressed,
    decode,
)
from redelastic.monitoring.history import History
from tests.proofs import oracle, oracle_state
from tests.support.long_tests import LONG
from tests.support.scenes import START

SEQUENCES = int(os.environ.get("REDELASTIC_REPLAY_SEQUENCES", "120" if LONG else "30"))  # of random requests, replayed


class Walk:
    """Random requests of nodes to the oracle; keeps the time and the state after each."""

    def __init__(self, seed: int, sizes: tuple[int, int]) -> None:
        self.random = random.Random(seed)
        self.settings = oracle_state.Settings(*sizes, replacement=self.random.choice((0, 2500)))
        self.state, self.now = oracle_state.State(), 1_000_000
        self.held: dict[str, int] = {}
        self.names = list("abcdefgh")
        self.seen: list[tuple[int, oracle_state.State]] = []
        for _ in range(60):
            steps = (self.join, self.all_join, self.beat, self.leave, self.close, self.wait)
            self.random.choices(steps, (4, 5, 3, 1, 0.05, 1))[0](self.random.randrange(len(self.names)))

    def send(self, request: oracle_state.Request) -> None:
        self.state, reply = oracle.apply(self.state, self.now, request)
        if reply[:1] == ("complete",):
            self.held[request[0]] = int(reply[1])
        self.seen.append((self.now, self.state))

    def ask(self, name: str) -> None:
        known = oracle_state.NOTHING._replace(incarnation=self.state.incarnation or "")
        self.send(oracle_state.Join(name, self.held.get(name, 0), f"{name} 1", "", self.settings, known))

    def join(self, pick: int) -> None:
        self.ask(self.names[pick])

    def all_join(self, _: int) -> None:
        for name in [*self.state.candidates, *sorted(self.state.members)]:
            self.ask(name)

    def beat(self, silent: int) -> None:
        self.now += self.settings.interval
        for name in [name for name in self.state.leases if name != self.names[silent]]:
            self.send(oracle_state.Beat(name, self.settings))

    def leave(self, pick: int) -> None:
        then = self.random.choice(("closes", "stops")) if self.random.random() < 0.06 else "goes on"
        self.send(oracle_state.Leave(self.names[pick], ("reason", "went"), then))  # type: ignore[arg-type]
        self.names[pick] += "'"  # a node that has left comes back under another name

    def close(self, _: int) -> None:
        self.send(oracle_state.Close("by hand", self.settings.ttl, 0))

    def wait(self, _: int) -> None:
        self.now += self.random.choice((1, 700, 2500, 9000))


def recorded(seen: Sequence[tuple[int, oracle_state.State]]) -> list[Event]:
    events: list[Event] = []
    for now, state in seen:
        for e in state.events[len(events) :]:
            common = {"event": e.event, "epoch": str(e.epoch), "size": str(e.size), "node": e.node}
            fields = zip(e.fields[::2], e.fields[1::2], strict=True)
            event = decode(f"{now}-{len(events)}", common | dict(fields))
            assert set(e.fields[::2]) <= {field.name for field in dataclasses.fields(event)}, "each field is defined"
            events.append(event)
    return events


def with_steps(events: Sequence[Event]) -> list[Event]:
    """The events of a run whose workers made a step as soon as each round was complete."""
    extended: list[Event] = []
    for event in events:
        extended.append(event)
        if isinstance(event, Completed):
            extended.append(Progressed(id=event.id + "1", time=event.time, epoch=event.epoch, node=event.node, step=0))
    return extended


def spans(history: History, name: str) -> list[tuple[str, float, float, int, int | None]]:
    """State, start and end in seconds after START, epoch and rank."""
    return [
        (span.state, round(span.start - START, 3), round(span.end - START, 3), span.epoch, span.rank)
        for node in history.nodes
        if node.name == name
        for span in node.spans
    ]
