"""Stories of rounds, roll calls, charged restarts, drains and endings as golden transcripts (see `stories.py`)."""

from __future__ import annotations

import pytest
import redis

from tests.proofs.oracle import apply
from tests.proofs.oracle_state import Join, Leave, Settings, State
from tests.proofs.stories import play, read_stories
from tests.proofs.twin import START, Server

STORIES = read_stories("rounds") | read_stories("roll_calls") | read_stories("charges")


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories_match_their_transcripts(story: str, client: redis.Redis) -> None:
    assert play(story) == story
    assert play(story, Server(client)) == story


def test_a_reap_checks_whether_the_round_can_complete() -> None:
    short = Settings(1, 3, lease=2000)
    state = apply(State(), START, Join("a", 0, "a:1", "", short))[0]
    state = apply(state, START, Join("b", 0, "b:1", "", short))[0]
    state = apply(state, START + 1, Leave("b", ("reason", "left"), "goes on"))[0]
    state = apply(state, START + 2000, Join("b", 0, "b:1", "", short))[0]  # a late copy, when a is dead
    reply = apply(state, START + 2900, Join("c", 0, "c:1", "", short))[1]
    assert reply == ("waiting", 0, 0, 3000, 0, 0, 0), (
        "c is the first of a new rendezvous: it waits for the whole last call"
    )
