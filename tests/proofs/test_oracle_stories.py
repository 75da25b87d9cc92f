"""The stories of rounds, drains and endings that matter, as golden transcripts (`stories.py` says how to read them)."""

from __future__ import annotations

from typing import Final

import pytest
import redis

from tests.proofs.oracle import apply
from tests.proofs.oracle_state import Join, Leave, Settings, State
from tests.proofs.stories import tell
from tests.proofs.twin import START, Server

STORIES: Final = {
    "first formation": """
     0  a joins of 2:3                 -> waiting, 0, 0, -1, 0, 0
     0  b joins of 2:3                 -> waiting, 0, 0, 3000, 0, 0
  1000  a beats                        -> candidate, 0, -, 2, -, 5000, 0, -, 0
  1000  b beats                        -> candidate, 0, -, 2, -, 6000, 0, -, 0
  2999  b joins of 2:3                 -> waiting, 0, 0, 1, 0, 0
  3000  b joins of 2:3                 -> complete, 1, 1, 2, a:1, 0
        | complete 1: last_call_timeout passed (0 waiting)
  3000  a joins of 2:3                 -> complete, 1, 0, 2, a:1, 0
""",
    "a member dies": """
     0  a joins of 2:3                 -> waiting, 0, 0, -1, 0, 0
     0  b joins of 2:3                 -> waiting, 0, 0, 3000, 0, 0
     0  c joins of 2:3                 -> complete, 1, 2, 3, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
  2000  b beats                        -> member, 1, -, 0, -, 4000, 0, -, 0
  2000  c beats                        -> member, 1, -, 0, -, 4000, 0, -, 0
  4000  b beats                        -> member, 1, -, 0, -, 2000, 0, -, 0
  4000  c beats                        -> member, 1, -, 0, -, 2000, 0, -, 0
  6000  c beats                        -> member, 1, a lost its lease after 6.0 s, 0, -, 4000, 0, -, 0
        | broken 1: a lost its lease after 6.0 s (0 waiting)
        * lost a: lost its lease after 6.0 s
  6001  c joins after 1 of 2:3         -> waiting, 1, 2, -1, 0, 0
  6002  b joins after 1 of 2:3         -> complete, 2, 1, 2, c:1, 1
        | complete 2: every live node joined (0 waiting)
  6003  c joins after 1 of 2:3         -> complete, 2, 0, 2, c:1, 1
  6004  a beats                        -> fenced, 2, -, 0, -, 5998, 0, -, 0
""",
    "a spare is promoted": """
     0  a joins of 2:2                 -> waiting, 0, 0, -1, 0, 0
     0  b joins of 2:2                 -> complete, 1, 1, 2, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  c joins of 2:2                 -> waiting, 1, 1, -1, 1, 0
    10  a leaves                       -> nothing
        | broken 1: a left (1 waiting)
        * left a: left
    11  c joins of 2:2                 -> waiting, 1, 2, -1, 0, 0
    12  b joins after 1 of 2:2         -> complete, 2, 1, 2, c:1, 1
        | complete 2: max_nodes joined (0 waiting)
    13  c joins of 2:2                 -> complete, 2, 0, 2, c:1, 1
""",
    "a late node finds room": """
     0  a joins from rack2 of 2:4      -> waiting, 0, 0, -1, 0, 0
     0  b joins from rack1 of 2:4      -> waiting, 0, 0, 3000, 0, 0
  2000  a beats                        -> candidate, 0, -, 2, -, 4000, 0, -, 0
  3000  b joins of 2:4                 -> complete, 1, 0, 2, b:1, 0
        | complete 1: last_call_timeout passed (0 waiting)
  3000  a joins of 2:4                 -> complete, 1, 1, 2, b:1, 0
  3500  c joins from rack2 of 2:4      -> waiting, 1, 2, -1, 0, 0
        | broken 1: c waits to join (1 waiting)
  3500  d joins from rack1 of 2:4      -> waiting, 1, 2, -1, 0, 0
  3501  a joins after 1 of 2:4         -> waiting, 1, 3, -1, 0, 0
        | broken 1: a regroups (3 waiting)
  3502  b joins after 1 of 2:4         -> complete, 2, 0, 4, b:1, 0
        | complete 2: max_nodes joined (0 waiting)
  3503  a joins after 1 of 2:4         -> complete, 2, 1, 4, b:1, 0
  3504  c joins of 2:4                 -> complete, 2, 3, 4, b:1, 0
""",
    "who has finished closes": """
     0  a joins of 2:3                 -> waiting, 0, 0, -1, 0, 0
     0  b joins of 2:3                 -> waiting, 0, 0, 3000, 0, 0
     0  c joins of 2:3                 -> complete, 1, 2, 3, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
    10  a finishes                     -> nothing
        | closed 1: a finished (0 waiting)
        * left a: finished
        * closed a: a finished
    11  b beats                        -> member, 1, -, 0, a finished, 5989, 0, -, 0
    12  b finishes                     -> nothing
        * left b: finished
    13  c joins after 1 of 2:3         -> closed, a finished, 0, 0
    14  d joins of 2:3                 -> closed, a finished, 0, 0
    15  d closes                       -> a finished
""",
    "the server was away": """
     0  a joins of 2:2                 -> waiting, 0, 0, -1, 0, 0
     0  b joins of 2:2                 -> complete, 1, 1, 2, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
  2000  a beats                        -> member, 1, -, 0, -, 4000, 0, -, 0
 60000  b beats                        -> member, 1, -, 0, -, 6000, 0, -, 0
        * outage: no heartbeat for 58.0 s: every lease starts anew
 62000  b beats                        -> member, 1, -, 0, -, 4000, 0, -, 0
 64000  b beats                        -> member, 1, -, 0, -, 2000, 0, -, 0
 66000  b beats                        -> member, 1, a lost its lease after 6.0 s, 0, -, -1, 0, -, 0
        | broken 1: a lost its lease after 6.0 s (0 waiting)
        * lost a: lost its lease after 6.0 s
""",
    "a late copy of a join": """
     0  a joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  b joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     1  b leaves                       -> nothing
        * left b: left
     2  b joins of 1:3                 -> left
""",
    "a node is drained": """
     0  a joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  b joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  c joins of 1:3                 -> complete, 1, 2, 3, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
    10  a drains                       -> 1
        | drain 1: a preempted (30000 ms)
        * drain a: preempted
    11  a drains                       -> 1
    12  a beats                        -> member, 1, -, 0, -, 5988, 0, 30000 preempted, 0
    13  b beats                        -> member, 1, -, 0, -, 5987, 0, -, 0
    14  x drains                       -> 0
    50  a leaves                       -> nothing
        | broken 1: a left (0 waiting)
        * left a: left
    51  a drains                       -> 0
    52  b joins after 1 of 1:3         -> waiting, 1, 3, -1, 0, 0
    53  c joins after 1 of 1:3         -> complete, 2, 0, 2, c:1, 1
        | complete 2: every live node joined (0 waiting)
""",
    "a drain ends with the node": """
     0  a joins of 1:1                 -> complete, 1, 0, 1, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  b joins of 1:1                 -> waiting, 1, 1, -1, 1, 0
     2  b drains                       -> 1
        * drain b: preempted
     3  b beats                        -> candidate, 1, -, 1, -, 5997, 0, 30000 preempted, 0
  2000  a beats                        -> member, 1, -, 1, -, 4003, 0, -, 0
  4000  a beats                        -> member, 1, -, 1, -, 2003, 0, -, 0
  6003  a beats                        -> member, 1, -, 0, -, -1, 0, -, 0
        * lost b: lost its lease after 6.0 s
  6004  b joins of 1:1                 -> waiting, 1, 1, -1, 1, 0
  6005  b beats                        -> candidate, 1, -, 1, -, 5998, 0, -, 0
""",
    "who was asked to drain before it is a member: the others hear of it once it is one": """
     0  a joins of 2:2                 -> waiting, 0, 0, -1, 0, 0
     1  a drains                       -> 1
        * drain a: preempted
     2  b joins of 2:2                 -> complete, 1, 1, 2, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
        | drain 1: a preempted (30000 ms)
     3  b joins after 1 of 2:2         -> waiting, 1, 3, -1, 0, 0
        | broken 1: b regroups (1 waiting)
     4  a joins after 1 of 2:2         -> complete, 2, 0, 2, a:1, 0
        | complete 2: max_nodes joined (0 waiting)
        | drain 2: a preempted (30000 ms)
""",
    "closed, then stopped": """
     0  a joins of 1:2                 -> waiting, 0, 0, 3000, 0, 0
     0  b joins of 1:2                 -> complete, 1, 1, 2, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  a closes                       -> by a
        | closed 1: by a (0 waiting)
        * closed: by a
     2  a beats                        -> member, 1, -, 0, by a, 5998, 0, -, 0
     3  b stops                        -> by a
        | stopped 1: by a (0 waiting)
        * stopped: by a
     4  a stops                        -> by a
     5  a beats                        -> member, 1, -, 0, by a, 5995, 1, -, 0
     6  a joins after 1 of 1:2         -> closed, by a, 0, 1
     7  a drains                       -> 1
        | drain 1: a preempted (30000 ms)
        * drain a: preempted
     8  a fails in 1 of 0/-/-, finally -> 0, 0, by a
""",
    "who gives up stops the others, but not in a round that is broken": """
     0  a joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  b joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  c joins of 1:3                 -> complete, 1, 2, 3, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  a leaves                       -> nothing
        | broken 1: a left (0 waiting)
        * left a: left
     2  b gives up                     -> nothing
        * left b: gave up
     3  c joins after 1 of 1:3         -> complete, 2, 0, 1, c:1, 2
        | complete 2: every live node joined (0 waiting)
     4  c gives up                     -> nothing
        | stopped 2: c gave up (0 waiting)
        * left c: gave up
        * stopped c: c gave up
     5  c joins after 2 of 1:3         -> left
""",
    "a spare leaves in peace when the others have finished": """
     0  a joins of 1:1                 -> complete, 1, 0, 1, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  b joins of 1:1                 -> waiting, 1, 1, -1, 1, 0
     2  a finishes                     -> nothing
        | closed 1: a finished (1 waiting)
        * left a: finished
        * closed a: a finished
     3  b joins of 1:1                 -> closed, a finished, 1, 0
""",
    "a late join does not bring back who has left before there was a run": """
     0  a finishes                     -> nothing
     1  a joins of 1:1                 -> left
""",
    "a dead job makes room for another": """
     0  a joins of 1:1                 -> complete, 1, 0, 1, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
 10000  b joins of 2:2                 -> mismatch, 1, 1, 6000, 2000
        * outage: no heartbeat for 10.0 s: every lease starts anew
 11500  b joins of 2:2                 -> mismatch, 1, 1, 6000, 2000
 13000  b joins of 2:2                 -> mismatch, 1, 1, 6000, 2000
 14500  b joins of 2:2                 -> mismatch, 1, 1, 6000, 2000
 16000  b joins of 2:2                 -> waiting, 1, 2, -1, 0, 0
        | broken 1: a lost its lease after 6.0 s (0 waiting)
        * lost a: lost its lease after 6.0 s
""",
    "everybody learns of a deadline": """
     0  a joins of 1:2                 -> waiting, 0, 0, 3000, 0, 0
     0  b joins of 1:2                 -> complete, 1, 1, 2, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
     1  c joins of 1:2                 -> waiting, 1, 1, -1, 1, 0
     2  a leaves                       -> nothing
        | broken 1: a left (1 waiting)
        * left a: left
     3  c joins of 1:2                 -> waiting, 1, 2, -1, 0, 0
     4  b leaves                       -> nothing
        | deadline 1:  (1 waiting)
        * left b: left
""",
    "a clock that goes back delays no round": """
900000  a joins of 2:3                 -> waiting, 0, 0, -1, 0, 0
900000  b joins of 2:3                 -> waiting, 0, 0, 3000, 0, 0
   100  b joins of 2:3                 -> waiting, 0, 0, 3000, 0, 0
        * outage: the server's clock went back by 899.9 s: every lease starts anew
""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories_go_as_told(story: str, client: redis.Redis) -> None:
    assert tell(story) == story
    assert tell(story, Server(client)) == story


def test_who_reaps_also_looks_whether_the_round_can_be() -> None:
    short = Settings(1, 3, lease=2000)
    state = apply(State(), START, Join("a", 0, "a:1", "", short))[0]
    state = apply(state, START, Join("b", 0, "b:1", "", short))[0]
    state = apply(state, START + 1, Leave("b", "left", "goes on"))[0]
    state = apply(state, START + 2000, Join("b", 0, "b:1", "", short))[0]  # a late copy, when a is dead
    reply = apply(state, START + 2900, Join("c", 0, "c:1", "", short))[1]
    assert reply == ("waiting", 0, 0, 3000, 0, 0), (
        "c is the first of a new rendezvous: it waits for the whole last call"
    )
