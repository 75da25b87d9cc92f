"""The stories of rounds, drains and endings that matter, as golden transcripts (`stories.py` says how to read them)."""

from __future__ import annotations

import pytest
import redis

from tests.proofs.oracle import apply
from tests.proofs.oracle_state import Join, Leave, Settings, State
from tests.proofs.stories import read_stories, tell
from tests.proofs.twin import START, Server

STORIES = read_stories("rounds")


@pytest.mark.parametrize("title", STORIES)
def test_stories_go_as_told(title: str, client: redis.Redis) -> None:
    assert tell(STORIES[title]) == STORIES[title]
    assert tell(STORIES[title], Server(client)) == STORIES[title]


def test_who_reaps_also_looks_whether_the_round_can_be() -> None:
    short = Settings(1, 3, lease=2000)
    state = apply(State(), START, Join("a", 0, "a:1", "", short))[0]
    state = apply(state, START, Join("b", 0, "b:1", "", short))[0]
    state = apply(state, START + 1, Leave("b", ("reason", "left"), "goes on"))[0]
    state = apply(state, START + 2000, Join("b", 0, "b:1", "", short))[0]  # a late copy, when a is dead
    reply = apply(state, START + 2900, Join("c", 0, "c:1", "", short))[1]
    assert reply == ("waiting", 0, 0, 3000, 0, 0, 0), (
        "c is the first of a new rendezvous: it waits for the whole last call"
    )
