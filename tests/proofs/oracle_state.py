"""What Redis holds of a run, and the requests to it: the state and the requests of the oracle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

PROTOCOL: Final = 2
FORMER: Final = -(2**31)  # a former member's place among the candidates is FORMER + rank: ahead of every newcomer

Reply = tuple[str | int, ...]


class Settings(NamedTuple):
    """A run's settings, given by its first node; all times in milliseconds."""

    min: int
    max: int
    last_call: int = 3000
    replacement: int = 0
    lease: int = 6000
    interval: int = 2000
    ttl: int = 7_200_000


class Wake(NamedTuple):
    """An entry of the wake stream. Its id is its place in the stream, from 1."""

    event: str
    epoch: int
    waiting: int
    lost: int  # whether a member of the round was lost
    cause: str = ""  # why, in the form of :func:`cause`


class SaveWake(NamedTuple):
    """The entry of the wake stream that asks the members' workers to save."""

    event: str
    epoch: int
    node: str
    reason: str
    timeout: int


class DrainWake(NamedTuple):
    """The entry of the wake stream that announces a drain."""

    event: str
    epoch: int
    node: str
    reason: str
    timeout: int


class RollCallWake(NamedTuple):
    """The entry of the wake stream that opens a roll call, or says that everybody has answered it."""

    event: str
    epoch: int
    called_at: int


class Event(NamedTuple):
    """An entry of the events stream."""

    event: str
    epoch: int
    size: int
    node: str
    fields: tuple[str, ...] = ()  # its kind's own: names and values in turn


def cause(event: str, node: str, fields: tuple[str, ...] = ()) -> str:
    """Why a round is broken or the run closed, as the run's record has it."""
    return json.dumps([event, node, *fields], separators=(",", ":"))


T = TypeVar("T")


def replace(old: T, **changes: Any) -> T:
    """Like dataclasses.replace, which is several times slower: it would take half of the tests' time."""
    assert changes.keys() <= vars(old).keys()
    new = object.__new__(type(old))
    vars(new).update(vars(old), **changes)
    return new


@dataclass
class State:
    """All that Redis holds of a run."""

    settings: Settings | None = None
    ttl: int | None = None  # also set in a run that was closed before anybody joined
    protocol: int | None = None
    incarnation: str | None = None  # the node that created the run
    created_at: int | None = None
    epoch: int | None = None
    size: int | None = None
    master: str | None = None
    lost: int | None = None
    completed_at: int | None = None
    closed: str | None = None
    stop: int | None = None  # whether the workers have to end too
    broken: str | None = None
    member_lost: str | None = None  # the event by which the first member went
    deadline: int | None = None
    admit_from: int | None = None  # from when new nodes may be let in,
    admit_by: int | None = None  # until when at the latest,
    save: int | None = None  # and the place of the wake-up by which the members' workers were asked to save for them
    beat_at: int | None = None
    restoring: int | None = None  # until when members may put back a forgotten round
    arrivals: int = 0
    ranks: dict[str, int] = field(default_factory=dict)  # of the last round, as it was completed
    members: set[str] = field(default_factory=set)  # nodes of `ranks` that still hold the round
    candidates: dict[str, int] = field(default_factory=dict)  # node that waits for the next round -> its place
    leases: dict[str, int] = field(default_factory=dict)  # member or candidate -> when its lease runs out
    endpoints: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # nodes that have gone for good
    draining: dict[str, str] = field(default_factory=dict)  # node -> "timeout (ms) reason"
    drain_woke: str | None = None  # "epoch second" in which a member that drains last woke the others
    failed: dict[str, int] = field(default_factory=dict)  # node -> the last round in which its workers failed
    charged: int | None = None  # the last round whose failure counts
    restarts: int | None = None  # of the whole job
    idle: int | None = None  # how many of the last restarts brought no progress
    judged: int | None = None  # the last round that counted for or against that,
    stepped: int | None = None  # and the last one whose workers had reported a step when one failed
    progress: int | None = None  # the highest step that was ever reported, + 1
    failed_at: int | None = None  # when the first worker failed in the round `charged`,
    blamed: str | None = None  # and on which host
    limit: int | None = None  # of failed rounds in a row for one host
    failures: dict[str, int] = field(default_factory=dict)  # host -> in how many rounds in a row it failed first
    roll_called_at: int | None = None  # when the roll call was opened that is open now,
    roll_called_by: str | None = None  # by whom,
    roll_timeout: int | None = None  # how long nodes had to answer,
    roll_until: int | None = None  # and until when silent nodes may
    roll_last_chance: int | None = None  # 1: the end was put off once
    roll_again: str | None = None  # a node whose workers have failed since it was opened
    roll_answered: int | None = None  # when this round's last fully answered roll call was opened
    outage_at: int | None = None  # when it was last found that Redis was away
    wake: tuple[Wake | SaveWake | DrainWake | RollCallWake, ...] = ()
    events: tuple[Event, ...] = ()

    def copy(self) -> State:
        return replace(
            self,
            ranks=dict(self.ranks),
            members=set(self.members),
            candidates=dict(self.candidates),
            leases=dict(self.leases),
            endpoints=dict(self.endpoints),
            labels=dict(self.labels),
            left=set(self.left),
            draining=dict(self.draining),
            failed=dict(self.failed),
            failures=dict(self.failures),
        )

    @property
    def full(self) -> bool:
        """Whether the last round has max_nodes, all of them still there: a node that waits then is a spare."""
        return self.settings is not None and self.size == self.settings.max == len(self.members)


class Known(NamedTuple):
    """What a node knows of its round, and of the run's end, should the server have forgotten it."""

    epoch: int = 0
    rank: int = 0
    size: int = 0
    master: str = ""
    completed_at: int = 0
    closed: str = ""
    stop: int = 0
    steady: int = 1  # whether it has not lost Redis lately
    heard: int = 0  # the last roll call that it knows of
    incarnation: str = ""  # of the run that it was last in


NOTHING: Final = Known()


class Join(NamedTuple):
    """`after` is the last epoch that the node held, 0 if none."""

    node: str
    after: int
    endpoint: str
    label: str
    settings: Settings
    known: Known = NOTHING
    admit_timeout: int = 0  # how long members' workers have to save before the node is let in,
    admit_interval: int = 0  # and how old their round has to be
    parked: int = 0  # 1 if its workers wait for the next round


class Beat(NamedTuple):
    node: str
    settings: Settings
    known: Known = NOTHING


class Leave(NamedTuple):
    node: str
    fields: tuple[str, ...]  # of the event
    run_then: Literal["goes on", "closes", "stops"]
    settings: Settings = Settings(1, 1)
    known: Known = NOTHING


class Close(NamedTuple):
    why: str
    ttl: int
    stop: int  # 1 or 0


class Drain(NamedTuple):
    node: str
    reason: str
    timeout: int


class Save(NamedTuple):
    reason: str
    timeout: int


class Admit(NamedTuple):
    """All have saved: `save` is the place of the wake-up that asked them to."""

    node: str
    epoch: int
    save: int


class Charge(NamedTuple):
    """A worker of the node failed `ago` ms ago. A limit of -1 is none, a step of -1 was not reported."""

    node: str
    host: str  # empty if the cause may be elsewhere
    epoch: int
    ago: int
    step: int
    news: int  # 2: workers reported progress, 1: a step, 0: nothing, -1: nothing ever
    reason: str
    budget: int  # restarts of the whole job
    patience: int  # how many restarts in a row may bring no progress
    limit: int  # rounds in a row in which one host may fail first
    final: int  # 1: a loss would be known by now, so the run stops if no restart is left


class Readmit(NamedTuple):
    host: str
    by: str


class RollCall(NamedTuple):
    """A call for all to answer: workers of the node failed `ago` ms ago."""

    node: str
    epoch: int
    ago: int
    timeout: int


Request = Join | Beat | Leave | Close | Drain | Save | Admit | Charge | Readmit | RollCall
