"""The steps that the oracle's verbs share: they change a state, which is the verb's own copy."""

from __future__ import annotations

import json
import math

from tests.proofs.oracle_state import (
    FORMER,
    PROTOCOL,
    DrainWake,
    Event,
    Known,
    RollCallWake,
    SaveWake,
    Settings,
    State,
    Wake,
    cause,
)


def restore(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """I9: put back what the server has forgotten. The highest epoch wins; of two rounds with one epoch, the first."""
    if not is_heard(s, now, known):
        return
    if known.closed and (s.closed is None or (known.stop and not s.stop)):
        s.ttl, s.protocol = settings.ttl if s.ttl is None else s.ttl, PROTOCOL
        s.closed = s.closed or known.closed
        close_run(s, node, *json.loads(known.closed)[2:], stop=bool(known.stop))
    if s.closed is not None or node in s.left or known.rank >= known.size:
        return
    if known.epoch > (s.epoch or 0):
        take_over(s, now, node, settings, known)
    if known.epoch != s.epoch or not is_same_run(s, known):
        return
    same_round = (known.size, known.master, known.completed_at) == (s.size, s.master, s.completed_at)
    if node in s.members and not (same_round and s.ranks[node] == known.rank):
        lose(s, node, "cause", "conflict")
    if s.restoring is None or node in s.ranks or not same_round or known.rank in s.ranks.values():
        return
    s.candidates.pop(node, None)
    s.ranks[node], s.leases[node] = known.rank, now + settings_of(s).lease
    s.members.add(node)
    if len(s.ranks) == s.size:
        s.restoring = None
        if s.candidates and size_of(s) < settings_of(s).max:
            first = min(s.candidates, key=lambda candidate: s.candidates[candidate])
            record_break(s, "joined", first)


def take_over(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """Put back a round that the server has forgotten."""
    if not is_same_run(s, known):
        for member in sorted(s.members):
            lose(s, member, "cause", "conflict")
    set_up(s, now, node, settings)
    s.incarnation = known.incarnation
    s.epoch, s.size, s.master, s.completed_at = known.epoch, known.size, known.master, known.completed_at
    s.lost = 0
    s.restoring = now + settings.lease
    s.broken = s.member_lost = s.deadline = s.roll_answered = None
    s.admit_from = s.admit_by = s.save = None
    end_roll_call(s)
    s.ranks, s.members = {}, set()
    for former in sorted((n for n, place in s.candidates.items() if place < 0), key=lambda n: s.candidates[n]):
        s.arrivals += 1
        s.candidates[former] = s.arrivals  # its place was one of an older round
    record(s, "restored", node)


def is_same_run(s: State, known: Known) -> bool:
    """Whether the node was in this run, or the run has had no round."""
    return not s.epoch or s.incarnation == known.incarnation


def is_heard(s: State, now: int, known: Known) -> bool:
    """I9: for 1.5 heartbeat intervals survivors of a loss of data win over a run that newcomers have formed."""
    return is_same_run(s, known) or now < (s.created_at or 0) + 1.5 * settings_of(s).interval


def set_up(s: State, now: int, node: str, settings: Settings) -> None:
    s.settings, s.ttl, s.protocol = settings, settings.ttl, PROTOCOL
    if s.incarnation is None:
        s.incarnation, s.created_at = node, now


def size_of(s: State) -> int:
    assert s.size is not None
    return s.size


def settings_of(s: State) -> Settings:
    assert s.settings is not None
    return s.settings


def wake(s: State, event: str, cause: str = "") -> None:
    s.wake = (*s.wake, Wake(event, s.epoch or 0, len(s.candidates), int(s.member_lost is not None), cause))


def record(s: State, event: str, node: str, *fields: str | int) -> None:
    s.events = (*s.events, Event(event, s.epoch or 0, s.size or 0, node, tuple(map(str, fields))))


def close_run(s: State, node: str, *fields: str | int, stop: bool) -> None:
    event = "stopped" if stop else "closed"
    s.closed = s.closed or cause(event, node, tuple(map(str, fields)))
    s.stop, s.deadline = 1 if stop else None, None
    record(s, event, node, *fields)
    wake(s, event, s.closed)


def ask_to_save(s: State, node: str, reason: str, timeout: int) -> int:
    """Ask the workers of all members to save; returns the place of the wake-up."""
    assert s.epoch is not None
    record(s, "save", node, "reason", reason, "timeout_ms", timeout)
    s.wake = (*s.wake, SaveWake("save", s.epoch, node, reason, timeout))
    return len(s.wake)


def newcomers(s: State) -> list[str]:
    """The nodes that wait to be let into a round that trains and has room, in order; none if there is no such round."""
    if s.broken or s.closed is not None or not s.members or size_of(s) >= settings_of(s).max:
        return []
    return sorted((node for node, place in s.candidates.items() if place > 0), key=lambda node: s.candidates[node])


def await_admission(s: State, now: int, node: str, timeout: int, interval: int, *, begins: bool) -> int | None:
    """Take the admission of new nodes a step further; returns in how many ms the next can follow, or -1; None: done."""
    if begins or s.admit_from is None:
        s.admit_from = now if s.lost else max(now, (s.completed_at or 0) + interval)
        s.admit_by = s.save = None
    if now < s.admit_from:
        return s.admit_from - now
    if timeout and s.save is None:
        s.save = ask_to_save(s, node, "", timeout)
        s.admit_by = now + timeout if timeout > 0 else None
    if timeout == 0 or (s.admit_by is not None and now >= s.admit_by):
        let_in(s, saved=0)
        return None
    return -1 if s.admit_by is None else max(0, s.admit_by - now)


def let_in(s: State, *, saved: int) -> None:
    node = newcomers(s)[0]
    record(s, "admitted", node, "breaks", 1, "saved", saved)
    break_round(s, "joined", node)


def record_break(s: State, event: str, node: str, *fields: str | int, innocent: bool = False) -> None:
    """Record it, and wake the members to regroup: once per round, again when the first is gone and when one is lost."""
    record(s, event, node, *(() if s.broken else ("breaks", 1)), *fields)
    break_round(s, event, node, *fields, innocent=innocent)


def break_round(s: State, event: str, node: str, *fields: str | int, innocent: bool = False) -> None:
    first_gone = event != "joined" and len(s.members) == size_of(s) - 1
    first_lost = event not in {"joined", "regrouped"} and s.member_lost is None
    if first_lost:
        s.member_lost = event
        if (
            innocent and s.charged == s.epoch and s.closed is None
        ):  # its peers failed because of it: give the restart back
            assert s.restarts is not None
            unblame(s)
            s.charged, s.restarts = None, s.restarts - 1
        too_short = event != "lost" or s.stepped != s.epoch
        if innocent and s.judged == s.epoch and too_short and s.closed is None:
            assert s.idle is not None
            s.judged, s.idle = None, max(0, s.idle - 1)
    if s.broken is None or first_gone or first_lost:
        why = cause(event, node, tuple(map(str, fields)))
        s.broken = s.broken or why
        wake(s, "broken", why)


def has_failed(s: State, node: str) -> bool:
    """Whether workers of the node failed in the last round."""
    return node in s.failed and s.failed[node] == s.epoch


def remove(s: State, node: str) -> None:
    """Remove a node from the run's record."""
    s.members.discard(node)
    for mapping in (s.leases, s.endpoints, s.labels, s.candidates, s.draining, s.failed):
        mapping.pop(node, None)


def lose(s: State, node: str, *fields: str | int) -> None:
    was_member, had_failed = node in s.members, has_failed(s, node)
    remove(s, node)
    if was_member:
        record_break(s, "lost", node, *fields, innocent=not had_failed)
    else:
        record(s, "lost", node, *fields)


def open_roll_call(s: State, now: int, node: str, timeout: int) -> None:
    s.roll_called_at, s.roll_called_by, s.roll_timeout = now, node, timeout
    s.roll_until = now + int(min(0.8 * timeout + 0.2 * len(s.leases), settings_of(s).lease / 2))
    s.leases = {other: min(at, s.roll_until) for other, at in s.leases.items()}
    assert s.epoch is not None
    s.wake = (*s.wake, RollCallWake("roll_call", s.epoch, now))


def renew(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """Renew a lease, during a roll call only if the node knows of it. I9: of nodes' settings the slowest count."""
    of_run = settings_of(s)
    slowest = {name: max(getattr(of_run, name), getattr(settings, name)) for name in ("lease", "interval")}
    s.settings = of_run._replace(**slowest)
    if to_answer(s, node, known):
        assert s.roll_until is not None
        s.leases[node] = s.roll_until
    else:
        s.leases[node] = now + s.settings.lease


def to_answer(s: State, node: str, known: Known) -> int:
    """The roll call that a node has to answer, or 0."""
    if s.roll_until is None or known.heard == s.roll_called_at or s.leases.get(node, s.roll_until + 1) > s.roll_until:
        return 0
    return s.roll_called_at or 0


def end_roll_call(s: State) -> None:
    s.roll_called_at = s.roll_called_by = s.roll_timeout = s.roll_until = s.roll_last_chance = s.roll_again = None


def judge_roll_call(s: State, now: int, *, steady: int) -> None:
    """I9: no node is out for the server's freeze or absence: hence a last chance. A node that was away judges none."""
    if s.roll_until is None or s.roll_timeout is None or now < s.roll_until:
        return
    silent = [node for node, at in s.leases.items() if at <= s.roll_until]
    if not steady:
        assert s.roll_called_at is not None
        s.leases |= dict.fromkeys(silent, max(s.roll_called_at + settings_of(s).lease, now + settings_of(s).interval))
        end_roll_call(s)
    elif s.roll_last_chance is None:
        more = min(0.2 * s.roll_timeout + 0.2 * len(silent), settings_of(s).lease / 4)
        s.roll_last_chance, s.roll_until = 1, now + math.ceil(more)
        s.leases |= dict.fromkeys(silent, s.roll_until)


def roll_call_is_over(s: State, now: int) -> bool:
    if s.roll_until is None:
        return True
    if any(at <= s.roll_until for at in s.leases.values()):
        return False
    called_at, called_by, timeout, again = s.roll_called_at, s.roll_called_by, s.roll_timeout, s.roll_again
    assert called_at is not None
    assert called_by is not None
    assert timeout is not None
    assert s.epoch is not None
    end_roll_call(s)
    if s.member_lost is None:
        s.roll_answered = called_at
        record(s, "roll_call", called_by, "answers", len(s.leases), "took_ms", now - called_at)
        s.wake = (*s.wake, RollCallWake("answered", s.epoch, called_at))
        if again and s.leases:
            open_roll_call(s, now, again, timeout)
    return s.roll_until is None


def reap(s: State, now: int, *, steady: int) -> None:
    """I7: nodes that have not renewed are out. I9: unless none could, as the server was away or its clock went back."""
    silence = 0 if s.beat_at is None else now - s.beat_at
    s.beat_at = now
    if s.settings and (silence > 1.5 * s.settings.interval or silence < 0):
        s.outage_at = now
        if s.leases:
            record(s, "outage", "", "away_ms" if silence > 0 else "back_ms", abs(silence))
        s.leases = dict.fromkeys(s.leases, now + s.settings.lease)
        end_roll_call(s)
        if silence < 0:
            s.deadline = s.roll_answered = s.admit_from = s.admit_by = None  # they were set by another clock
        s.restoring = None if s.restoring is None else now + s.settings.lease
        return
    judge_roll_call(s, now, steady=steady)
    for node in sorted((node for node, at in s.leases.items() if at <= now), key=lambda node: (s.leases[node], node)):
        if s.roll_called_at is not None and s.leases[node] == s.roll_until:
            silent, caller = now - s.roll_called_at, s.roll_called_by or ""
            lose(s, node, "cause", "roll_call", "silent_ms", silent, "asked_by", caller)
            continue
        since = now - s.leases[node] + (s.settings.lease if s.settings else 0)
        lose(s, node, "cause", "lease", "silent_ms", since)
    if s.restoring is not None and now >= s.restoring:
        s.restoring = None
        missing = size_of(s) - len(s.ranks)
        if s.closed is None:  # else the members that are left may finish
            record_break(s, "missing", "", "missing", missing, innocent=True)
    if s.settings and len(s.candidates) < s.settings.min:
        s.deadline = None  # the next node begins a new last call


def try_complete(s: State, now: int) -> None:
    """I6: complete the rendezvous if possible, else set the deadline at which it will be."""
    if not roll_call_is_over(s, now):
        return
    if s.closed is not None or s.settings is None or len(s.candidates) < s.settings.min:  # I5, I3
        s.deadline = None
        return
    if s.members or s.restoring is not None:
        return  # I1: a member may still be training
    n = len(s.candidates)
    continues = min(s.candidates.values()) < 0  # the rest of the last round has joined, so every live node has
    if n >= s.settings.max:
        complete(s, now, "max_nodes")
    elif continues and (n >= size_of(s) or s.settings.replacement == 0):
        complete(s, now, "all_joined")
    else:
        if s.deadline is None:
            s.deadline = now + (s.settings.replacement if continues else s.settings.last_call)
            if s.size is not None:
                wake(s, "deadline")  # for nodes that asked before
        if now >= s.deadline:
            complete(s, now, "replacement" if continues else "last_call")


def complete(s: State, now: int, because: str) -> None:
    assert s.settings is not None
    assert s.epoch is not None
    places = s.candidates
    s.lost = (s.size or 0) - sum(place < 0 for place in places.values())
    chosen = sorted(places, key=lambda node: places[node])[: s.settings.max]  # I3
    s.ranks = assign(chosen, places, s.labels)
    s.members = set(chosen)
    s.candidates = {node: place for node, place in places.items() if node not in s.members}
    s.epoch += 1  # I4
    s.size = len(chosen)
    s.master = next(s.endpoints[node] for node, rank in s.ranks.items() if rank == 0)
    s.completed_at, s.broken, s.member_lost, s.deadline, s.roll_answered = now, None, None, None, None
    s.admit_from = s.admit_by = s.save = None
    members = sorted(s.ranks, key=lambda node: s.ranks[node])
    record(s, "completed", members[0], "because", because, "lost", s.lost, "members", " ".join(members))
    wake(s, "complete")
    for node in sorted(s.members & set(s.draining), key=lambda node: s.ranks[node])[:16]:
        timeout, _, why = s.draining[node].partition(" ")
        s.wake = (*s.wake, DrainWake("drain", s.epoch, node, why, int(timeout)))


def assign(chosen: list[str], places: dict[str, int], labels: dict[str, str]) -> dict[str, int]:
    """I2: former members keep their rank where it exists; the others fill the holes by label, then by place."""
    n = len(chosen)
    sticky = {node: places[node] - FORMER for node in chosen if places[node] < 0}
    ranks = {node: rank for node, rank in sticky.items() if rank < n}
    homeless = sorted(
        (node for node in chosen if node not in ranks), key=lambda node: (labels.get(node, ""), places[node])
    )
    holes = [rank for rank in range(n) if rank not in ranks.values()]
    return ranks | dict(zip(homeless, holes, strict=True))


def unblame(s: State) -> None:
    assert s.blamed is not None
    n = s.failures.pop(s.blamed, 0) - 1
    if n > 0:
        s.failures[s.blamed] = n
