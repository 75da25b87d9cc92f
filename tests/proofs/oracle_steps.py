"""The steps that the oracle's verbs share: they change a state, which is the verb's own copy."""

from __future__ import annotations

import math

from tests.proofs.oracle_state import FORMER, DrainWake, Event, Known, RollCallWake, Settings, State, Wake


def restore(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """I9: put back what the server has forgotten. The highest epoch wins; of two rounds with one epoch, the first."""
    if known.closed and (s.closed is None or (known.stop and not s.stop)):
        s.ttl = settings.ttl if s.ttl is None else s.ttl
        close_run(s, s.closed or known.closed, node, stop=bool(known.stop))
    if s.closed is not None or node in s.left or known.rank >= known.size:
        return
    if known.epoch > (s.epoch or 0):
        s.settings, s.ttl = settings, settings.ttl
        s.epoch, s.size, s.master, s.completed_at = known.epoch, known.size, known.master, known.completed_at
        s.lost = 0
        s.restoring = now + settings.lease
        s.broken = s.member_lost = s.deadline = s.roll_answered = None
        end_roll_call(s)
        s.ranks, s.members = {}, set()
        for former in sorted((n for n, place in s.candidates.items() if place < 0), key=lambda n: s.candidates[n]):
            s.arrivals += 1
            s.candidates[former] = s.arrivals  # its place was one of an older round
        record(s, "restored", node, "the server had forgotten this round")
    if known.epoch != s.epoch:
        return
    same_round = (known.size, known.master, known.completed_at) == (s.size, s.master, s.completed_at)
    if node in s.members and not (same_round and s.ranks[node] == known.rank):
        lose(s, node, "holds another round of the same epoch")
    if s.restoring is None or node in s.ranks or not same_round or known.rank in s.ranks.values():
        return
    s.candidates.pop(node, None)
    s.ranks[node], s.leases[node] = known.rank, now + settings_of(s).lease
    s.members.add(node)
    if len(s.ranks) == s.size:
        s.restoring = None
        if s.candidates and size_of(s) < settings_of(s).max:
            first = min(s.candidates, key=lambda candidate: s.candidates[candidate])
            break_round(s, f"{first} waits to join", "waits")


def size_of(s: State) -> int:
    assert s.size is not None
    return s.size


def settings_of(s: State) -> Settings:
    assert s.settings is not None
    return s.settings


def wake(s: State, event: str, reason: str) -> None:
    s.wake = (*s.wake, Wake(event, s.epoch or 0, reason, len(s.candidates), s.member_lost or 0))


def record(s: State, event: str, node: str, reason: str) -> None:
    s.events = (*s.events, Event(event, s.epoch or 0, s.size or 0, node, reason))


def close_run(s: State, why: str, node: str, *, stop: bool) -> None:
    s.closed, s.stop, s.deadline = why, 1 if stop else None, None
    event = "stopped" if stop else "closed"
    record(s, event, node, why)
    wake(s, event, why)


def break_round(s: State, reason: str, because: str, *, innocent: bool = False) -> None:
    """Tell the members to regroup: once per round, once more when the first is gone, and when the first is lost."""
    first_gone = because != "waits" and len(s.members) == size_of(s) - 1
    first_lost = because == "lost" and s.member_lost is None
    if first_lost:
        s.member_lost = 1
        if innocent and s.charged == s.epoch and s.closed is None:  # its peers failed because of it: they get it back
            assert s.restarts is not None
            assert s.idle is not None
            unblame(s)
            s.charged, s.restarts, s.idle = None, s.restarts - 1, max(0, s.idle - 1)
    if s.broken is None or first_gone or first_lost:
        s.broken = s.broken or reason
        wake(s, "broken", reason)


def has_failed(s: State, node: str) -> bool:
    """Whether workers of the node failed in the last round."""
    return node in s.failed and s.failed[node] == s.epoch


def remove(s: State, node: str) -> None:
    """Take a node out of everything."""
    s.members.discard(node)
    for mapping in (s.leases, s.endpoints, s.labels, s.candidates, s.draining, s.failed):
        mapping.pop(node, None)


def lose(s: State, node: str, reason: str) -> None:
    was_member, had_failed = node in s.members, has_failed(s, node)
    remove(s, node)
    record(s, "lost", node, reason)
    if was_member:
        break_round(s, f"{node} {reason}", "lost", innocent=not had_failed)


def open_roll_call(s: State, now: int, node: str, timeout: int) -> None:
    s.roll_called_at, s.roll_called_by, s.roll_timeout = now, node, timeout
    s.roll_until = now + int(min(0.8 * timeout + 0.2 * len(s.leases), settings_of(s).lease / 2))
    s.leases = {other: min(at, s.roll_until) for other, at in s.leases.items()}
    assert s.epoch is not None
    s.wake = (*s.wake, RollCallWake("roll_call", s.epoch, now))


def renew(s: State, now: int, node: str, settings: Settings, known: Known) -> None:
    """Renew a lease, during a roll call only if the node knows of it. I9: of nodes that differ the slowest counts."""
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
    """I9: nobody is out for the server's being frozen or away: hence a last chance, and who was away judges nobody."""
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
        seconds = (now - called_at) / 1000
        record(s, "roll_call", called_by, f"{len(s.leases)} nodes are there: all answered within {seconds:.3f} s")
        s.wake = (*s.wake, RollCallWake("answered", s.epoch, called_at))
        if again and s.leases:
            open_roll_call(s, now, again, timeout)
    return s.roll_until is None


def reap(s: State, now: int, *, steady: int) -> bool:
    """I7: who has not renewed is out. I9: unless nobody could, because the server was away or its clock went back.

    Returns whether it was.
    """
    silence = 0 if s.beat_at is None else now - s.beat_at
    s.beat_at = now
    if s.settings and (silence > 1.5 * s.settings.interval or silence < 0):
        if s.leases:
            what = "no heartbeat for" if silence > 0 else "the server's clock went back by"
            record(s, "outage", "", f"{what} {abs(silence) / 1000:.1f} s: every lease starts anew")
        s.leases = dict.fromkeys(s.leases, now + s.settings.lease)
        end_roll_call(s)
        if silence < 0:
            s.deadline = s.roll_answered = None  # they were set by another clock
        s.restoring = None if s.restoring is None else now + s.settings.lease
        return True
    judge_roll_call(s, now, steady=steady)
    for node in sorted((node for node, at in s.leases.items() if at <= now), key=lambda node: (s.leases[node], node)):
        if s.roll_called_at is not None and s.leases[node] == s.roll_until:
            within = (now - s.roll_called_at) / 1000
            lose(s, node, f"did not answer the roll call of {s.roll_called_by} within {within:.1f} s")
            continue
        since = now - s.leases[node] + (s.settings.lease if s.settings else 0)
        lose(s, node, f"lost its lease after {since / 1000:.1f} s")
    if s.restoring is not None and now >= s.restoring:
        s.restoring = None
        missing = size_of(s) - len(s.ranks)
        if s.closed is None:  # else those that are there may finish
            break_round(
                s, f"{missing} of its nodes did not come back after the server forgot it", "lost", innocent=True
            )
    if s.settings and len(s.candidates) < s.settings.min:
        s.deadline = None  # whoever comes next begins a new last call
    return False


def try_complete(s: State, now: int) -> None:
    """I6: complete the rendezvous if it can be, else set the deadline at which it can."""
    if not roll_call_is_over(s, now):
        return
    if s.closed is not None or s.settings is None or len(s.candidates) < s.settings.min:  # I5, I3
        s.deadline = None
        return
    if s.members or s.restoring is not None:
        return  # I1: one of them may still be training
    n = len(s.candidates)
    continues = min(s.candidates.values()) < 0  # who is left of the last round is here, so everybody alive is
    if n >= s.settings.max:
        complete(s, now, "max_nodes joined")
    elif continues and (n >= size_of(s) or s.settings.replacement == 0):
        complete(s, now, "every live node joined")
    else:
        if s.deadline is None:
            s.deadline = now + (s.settings.replacement if continues else s.settings.last_call)
            if s.size is not None:
                wake(s, "deadline", "")  # for those who asked before
        if now >= s.deadline:
            complete(s, now, "replacement_timeout passed" if continues else "last_call_timeout passed")


def complete(s: State, now: int, reason: str) -> None:
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
    record(s, "completed", next(node for node, rank in s.ranks.items() if rank == 0), reason)
    wake(s, "complete", reason)
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
