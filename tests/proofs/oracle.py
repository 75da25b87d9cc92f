"""The protocol as pure functions: what the verbs in `redelastic/lua` do.

A verb takes a state, the server's clock in milliseconds and its arguments, and returns the next state and the reply. It
never changes the state that it is given. Nothing here is fast or clever, on purpose: `test_oracle.py` compares the
Lua with it, `test_model.py` explores it. I1 to I9 are the guarantees of PROTOCOL.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tests.proofs.oracle_state import (
    FORMER,
    PROTOCOL,
    Admit,
    Beat,
    Charge,
    Close,
    Drain,
    DrainWake,
    Join,
    Leave,
    Readmit,
    Reply,
    Request,
    RollCall,
    Save,
    State,
    cause,
)
from tests.proofs.oracle_steps import (
    ask_to_save,
    await_admission,
    close_run,
    has_failed,
    is_same_run,
    let_in,
    newcomers,
    open_roll_call,
    reap,
    record,
    record_break,
    remove,
    renew,
    restore,
    set_up,
    size_of,
    to_answer,
    try_complete,
    unblame,
    wake,
)


def apply(state: State, now: int, request: Request) -> tuple[State, Reply]:
    """Run the request's verb."""
    return VERBS[type(request)](state, now, request)


def join(state: State, now: int, request: Join) -> tuple[State, Reply]:
    """Ask for a place in a round later than `after`."""
    s, node = state.copy(), request.node
    if node in s.left:
        return s, ("left",)  # I8: a late copy must not bring a node back that has gone
    restore(s, now, node, request.settings, request.known)
    reap(s, now, steady=request.known.steady)
    if s.closed is not None:
        was_spare = s.candidates.get(node, -1) > 0 and s.settings is not None and s.size == s.settings.max
        return s, ("closed", s.closed, int(was_spare), s.stop or 0)  # I5
    if request.known.epoch > 0 and node not in s.members and node not in s.candidates:
        try_complete(s, now)
        return s, ("left",)  # I4: it held a round and has lost its lease
    if not s.leases or s.settings is None:
        set_up(s, now, node, request.settings)  # the run has no node: this is the first one
    elif (request.settings.min, request.settings.max) != (s.settings.min, s.settings.max):
        try_complete(s, now)
        return s, ("mismatch", s.settings.min, s.settings.max, s.settings.lease, s.settings.interval)
    if not is_same_run(s, request.known):
        request = request._replace(after=0)
    elif s.epoch is None or request.after > s.epoch:
        s.epoch = request.after  # I4: after a loss of data no epoch is given twice
        s.incarnation = request.known.incarnation or s.incarnation

    assert s.epoch is not None

    was_there = node in s.members or node in s.candidates
    was_member = node in s.members
    _enter(s, node, request)
    renew(s, now, node, request.settings, request.known)
    next_step = None
    if (request.admit_timeout or request.admit_interval) and not was_member and newcomers(s):
        begins = not was_there and len(newcomers(s)) == 1
        next_step = await_admission(s, now, node, request.admit_timeout, request.admit_interval, begins=begins)
    try_complete(s, now)

    if s.epoch > request.after and node in s.members:
        return s, (
            "complete",
            s.epoch,
            s.ranks[node],
            size_of(s),
            s.master or "",
            s.completed_at or 0,
            s.lost or 0,
            str(s.incarnation),
        )
    wait = max(0, s.deadline - now) if s.deadline is not None else -1 if next_step is None else next_step
    held = int(next_step is not None)
    return s, ("waiting", s.epoch, len(s.wake), wait, int(s.full), to_answer(s, node, request.known), held)


def _enter(s: State, node: str, request: Join) -> None:
    assert s.epoch is not None
    assert s.settings is not None
    if node in s.members and s.epoch <= request.after:  # it gives its round up
        s.members.remove(node)
        s.candidates[node] = FORMER + s.ranks[node]
        record_break(s, "regrouped", node, *(("parked", "1") if request.parked else ()))
    elif node in s.members or node in s.candidates:
        return  # asked again, or a late copy, whose endpoint is gone by now
    else:
        s.arrivals += 1
        s.candidates[node] = s.arrivals
        if s.members and size_of(s) < s.settings.max and not (request.admit_timeout or request.admit_interval):
            record_break(s, "joined", node)
        else:
            record(s, "joined", node)
    s.endpoints[node] = request.endpoint
    if request.label:
        s.labels[node] = request.label


def beat(state: State, now: int, request: Beat) -> tuple[State, Reply]:
    """Renew the node's lease, and report how its run stands."""
    s, node = state.copy(), request.node
    restore(s, now, node, request.settings, request.known)
    if s.epoch is None:  # I9: the data are gone, and this node knows of no round: it is not judged
        return s, ("unknown", 0, "", 0, s.closed or "", -1, s.stop or 0, "", 0)
    reap(s, now, steady=request.known.steady)
    if node in s.leases:
        renew(s, now, node, request.settings, request.known)
    try_complete(s, now)
    standing = "member" if node in s.members else "candidate" if node in s.candidates else "fenced"
    if standing == "fenced" and s.closed is not None and node not in s.ranks:
        standing = "unknown"  # I5: its round was forgotten, and is not put back
    others = [at for other, at in s.leases.items() if other != node]
    expires_in = max(0, min(others) - now) if others else -1
    run = (s.epoch, s.broken or "", len(s.candidates), s.closed or "", expires_in, s.stop or 0)
    return s, (standing, *run, s.draining.get(node, ""), to_answer(s, node, request.known))


def leave(state: State, now: int, request: Leave) -> tuple[State, Reply]:
    """Take a node out of the run for good; a member that has finished closes the run, or stops it."""
    s, node = state.copy(), request.node
    restore(s, now, node, request.settings, request.known)
    if s.ttl is None:  # the run does not exist yet: a late join may come
        s.left.add(node)
        return s, ()
    if node in s.left:
        return s, ()
    reap(s, now, steady=request.known.steady)
    s.left.add(node)
    was_here, was_member, had_failed = node in s.leases, node in s.members, has_failed(s, node)
    remove(s, node)
    fields = request.fields
    if was_member and s.closed is None and (request.run_then == "goes on" or s.broken is not None):
        record_break(s, "left", node, *fields, innocent=not had_failed)
    elif was_here:
        record(s, "left", node, *fields)
        if was_member and s.closed is None:  # the others finish too; in a broken round they go on
            close_run(s, node, *fields, stop=request.run_then == "stops")
    try_complete(s, now)
    return s, ()


def close(state: State, now: int, request: Close) -> tuple[State, Reply]:  # noqa: ARG001
    """No round is completed any more; a run that was closed may still be stopped."""
    s = state.copy()
    s.ttl, s.protocol = request.ttl if s.ttl is None else s.ttl, PROTOCOL
    if s.closed is None or (request.stop and not s.stop):
        close_run(s, "", "reason", request.why, stop=bool(request.stop))
    assert s.closed is not None
    return s, (s.closed,)


def drain(state: State, now: int, request: Drain) -> tuple[State, Reply]:
    """Ask a node to let its workers save and to leave: once, as long as it is there; a member's peers are woken."""
    s, node = state.copy(), request.node
    if node not in s.leases:
        return s, (0,)
    if node not in s.draining:
        s.draining[node] = f"{request.timeout} {request.reason}"
        record(s, "drain", node, "reason", request.reason, "timeout_ms", request.timeout)
        if node in s.members:
            assert s.epoch is not None
            s.drain_woke = f"{s.epoch} {now // 1000}"
            s.wake = (*s.wake, DrainWake("drain", s.epoch, node, request.reason, request.timeout))
    return s, (1,)


def save(state: State, now: int, request: Save) -> tuple[State, Reply]:  # noqa: ARG001
    """Ask the workers of all members to save."""
    s = state.copy()
    if not s.members or s.stop:
        return s, ()
    assert s.epoch is not None
    return s, (s.epoch, size_of(s), ask_to_save(s, "", *request))


def admit(state: State, now: int, request: Admit) -> tuple[State, Reply]:  # noqa: ARG001
    """Let new nodes in, since all members' workers have saved."""
    s = state.copy()
    if request.epoch != s.epoch or s.save is None or request.save != s.save or not newcomers(s):
        return s, (0,)
    let_in(s, saved=1)
    return s, (1,)


def charge(state: State, now: int, request: Charge) -> tuple[State, Reply]:
    """Count a failure of workers: once a round against the job, and against the host where one failed first."""
    s, node = state.copy(), request.node
    verdict = (s.closed or "") if s.stop else ""
    is_member = request.epoch == s.epoch and node in s.leases
    if is_member and not s.stop and not has_failed(s, node):
        s.failed[node] = request.epoch
        record(s, "failed", node, "age_ms", request.ago, "message", request.reason)
    if is_member and s.closed is None:  # I4
        if s.member_lost is None:  # else it failed because of that
            _count(s, now - request.ago, request)
        _judge(s, request)
        fields = _verdict(s, request)
        verdict = cause("stopped", node, tuple(map(str, fields))) if fields else ""
        if fields and request.final:
            close_run(s, node, *fields, stop=True)
    return s, (s.restarts or 0, s.failures.get(request.host, 0), verdict)


def readmit(state: State, now: int, request: Readmit) -> tuple[State, Reply]:  # noqa: ARG001
    """Forget a host's failures, so that its nodes are no longer kept out."""
    s = state.copy()
    if s.ttl is None or request.host not in s.failures:
        return s, (0,)
    del s.failures[request.host]
    record(s, "readmitted", request.host, "reason", request.by)
    wake(s, "readmit")
    return s, (1,)


def roll_call(state: State, now: int, request: RollCall) -> tuple[State, Reply]:
    """Open a roll call: a node that stays silent is out after `timeout` instead of a lease."""
    s, node, failed_at = state.copy(), request.node, now - request.ago
    if s.ttl is None:
        return s, ()  # the run does not exist
    reap(s, now, steady=1)
    was_away = s.outage_at is not None and failed_at <= s.outage_at  # I9: the others may still be looking for Redis
    refused = was_away or request.epoch != s.epoch or s.closed is not None or s.restoring is not None
    refused = refused or node not in s.members
    if not refused:
        if s.roll_called_at is not None:
            s.roll_again = node if s.roll_called_at < failed_at else s.roll_again
        elif s.member_lost is None and (s.roll_answered or 0) < failed_at:
            open_roll_call(s, now, node, request.timeout)
    try_complete(s, now)
    return s, () if refused else (failed_at, int((s.roll_answered or 0) >= failed_at))


def _count(s: State, failed_at: int, request: Charge) -> None:
    s.limit = request.limit if request.limit >= 0 else None
    if s.charged != request.epoch:
        s.failures = {host: n for host, n in s.failures.items() if _stays(s, host, n, request)}
        s.restarts = (s.restarts or 0) + 1
        s.charged = request.epoch
        _blame(s, request.host, failed_at)
    elif request.host and s.failed_at is not None and (not s.blamed or failed_at < s.failed_at):  # it reports late
        unblame(s)
        _blame(s, request.host, failed_at)


def _judge(s: State, request: Charge) -> None:
    step = min(request.step, 2**53 - 2)  # in Lua a number is exact below 2**53 only
    counts = request.news >= 0 if s.broken is None else request.news >= 1 and s.member_lost == "lost"
    if step >= (s.progress or 0) or request.news == 2:
        s.progress, s.idle, s.judged = max(s.progress or 0, step + 1), 0, request.epoch
    elif counts and s.judged != request.epoch:
        s.idle, s.judged = (s.idle or 0) + 1, request.epoch
    if request.news >= 1:
        s.stepped = request.epoch


def _verdict(s: State, request: Charge) -> tuple[str | int, ...]:
    """Why the run has to be stopped; empty if it does not have to be."""
    failure = "message", request.reason
    if s.judged == s.epoch and (s.idle or 0) >= max(1, request.patience) and request.patience >= 0:
        last_step = s.progress - 1 if s.progress else ""
        return ("cause", "progress", "restarts", s.idle or 0, "last_step", last_step, *failure)
    if s.charged == s.epoch and 0 <= request.budget < (s.restarts or 0):  # also when the charged node is lost by now
        return ("cause", "restarts", "restarts", request.budget, *failure)
    return ()


def _stays(s: State, host: str, n: int, request: Charge) -> bool:
    """Whether a host's failures in a row still count: the last round added one, or the host is barred."""
    return (s.charged == request.epoch - 1 and host == s.blamed) or 0 <= request.limit <= n


def _blame(s: State, host: str, failed_at: int) -> None:
    s.blamed, s.failed_at = host, failed_at
    if host:
        s.failures[host] = s.failures.get(host, 0) + 1


VERBS: Final[dict[type, Callable[[State, int, Any], tuple[State, Reply]]]] = {
    Join: join,
    Beat: beat,
    Leave: leave,
    Close: close,
    Drain: drain,
    Save: save,
    Admit: admit,
    Charge: charge,
    Readmit: readmit,
    RollCall: roll_call,
}
