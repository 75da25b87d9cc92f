"""The stories of roll calls, as golden transcripts (`stories.py` says how to read them)."""

from __future__ import annotations

import pytest
import redis

from tests.proofs.stories import read_stories, tell
from tests.proofs.twin import Server

STORIES = read_stories("roll_calls")


@pytest.mark.parametrize("title", STORIES)
def test_stories_go_as_told(title: str, client: redis.Redis) -> None:
    assert tell(STORIES[title]) == STORIES[title]
    assert tell(STORIES[title], Server(client)) == STORIES[title]
