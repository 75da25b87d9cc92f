"""The protocol as pure functions: what `redelastic/lua/{join,beat,leave,close,drain,charge,readmit,roll_call}.lua` do.

A verb takes a state, the server's clock in milliseconds and its arguments, and returns the next state and the reply. It
never changes the state that it is given. Nothing here is fast or clever, on purpose: `test_oracle.py` holds the Lua
against it, `test_model.py` explores it. I1 to I9 are the guarantees of PROTOCOL.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, TypeVar

FORMER: Final = -(2**31)  # a former member's place among the candidates is FORMER + rank: ahead of every newcomer

Reply = tuple[str | int, ...]


class Settings(NamedTuple):
    """Of a run, as its first node brought them; all times in milliseconds."""

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
    reason: str
    waiting: int
    lost: int  # whether a member of the round was lost


class DrainWake(NamedTuple):
    """The entry of the wake stream that tells of a drain."""

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
    reason: str


T = TypeVar("T")


def replace(old: T, **changes: Any) -> T:
    """As that of dataclasses, which takes several times as long: half of the time of the tests that use it."""
    assert changes.keys() <= vars(old).keys()
    new = object.__new__(type(old))
    vars(new).update(vars(old), **changes)
    return new


@dataclass
class State:
    """All that Redis holds of a run."""

    settings: Settings | None = None
    ttl: int | None = None  # also known of a run that was closed before anybody joined
    epoch: int | None = None
    size: int | None = None
    master: str | None = None
    lost: int | None = None
    completed_at: int | None = None
    closed: str | None = None
    stop: int | None = None  # whether the workers have to end too
    broken: str | None = None
    member_lost: int | None = None
    deadline: int | None = None
    beat_at: int | None = None
    restoring: int | None = None  # until when members may say that they belong to a round that was forgotten
    arrivals: int = 0
    ranks: dict[str, int] = field(default_factory=dict)  # of the last round, as it was completed
    members: set[str] = field(default_factory=set)  # those of `ranks` that still hold the round
    candidates: dict[str, int] = field(default_factory=dict)  # place of everybody who waits for the next round
    leases: dict[str, int] = field(default_factory=dict)  # when they run out, of all members and candidates
    endpoints: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # nodes that have gone for good
    draining: dict[str, str] = field(default_factory=dict)  # node -> "timeout (ms) reason"
    drain_woke: str | None = None  # "epoch second" in which a member that drains last woke the others
    failed: dict[str, int] = field(default_factory=dict)  # node -> the last round in which its workers failed
    charged: int | None = None  # the last round whose failure counts
    restarts: int | None = None  # of the whole job
    idle: int | None = None  # how many of the last ones brought no progress
    progress: int | None = None  # the highest step that was ever reported, + 1
    failed_at: int | None = None  # when the first worker failed in the round `charged`,
    blamed: str | None = None  # and on which host
    limit: int | None = None  # of failed rounds in a row for one host
    failures: dict[str, int] = field(default_factory=dict)  # host -> in how many rounds in a row it failed first
    roll_called_at: int | None = None  # when the roll call was opened that is open now,
    roll_called_by: str | None = None  # by whom,
    roll_timeout: int | None = None  # how long nodes had to answer,
    roll_until: int | None = None  # and until when those who are silent may
    roll_last_chance: int | None = None  # 1: that was put off once
    roll_again: str | None = None  # on whose node workers have failed since it was opened
    roll_answered: int | None = None  # when the last one of this round was opened that everybody answered
    wake: tuple[Wake | DrainWake | RollCallWake, ...] = ()
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
        """Whether the last round has max_nodes, all of them still there: who waits then is a spare."""
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


NOTHING: Final = Known()


class Join(NamedTuple):
    """`after` is the last epoch that the node held, 0 if none."""

    node: str
    after: int
    endpoint: str
    label: str
    settings: Settings
    known: Known = NOTHING


class Beat(NamedTuple):
    node: str
    settings: Settings
    known: Known = NOTHING


class Leave(NamedTuple):
    node: str
    reason: str
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


class Charge(NamedTuple):
    """A worker of the node failed `ago` ms ago. A limit of -1 is none, a step of -1 was not reported."""

    node: str
    host: str
    epoch: int
    ago: int
    step: int
    reason: str
    budget: int  # restarts of the whole job
    patience: int  # of those in a row, how many may bring no progress
    limit: int  # rounds in a row in which one host may fail first
    final: int  # 1: a loss would be known by now, so the run is stopped if nothing is left


class Readmit(NamedTuple):
    host: str
    by: str


class RollCall(NamedTuple):
    """Workers of the node failed `ago` ms ago: who is there?"""

    node: str
    epoch: int
    ago: int
    timeout: int


Request = Join | Beat | Leave | Close | Drain | Charge | Readmit | RollCall


def apply(state: State, now: int, request: Request) -> tuple[State, Reply]:
    """Run the request's verb."""
    return VERBS[type(request)](state, now, request)


def join(state: State, now: int, request: Join) -> tuple[State, Reply]:
    """Ask for a place in a round later than `after`."""
    s, node = state.copy(), request.node
    if node in s.left:
        return s, ("left",)  # I8: a late copy must not bring a node back that has gone
    _restore(s, now, node, request.settings, request.known)
    _reap(s, now, steady=request.known.steady)
    if s.closed is not None:
        was_spare = s.candidates.get(node, -1) > 0 and s.settings is not None and s.size == s.settings.max
        return s, ("closed", s.closed, int(was_spare), s.stop or 0)  # I5
    if request.known.epoch > 0 and node not in s.members and node not in s.candidates:
        _try_complete(s, now)
        return s, ("left",)  # I4: it held a round and has lost its lease
    if not s.leases or s.settings is None:
        s.settings, s.ttl = request.settings, request.settings.ttl  # nobody is there: this is the first node
    elif (request.settings.min, request.settings.max) != (s.settings.min, s.settings.max):
        _try_complete(s, now)
        return s, ("mismatch", s.settings.min, s.settings.max)
    if s.epoch is None or request.after > s.epoch:
        s.epoch = request.after  # I4: after a loss of data no epoch is given twice

    _enter(s, node, request)
    _renew(s, now, node, request.settings, request.known)
    _try_complete(s, now)

    if s.epoch > request.after and node in s.members:
        return s, ("complete", s.epoch, s.ranks[node], _size(s), s.master or "", s.completed_at or 0, s.lost or 0)
    wait = -1 if s.deadline is None else max(0, s.deadline - now)
    return s, ("waiting", s.epoch, len(s.wake), wait, int(s.full), _to_answer(s, node, request.known))


def _enter(s: State, node: str, request: Join) -> None:
    assert s.epoch is not None
    assert s.settings is not None
    if node in s.members and s.epoch <= request.after:  # it gives its round up
        s.members.remove(node)
        s.candidates[node] = FORMER + s.ranks[node]
        _record(s, "joined", node, "regroups")
        _break_round(s, f"{node} regroups", "regroups")
    elif node in s.members or node in s.candidates:
        return  # asked again, or a late copy, whose endpoint is gone by now
    else:
        s.arrivals += 1
        s.candidates[node] = s.arrivals
        _record(s, "joined", node, "is new")
        if s.members and _size(s) < s.settings.max:
            _break_round(s, f"{node} waits to join", "waits")
    s.endpoints[node] = request.endpoint
    if request.label:
        s.labels[node] = request.label


def beat(state: State, now: int, request: Beat) -> tuple[State, Reply]:
    """Renew the node's lease, and tell it how its run stands."""
    s, node = state.copy(), request.node
    _restore(s, now, node, request.settings, request.known)
    if s.epoch is None:  # I9: the data are gone, and this node knows of no round: it is not judged
        return s, ("unknown", 0, "", 0, s.closed or "", -1, s.stop or 0, "", 0)
    _reap(s, now, steady=request.known.steady)
    if node in s.leases:
        _renew(s, now, node, request.settings, request.known)
    _try_complete(s, now)
    standing = "member" if node in s.members else "candidate" if node in s.candidates else "fenced"
    others = [at for other, at in s.leases.items() if other != node]
    expires_in = max(0, min(others) - now) if others else -1
    run = (s.epoch, s.broken or "", len(s.candidates), s.closed or "", expires_in, s.stop or 0)
    return s, (standing, *run, s.draining.get(node, ""), _to_answer(s, node, request.known))


def leave(state: State, now: int, request: Leave) -> tuple[State, Reply]:
    """Take a node out of the run for good; a member that has finished closes the run, or stops it."""
    s, node = state.copy(), request.node
    _restore(s, now, node, request.settings, request.known)
    if s.ttl is None:
        return s, ()  # nothing of this run is there
    if node in s.left:
        return s, ()
    _reap(s, now, steady=request.known.steady)
    s.left.add(node)
    was_here, was_member, had_failed = node in s.leases, node in s.members, _has_failed(s, node)
    _remove(s, node)
    if was_here:
        _record(s, "left", node, request.reason)
    if was_member and s.closed is None:
        why = f"{node} {request.reason}"
        if request.run_then != "goes on" and s.broken is None:  # the others finish too; else they have to go on
            _close(s, why, node, stop=request.run_then == "stops")
        else:
            _break_round(s, why, "lost", innocent=not had_failed)
    _try_complete(s, now)
    return s, ()


def close(state: State, now: int, request: Close) -> tuple[State, Reply]:  # noqa: ARG001
    """No round is completed any more; a run that was closed may still be stopped."""
    s = state.copy()
    s.ttl = request.ttl if s.ttl is None else s.ttl
    if s.closed is None or (request.stop and not s.stop):
        _close(s, s.closed or request.why, "", stop=bool(request.stop))
    assert s.closed is not None
    return s, (s.closed,)


def drain(state: State, now: int, request: Drain) -> tuple[State, Reply]:
    """Ask a node to let its workers save and to leave: once, as long as it is there; a member's peers are woken."""
    s, node = state.copy(), request.node
    if node not in s.leases:
        return s, (0,)
    if node not in s.draining:
        s.draining[node] = f"{request.timeout} {request.reason}"
        _record(s, "drain", node, request.reason)
        if node in s.members:
            assert s.epoch is not None
            s.drain_woke = f"{s.epoch} {now // 1000}"
            s.wake = (*s.wake, DrainWake("drain", s.epoch, node, request.reason, request.timeout))
    return s, (1,)


def charge(state: State, now: int, request: Charge) -> tuple[State, Reply]:
    """Count a failure of workers: once a round against the job, and against the host where one failed first."""
    s, node = state.copy(), request.node
    verdict = (s.closed or "") if s.stop else ""
    if request.epoch == s.epoch and node in s.leases and s.closed is None:  # I4
        if not _has_failed(s, node):
            s.failed[node] = request.epoch
            _record(s, "failed", node, request.reason)
        if s.member_lost is None:  # else it failed because of that
            _count(s, now - request.ago, request)
        if s.charged == s.epoch:  # also when who was charged is lost by now
            verdict = _verdict(s, request)
            if verdict and request.final:
                _close(s, verdict, node, stop=True)
    return s, (s.restarts or 0, s.failures.get(request.host, 0), verdict)


def readmit(state: State, now: int, request: Readmit) -> tuple[State, Reply]:  # noqa: ARG001
    """Forget a host's failures, so that its nodes are no longer kept out."""
    s = state.copy()
    if s.ttl is None or request.host not in s.failures:
        return s, (0,)
    del s.failures[request.host]
    _record(s, "readmitted", request.host, request.by)
    _wake(s, "readmit", request.host)
    return s, (1,)


def roll_call(state: State, now: int, request: RollCall) -> tuple[State, Reply]:
    """Ask who is there: whoever stays silent is out after `timeout` instead of a lease."""
    s, node, failed_at = state.copy(), request.node, now - request.ago
    if s.ttl is None:
        return s, ()  # nothing of this run is there
    was_away = _reap(s, now, steady=1)
    refused = was_away or request.epoch != s.epoch or s.closed is not None or s.restoring is not None
    refused = refused or node not in s.members
    if not refused:
        if s.roll_called_at is not None:
            s.roll_again = node if s.roll_called_at < failed_at else s.roll_again
        elif s.member_lost is None and (s.roll_answered or 0) < failed_at:
            _open_roll_call(s, now, node, request.timeout)
    _try_complete(s, now)
    return s, () if refused else (failed_at, int((s.roll_answered or 0) >= failed_at))


def _count(s: State, failed_at: int, request: Charge) -> None:
    s.limit = request.limit if request.limit >= 0 else None
    if s.charged != request.epoch:
        s.failures = {host: n for host, n in s.failures.items() if _stays(s, host, n, request)}
        s.idle = (s.idle or 0) + 1 if s.restarts else 0  # before the first there is nothing to compare with
        s.restarts = (s.restarts or 0) + 1
        s.charged = request.epoch
        _blame(s, request.host, failed_at)
    elif s.failed_at is not None and failed_at < s.failed_at:  # it failed first, though it says so later
        _unblame(s)
        _blame(s, request.host, failed_at)
    step = min(request.step, 2**53 - 2)  # in Lua a number is exact below 2**53 only
    if step >= (s.progress or 0):
        s.progress, s.idle = step + 1, 0


def _verdict(s: State, request: Charge) -> str:
    """Why the run has to be stopped, or ""."""
    assert s.idle is not None
    assert s.restarts is not None
    if request.patience >= 0 and s.idle >= max(1, request.patience):
        place = "no step was reported" if s.progress is None else f"still at step {s.progress - 1}"
        return f"no progress in {s.idle} restarts, {place}: {request.node} {request.reason}"
    if 0 <= request.budget < s.restarts:
        return f"the job has used up its {request.budget} restarts: {request.node} {request.reason}"
    return ""


def _stays(s: State, host: str, n: int, request: Charge) -> bool:
    """Whether a row outlives the rounds before: the last one added to it, or the host is barred."""
    return (s.charged == request.epoch - 1 and host == s.blamed) or 0 <= request.limit <= n


def _blame(s: State, host: str, failed_at: int) -> None:
    s.blamed, s.failed_at = host, failed_at
    s.failures[host] = s.failures.get(host, 0) + 1


def _unblame(s: State) -> None:
    assert s.blamed is not None
    n = s.failures.pop(s.blamed, 0) - 1
    if n > 0:
        s.failures[s.blamed] = n


VERBS: Final[dict[type, Callable[[State, int, Any], tuple[State, Reply]]]] = {
    Join: join,
    Beat: beat,
    Leave: leave,
    Close: close,
    Drain: drain,
    Charge: charge,
    Readmit: readmit,
    RollCall: roll_call,
}


# What the verbs share. These work on a verb's own copy of the state.


def _restore(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """I9: put back what the server has forgotten. The highest epoch wins; of two rounds with one epoch, the first."""
    if known.closed and s.closed is None:
        s.ttl = settings.ttl if s.ttl is None else s.ttl
        _close(s, known.closed, node, stop=bool(known.stop))
    if s.closed is not None or node in s.left or known.rank >= known.size:
        return
    if known.epoch > (s.epoch or 0):
        s.settings, s.ttl = settings, settings.ttl
        s.epoch, s.size, s.master, s.completed_at = known.epoch, known.size, known.master, known.completed_at
        s.lost = 0
        s.restoring = now + settings.lease
        s.broken = s.member_lost = s.deadline = s.roll_answered = None
        _end_roll_call(s)
        s.ranks, s.members = {}, set()
        for former in sorted((n for n, place in s.candidates.items() if place < 0), key=lambda n: s.candidates[n]):
            s.arrivals += 1
            s.candidates[former] = s.arrivals  # its place was one of an older round
        _record(s, "restored", node, "the server had forgotten this round")
    if known.epoch != s.epoch:
        return
    same_round = (known.size, known.master, known.completed_at) == (s.size, s.master, s.completed_at)
    if node in s.members and not (same_round and s.ranks[node] == known.rank):
        _lose(s, node, "holds another round of the same epoch")
    if s.restoring is None or node in s.ranks or not same_round or known.rank in s.ranks.values():
        return
    s.candidates.pop(node, None)
    s.ranks[node], s.leases[node] = known.rank, now + _settings(s).lease
    s.members.add(node)
    if len(s.ranks) == s.size:
        s.restoring = None
        if s.candidates and _size(s) < _settings(s).max:
            first = min(s.candidates, key=lambda candidate: s.candidates[candidate])
            _break_round(s, f"{first} waits to join", "waits")


def _size(s: State) -> int:
    assert s.size is not None
    return s.size


def _settings(s: State) -> Settings:
    assert s.settings is not None
    return s.settings


def _wake(s: State, event: str, reason: str) -> None:
    s.wake = (*s.wake, Wake(event, s.epoch or 0, reason, len(s.candidates), s.member_lost or 0))


def _record(s: State, event: str, node: str, reason: str) -> None:
    s.events = (*s.events, Event(event, s.epoch or 0, s.size or 0, node, reason))


def _close(s: State, why: str, node: str, *, stop: bool) -> None:
    s.closed, s.stop, s.deadline = why, 1 if stop else None, None
    event = "stopped" if stop else "closed"
    _record(s, event, node, why)
    _wake(s, event, why)


def _break_round(s: State, reason: str, because: str, *, innocent: bool = False) -> None:
    """Tell the members to regroup: once per round, once more when the first is gone, and when the first is lost."""
    first_gone = because != "waits" and len(s.members) == _size(s) - 1
    first_lost = because == "lost" and s.member_lost is None
    if first_lost:
        s.member_lost = 1
        if innocent and s.charged == s.epoch and s.closed is None:  # its peers failed because of it: they get it back
            assert s.restarts is not None
            assert s.idle is not None
            _unblame(s)
            s.charged, s.restarts, s.idle = None, s.restarts - 1, max(0, s.idle - 1)
    if s.broken is None or first_gone or first_lost:
        s.broken = s.broken or reason
        _wake(s, "broken", reason)


def _has_failed(s: State, node: str) -> bool:
    """Whether workers of the node failed in the last round."""
    return node in s.failed and s.failed[node] == s.epoch


def _remove(s: State, node: str) -> None:
    """Take a node out of everything."""
    s.members.discard(node)
    for mapping in (s.leases, s.endpoints, s.labels, s.candidates, s.draining, s.failed):
        mapping.pop(node, None)


def _lose(s: State, node: str, reason: str) -> None:
    was_member, had_failed = node in s.members, _has_failed(s, node)
    _remove(s, node)
    _record(s, "lost", node, reason)
    if was_member:
        _break_round(s, f"{node} {reason}", "lost", innocent=not had_failed)


def _open_roll_call(s: State, now: int, node: str, timeout: int) -> None:
    s.roll_called_at, s.roll_called_by, s.roll_timeout = now, node, timeout
    s.roll_until = now + int(min(0.8 * timeout + 0.2 * len(s.leases), _settings(s).lease / 2))
    s.leases = {other: min(at, s.roll_until) for other, at in s.leases.items()}
    assert s.epoch is not None
    s.wake = (*s.wake, RollCallWake("roll_call", s.epoch, now))


def _renew(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """Renew a lease, during a roll call only if the node knows of it."""
    if _to_answer(s, node, known):
        assert s.roll_until is not None
        s.leases[node] = s.roll_until
    else:
        s.leases[node] = now + settings.lease


def _to_answer(s: State, node: str, known: Known) -> int:
    """The roll call that a node has to answer, or 0."""
    if s.roll_until is None or known.heard == s.roll_called_at or s.leases.get(node, s.roll_until + 1) > s.roll_until:
        return 0
    return s.roll_called_at or 0


def _end_roll_call(s: State) -> None:
    s.roll_called_at = s.roll_called_by = s.roll_timeout = s.roll_until = s.roll_last_chance = s.roll_again = None


def _judge_roll_call(s: State, now: int, *, steady: int) -> None:
    """I9: nobody is out for the server's being frozen or away: hence a last chance, and who was away judges nobody."""
    if s.roll_until is None or s.roll_timeout is None or now < s.roll_until:
        return
    silent = [node for node, at in s.leases.items() if at <= s.roll_until]
    if not steady:
        assert s.roll_called_at is not None
        s.leases |= dict.fromkeys(silent, max(s.roll_called_at + _settings(s).lease, now + _settings(s).interval))
        _end_roll_call(s)
    elif s.roll_last_chance is None:
        more = min(0.2 * s.roll_timeout + 0.2 * len(silent), _settings(s).lease / 4)
        s.roll_last_chance, s.roll_until = 1, now + math.ceil(more)
        s.leases |= dict.fromkeys(silent, s.roll_until)


def _roll_call_is_over(s: State, now: int) -> bool:
    if s.roll_until is None:
        return True
    if any(at <= s.roll_until for at in s.leases.values()):
        return False
    called_at, called_by, timeout, again = s.roll_called_at, s.roll_called_by, s.roll_timeout, s.roll_again
    assert called_at is not None
    assert called_by is not None
    assert timeout is not None
    assert s.epoch is not None
    _end_roll_call(s)
    if s.member_lost is None:
        s.roll_answered = called_at
        seconds = (now - called_at) / 1000
        _record(s, "roll_call", called_by, f"{len(s.leases)} nodes are there: all answered within {seconds:.3f} s")
        s.wake = (*s.wake, RollCallWake("answered", s.epoch, called_at))
        if again and s.leases:
            _open_roll_call(s, now, again, timeout)
    return s.roll_until is None


def _reap(s: State, now: int, *, steady: int) -> bool:
    """I7: who has not renewed is out. I9: unless nobody could, because the server was away or its clock went back.

    Returns whether it was.
    """
    silence = 0 if s.beat_at is None else now - s.beat_at
    s.beat_at = now
    if s.settings and (silence > 1.5 * s.settings.interval or silence < 0):
        if s.leases:
            what = "no heartbeat for" if silence > 0 else "the server's clock went back by"
            _record(s, "outage", "", f"{what} {abs(silence) / 1000:.1f} s: every lease starts anew")
        s.leases = dict.fromkeys(s.leases, now + s.settings.lease)
        _end_roll_call(s)
        if silence < 0:
            s.deadline = s.roll_answered = None  # they were set by another clock
        s.restoring = None if s.restoring is None else now + s.settings.lease
        return True
    _judge_roll_call(s, now, steady=steady)
    for node in sorted((node for node, at in s.leases.items() if at <= now), key=lambda node: (s.leases[node], node)):
        if s.roll_called_at is not None and s.leases[node] == s.roll_until:
            within = (now - s.roll_called_at) / 1000
            _lose(s, node, f"did not answer the roll call of {s.roll_called_by} within {within:.1f} s")
            continue
        since = now - s.leases[node] + (s.settings.lease if s.settings else 0)
        _lose(s, node, f"lost its lease after {since / 1000:.1f} s")
    if s.restoring is not None and now >= s.restoring:
        s.restoring = None
        missing = _size(s) - len(s.ranks)
        _break_round(s, f"{missing} of its nodes did not come back after the server forgot it", "lost", innocent=True)
    if s.settings and len(s.candidates) < s.settings.min:
        s.deadline = None  # whoever comes next begins a new last call
    return False


def _try_complete(s: State, now: int) -> None:
    """I6: complete the rendezvous if it can be, else set the deadline at which it can."""
    if not _roll_call_is_over(s, now):
        return
    if s.closed is not None or s.settings is None or len(s.candidates) < s.settings.min:  # I5, I3
        s.deadline = None
        return
    if s.members or s.restoring is not None:
        return  # I1: one of them may still be training
    n = len(s.candidates)
    continues = min(s.candidates.values()) < 0  # who is left of the last round is here, so everybody alive is
    if n >= s.settings.max:
        _complete(s, now, "max_nodes joined")
    elif continues and (n >= _size(s) or s.settings.replacement == 0):
        _complete(s, now, "every live node joined")
    else:
        if s.deadline is None:
            s.deadline = now + (s.settings.replacement if continues else s.settings.last_call)
            if s.size is not None:
                _wake(s, "deadline", "")  # for those who asked before
        if now >= s.deadline:
            _complete(s, now, "replacement_timeout passed" if continues else "last_call_timeout passed")


def _complete(s: State, now: int, reason: str) -> None:
    assert s.settings is not None
    assert s.epoch is not None
    places = s.candidates
    s.lost = (s.size or 0) - sum(place < 0 for place in places.values())
    chosen = sorted(places, key=lambda node: places[node])[: s.settings.max]  # I3
    s.ranks = _assign(chosen, places, s.labels)
    s.members = set(chosen)
    s.candidates = {node: place for node, place in places.items() if node not in s.members}
    s.epoch += 1  # I4
    s.size = len(chosen)
    s.master = next(s.endpoints[node] for node, rank in s.ranks.items() if rank == 0)
    s.completed_at, s.broken, s.member_lost, s.deadline, s.roll_answered = now, None, None, None, None
    _record(s, "completed", next(node for node, rank in s.ranks.items() if rank == 0), reason)
    _wake(s, "complete", reason)


def _assign(chosen: list[str], places: dict[str, int], labels: dict[str, str]) -> dict[str, int]:
    """I2: former members keep their rank where it exists; the others fill the holes by label, then by place."""
    n = len(chosen)
    sticky = {node: places[node] - FORMER for node in chosen if places[node] < 0}
    ranks = {node: rank for node, rank in sticky.items() if rank < n}
    homeless = sorted(
        (node for node in chosen if node not in ranks), key=lambda node: (labels.get(node, ""), places[node])
    )
    holes = [rank for rank in range(n) if rank not in ranks.values()]
    return ranks | dict(zip(homeless, holes, strict=True))
