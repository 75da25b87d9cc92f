"""The protocol as pure functions: what `redelastic/lua/{join,beat,leave,close}.lua` have to do, in plain Python.

A verb takes a state, the server's clock in milliseconds and its arguments, and returns the next state and the reply. It
never changes the state that it is given. Nothing here is fast or clever, on purpose: `test_oracle.py` holds the Lua
against it, `test_model.py` explores it. I1 to I9 are the guarantees of PROTOCOL.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

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
    broken: str | None = None
    member_lost: int | None = None
    deadline: int | None = None
    beat_at: int | None = None
    arrivals: int = 0
    ranks: dict[str, int] = field(default_factory=dict)  # of the last round, as it was completed
    members: set[str] = field(default_factory=set)  # those of `ranks` that still hold the round
    candidates: dict[str, int] = field(default_factory=dict)  # place of everybody who waits for the next round
    leases: dict[str, int] = field(default_factory=dict)  # when they run out, of all members and candidates
    endpoints: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)  # nodes that have gone for good
    wake: tuple[Wake, ...] = ()

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
        )

    @property
    def full(self) -> bool:
        """Whether the last round has max_nodes, all of them still there: who waits then is a spare."""
        return self.settings is not None and self.size == self.settings.max == len(self.members)


class Join(NamedTuple):
    """`after` is the last epoch that the node held, 0 if none."""

    node: str
    after: int
    endpoint: str
    label: str
    settings: Settings


class Beat(NamedTuple):
    node: str
    lease: int


class Leave(NamedTuple):
    node: str
    reason: str
    finished: bool


class Close(NamedTuple):
    by: str
    ttl: int


Request = Join | Beat | Leave | Close


def apply(state: State, now: int, request: Request) -> tuple[State, Reply]:
    """Run the request's verb."""
    if isinstance(request, Join):
        return join(state, now, request)
    if isinstance(request, Beat):
        return beat(state, now, request)
    if isinstance(request, Leave):
        return leave(state, now, request)
    return close(state, now, request)


def join(state: State, now: int, request: Join) -> tuple[State, Reply]:
    """Ask for a place in a round later than `after`."""
    s, node = state.copy(), request.node
    if node in s.left:
        return s, ("left",)  # I8: a late copy must not bring a node back that has gone
    _reap(s, now)
    if s.closed is not None:
        was_spare = s.candidates.get(node, -1) > 0 and s.settings is not None and s.size == s.settings.max
        return s, ("closed", s.closed, int(was_spare))  # I5
    if not s.leases or s.settings is None:
        s.settings, s.ttl = request.settings, request.settings.ttl  # nobody is there: this is the first node
    elif (request.settings.min, request.settings.max) != (s.settings.min, s.settings.max):
        _try_complete(s, now)
        return s, ("mismatch", s.settings.min, s.settings.max)
    if s.epoch is None or request.after > s.epoch:
        s.epoch = request.after  # I4: after a loss of data no epoch is given twice

    _enter(s, node, request)
    s.leases[node] = now + request.settings.lease
    _try_complete(s, now)

    if s.epoch > request.after and node in s.members:
        return s, ("complete", s.epoch, s.ranks[node], _size(s), s.master or "", s.lost or 0)
    wait = -1 if s.deadline is None else max(0, s.deadline - now)
    return s, ("waiting", s.epoch, len(s.wake), wait, int(s.full))


def _enter(s: State, node: str, request: Join) -> None:
    assert s.epoch is not None
    assert s.settings is not None
    if node in s.members and s.epoch <= request.after:  # it gives its round up
        s.members.remove(node)
        s.candidates[node] = FORMER + s.ranks[node]
        _break_round(s, f"{node} regroups", "regroups")
    elif node in s.members or node in s.candidates:
        return  # asked again, or a late copy, whose endpoint is gone by now
    else:
        s.arrivals += 1
        s.candidates[node] = s.arrivals
        if s.members and _size(s) < s.settings.max:
            _break_round(s, f"{node} waits to join", "waits")
    s.endpoints[node] = request.endpoint
    if request.label:
        s.labels[node] = request.label


def beat(state: State, now: int, request: Beat) -> tuple[State, Reply]:
    """Renew the node's lease, and tell it how its run stands."""
    s, node = state.copy(), request.node
    if s.epoch is None:
        return s, ("unknown", 0, "", 0, s.closed or "", -1)  # I9: the data are gone, so nobody is judged
    _reap(s, now)
    if node in s.leases:
        s.leases[node] = now + request.lease
    _try_complete(s, now)
    standing = "member" if node in s.members else "candidate" if node in s.candidates else "fenced"
    others = [at for other, at in s.leases.items() if other != node]
    expires_in = max(0, min(others) - now) if others else -1
    return s, (standing, s.epoch, s.broken or "", len(s.candidates), s.closed or "", expires_in)


def leave(state: State, now: int, request: Leave) -> tuple[State, Reply]:
    """Take a node out of the run for good; a member that has finished closes the run."""
    s, node = state.copy(), request.node
    if s.ttl is None:
        return s, ()  # nothing of this run is there
    if node in s.left:
        return s, ()
    _reap(s, now)
    s.left.add(node)
    was_member = _remove(s, node)
    if was_member and s.closed is None:
        if request.finished and s.broken is None:  # the others finish too; else they have to go on without it
            s.closed = node
            _wake(s, "closed", f"{node} finished")
        else:
            _break_round(s, f"{node} {request.reason}", "lost")
    _try_complete(s, now)
    return s, ()


def close(state: State, now: int, request: Close) -> tuple[State, Reply]:  # noqa: ARG001
    """No round is completed any more."""
    s = state.copy()
    s.ttl = request.ttl if s.ttl is None else s.ttl
    if s.closed is None:
        s.closed, s.deadline = request.by, None
        _wake(s, "closed", request.by)
    return s, (s.closed,)


# What the verbs share. These work on a verb's own copy of the state.


def _size(s: State) -> int:
    assert s.size is not None
    return s.size


def _wake(s: State, event: str, reason: str) -> None:
    s.wake = (*s.wake, Wake(event, s.epoch or 0, reason, len(s.candidates), s.member_lost or 0))


def _break_round(s: State, reason: str, because: str) -> None:
    """Tell the members to regroup: once per round, once more when the first is gone, and when the first is lost."""
    first_gone = because != "waits" and len(s.members) == _size(s) - 1
    first_lost = because == "lost" and s.member_lost is None
    s.member_lost = 1 if first_lost else s.member_lost
    if s.broken is None or first_gone or first_lost:
        s.broken = s.broken or reason
        _wake(s, "broken", reason)


def _remove(s: State, node: str) -> bool:
    """Take a node out of everything; returns whether it held the round."""
    was_member = node in s.members
    s.members.discard(node)
    for mapping in (s.leases, s.endpoints, s.labels, s.candidates):
        mapping.pop(node, None)
    return was_member


def _reap(s: State, now: int) -> None:
    """I7: who has not renewed is out. I9: unless nobody could, because the server was away or its clock went back."""
    silence = 0 if s.beat_at is None else now - s.beat_at
    if s.settings and (silence > 1.5 * s.settings.interval or silence < 0):
        s.leases = dict.fromkeys(s.leases, now + s.settings.lease)
        s.deadline = None if silence < 0 else s.deadline  # it was set by another clock
        s.beat_at = now
        return
    s.beat_at = now
    for node in sorted((node for node, at in s.leases.items() if at <= now), key=lambda node: (s.leases[node], node)):
        if _remove(s, node):
            _break_round(s, f"{node} lost its lease", "lost")
    if s.settings and len(s.candidates) < s.settings.min:
        s.deadline = None  # whoever comes next begins a new last call


def _try_complete(s: State, now: int) -> None:
    """I6: complete the rendezvous if it can be, else set the deadline at which it can."""
    if s.closed is not None or s.settings is None or len(s.candidates) < s.settings.min:  # I5, I3
        s.deadline = None
        return
    if s.members:
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
    s.completed_at, s.broken, s.member_lost, s.deadline = now, None, None, None
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
