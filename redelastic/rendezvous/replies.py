"""Replies of a run's scripts, decoded once: the headers of the files in ``lua/`` say what each field means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from redelastic.monitoring.events import Event, decode_cause
from redelastic.redis.connection import text


class Complete(NamedTuple):
    """``join``: the node is a member of a new round."""

    epoch: int
    rank: int
    size: int
    master: str
    completed_at: int
    lost: int
    incarnation: str


class Waiting(NamedTuple):
    """``join``: the node is a candidate."""

    epoch: int
    last_wake_id: str
    wait_ms: int
    spare: int
    roll_call: int
    held: int


class Closed(NamedTuple):
    """``join``: the run is closed."""

    why: str
    spare: int
    stop: int


class Mismatch(NamedTuple):
    """``join``: the run has other sizes."""

    min_nodes: int
    max_nodes: int
    lease_ms: int
    interval_ms: int


class Left(NamedTuple):
    """``join``: the node's identity has left the run, or lost its lease."""


class Beat(NamedTuple):
    """``beat``: where the node and its run stand."""

    standing: str
    epoch: int
    broken: str
    candidates: int
    closed: str
    expires_in_ms: int
    stop: int
    drain: str
    roll_call: int


class Charge(NamedTuple):
    """``charge``: the counts after a failure, and why the run has to be stopped."""

    restarts: int
    failures: int
    verdict: Event | None


class RollCall(NamedTuple):
    """``roll_call``: when the workers failed, in the server's ms, and whether every node has answered since."""

    failed_at: int
    answered: int


Join: TypeAlias = Complete | Waiting | Closed | Mismatch | Left
_OUTCOMES: Final[dict[str, Callable[..., Join]]] = {
    "complete": Complete,
    "waiting": Waiting,
    "closed": Closed,
    "mismatch": Mismatch,
    "left": Left,
}


def decode_charge(reply: Sequence[Any]) -> Charge:
    """The reply of ``lua/charge.lua``."""
    restarts, failures, verdict = decoded(reply)
    return Charge(restarts, failures, decode_cause(verdict))


def decode_join(reply: Sequence[Any]) -> Join:
    """The reply of ``lua/join.lua``."""
    outcome, *fields = decoded(reply)
    return _OUTCOMES[outcome](*fields)


def decoded(reply: Sequence[Any]) -> list[Any]:
    """The fields of a reply, with bytes as text."""
    return [text(field) if isinstance(field, bytes) else field for field in reply]
