"""What must hold in each state of the model, and for each step to it."""

from __future__ import annotations

from tests.proofs.oracle_state import FORMER, Charge, Request, Settings, State


def check_failures(s: State, old: State, request: Request, story: tuple[str, ...]) -> None:
    """Failures are counted once a round, and not in a round that first lost a member."""
    assert set(s.draining) | set(s.failed) <= set(s.leases), ("what is known of a node goes with it", story)
    counted, before = s.restarts or 0, old.restarts or 0
    if isinstance(request, Charge):
        assert (s.members, s.candidates, s.epoch) == (old.members, old.candidates, old.epoch), (
            "a charge moves nobody",
            story,
        )
        assert before <= counted <= before + (old.charged != s.epoch and not old.member_lost), ("once a round", story)
        assert (s.closed == old.closed) or (s.stop and request.final and s.epoch in (s.charged, s.judged)), (
            "stopped without a verdict",
            story,
        )
        return
    gone = [event for event in s.events if event.event in ("lost", "left") and event.node in old.members]
    given_back = 0
    if gone and old.charged == old.epoch and not old.member_lost and s.closed is None:
        given_back = int(old.failed.get(gone[0].node) != old.epoch)
    assert counted == before - given_back, ("a failure because of a lost member is not charged", story)
    assert sum(s.failures.values()) == sum(old.failures.values()) - given_back, ("nor counted against its host", story)


def check_round(state: State, old: State, request: Request, settings: Settings, story: tuple[str, ...]) -> None:
    ranks = state.ranks
    assert state.members == set(ranks), ("I2", story)
    assert sorted(ranks.values()) == list(range(len(ranks))), ("I2", story)
    assert state.size == len(ranks), ("I2", story)
    assert settings.min <= len(ranks) <= settings.max, ("I3", story)
    for node, place in old.candidates.items():
        if node in ranks and 0 <= place - FORMER < len(ranks) and place < 0 and node != request[0]:
            assert ranks[node] == place - FORMER, ("sticky", story)


def check_state(s: State, settings: Settings, story: tuple[str, ...]) -> None:
    assert set(s.leases) == s.members | set(s.candidates), ("a lease for each", story)
    assert not s.members & set(s.candidates), ("I1", story)
    assert s.members <= set(s.ranks), ("I2", story)
    assert not s.left & set(s.leases), ("I8: a node that has left is out", story)
    may = s.closed is None and not s.members and len(s.candidates) >= settings.min and s.roll_until is None
    assert may == (s.deadline is not None), ("I6: it is complete, or the deadline is set", story)
    assert not may or len(s.candidates) < settings.max, ("I6: at once when max_nodes have joined", story)
    if s.members and len(s.members) < len(s.ranks) and s.closed is None:
        assert s.broken, ("I7", story)
