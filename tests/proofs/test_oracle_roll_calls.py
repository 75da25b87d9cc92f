"""Stories of roll calls as golden transcripts (`stories.py` says how to read them)."""

from __future__ import annotations

import pytest
import redis

from tests.proofs.stories import play, read_stories
from tests.proofs.twin import Server

STORIES = read_stories("roll_calls")


@pytest.mark.parametrize("title", STORIES)
def test_stories_match_their_transcripts(title: str, client: redis.Redis) -> None:
    assert play(STORIES[title]) == STORIES[title]
    assert play(STORIES[title], Server(client)) == STORIES[title]
