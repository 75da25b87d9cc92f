"""The stories of roll calls, as golden transcripts (`stories.py` says how to read them)."""

from __future__ import annotations

from typing import Final

import pytest
import redis

from tests.proofs.stories import tell
from tests.proofs.twin import Server

OF_THREE: Final = """
     0  a joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  b joins of 1:3                 -> waiting, 0, 0, 3000, 0, 0
     0  c joins of 1:3                 -> complete, 1, 2, 3, a:1, 0
        | complete 1: max_nodes joined (0 waiting)
"""  # how all of them begin
STORIES: Final = {
    "all are there: the failure is the workers' own": """
  1000  a calls 20 ago                 -> 1000000980, 0
        | roll_call 1
  1000  a calls 20 ago                 -> 1000000980, 0
  1001  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1001  b answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1003  c answers                      -> member, 1, -, 0, -, 5998, 0, -, 0
        | answered 1
        * roll_call a: 3 nodes are there: all answered within 0.003 s
  1004  a calls 24 ago                 -> 1000000980, 1
  1005  a joins after 1 of 1:3         -> waiting, 1, 4, -1, 0, 0
        | broken 1: a regroups (1 waiting)
""",
    "who stays silent is out": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1001  b answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1002  a joins after 1 of 1:3         -> waiting, 1, 3, -1, 0, 0
        | broken 1: a regroups (1 waiting)
  1003  b joins after 1 of 1:3         -> waiting, 1, 3, -1, 0, 0
  1400  b beats                        -> candidate, 1, a regroups, 2, -, 101, 0, -, 0
  1430  b beats                        -> candidate, 1, a regroups, 2, -, 71, 0, -, 0
  1501  b beats                        -> member, 2, -, 0, -, 5501, 0, -, 0
        | broken 1: c did not answer the roll call of a within 0.5 s (2 waiting)
        | complete 2: every live node joined (0 waiting)
        * lost c: did not answer the roll call of a within 0.5 s
  1502  a joins after 1 of 1:3         -> complete, 2, 0, 2, a:1, 1
  1600  c beats                        -> fenced, 2, -, 0, -, 5901, 0, -, 0
""",
    "a frozen server has not read all answers when it is looked at": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1450  a answers                      -> member, 1, -, 0, -, 101, 0, -, 0
  1451  b answers                      -> member, 1, -, 0, -, 100, 0, -, 0
  1452  c answers                      -> member, 1, -, 0, -, 5998, 0, -, 0
        | answered 1
        * roll_call a: 3 nodes are there: all answered within 0.452 s
""",
    "a member that leaves is lost, too": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1001  b answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1002  c leaves                       -> nothing
        | broken 1: c left (0 waiting)
        * left c: left
""",
    "a failure while one is open is asked about when it is over": """
  1000  a calls 5 ago                  -> 1000000995, 0
        | roll_call 1
  1001  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1001  b answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1010  b calls 2 ago                  -> 1000001008, 0
  1011  c answers                      -> member, 1, -, 0, -, 400, 0, -, 1000001011
        | answered 1
        | roll_call 1
        * roll_call a: 3 nodes are there: all answered within 0.011 s
  1012  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1013  b answers                      -> member, 1, -, 0, -, 398, 0, -, 0
  1013  c answers                      -> member, 1, -, 0, -, 5999, 0, -, 0
        | answered 1
        * roll_call b: 3 nodes are there: all answered within 0.002 s
""",
    "no round completes meanwhile, and the dead candidate is in none": """
     1  b joins after 1 of 1:3         -> waiting, 1, 2, -1, 0, 0
        | broken 1: b regroups (1 waiting)
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  a answers                      -> member, 1, b regroups, 1, -, 399, 0, -, 0
  1001  c answers                      -> member, 1, b regroups, 1, -, 399, 0, -, 0
  1010  a joins after 1 of 1:3         -> waiting, 1, 3, -1, 0, 0
  1011  c joins after 1 of 1:3         -> waiting, 1, 3, -1, 0, 0
  1420  c beats                        -> candidate, 1, b regroups, 3, -, 101, 0, -, 0
  1600  c beats                        -> member, 2, -, 0, -, 5410, 0, -, 0
        | answered 1
        | complete 2: every live node joined (0 waiting)
        * lost b: did not answer the roll call of a within 0.6 s
        * roll_call a: 2 nodes are there: all answered within 0.600 s
""",
    "Redis was away at its end: the leases decide": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  b answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1400  b is back                      -> member, 1, -, 0, -, 5600, 0, -, 0
  2000  a beats                        -> member, 1, -, 0, -, 5000, 0, -, 0
  3500  b beats                        -> member, 1, -, 0, -, 3500, 0, -, 0
  5000  a beats                        -> member, 1, -, 0, -, 2000, 0, -, 0
  6500  b beats                        -> member, 1, -, 0, -, 500, 0, -, 0
  7000  a beats                        -> member, 1, c lost its lease after 6.0 s, 0, -, 5500, 0, -, 0
        | broken 1: c lost its lease after 6.0 s (0 waiting)
        * lost c: lost its lease after 6.0 s
""",
    "Redis was away at its end, and comes back late: who looks for it gets an interval": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  3900  b is back                      -> member, 1, -, 0, -, 3100, 0, -, 0
""",
    "who leaves has just found Redis again: nobody is judged": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1450  b leaves, back                 -> nothing
        | broken 1: b left (0 waiting)
        * left b: left
""",
    "a join is an answer": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  a answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1001  b joins after 1 of 1:3, heard  -> waiting, 1, 3, -1, 0, 0
        | broken 1: b regroups (1 waiting)
  1002  c joins after 1 of 1:3, heard  -> waiting, 1, 4, -1, 0, 0
        | answered 1
        * roll_call a: 3 nodes are there: all answered within 0.002 s
  1003  a joins after 1 of 1:3, heard  -> complete, 2, 0, 3, a:1, 0
        | complete 2: max_nodes joined (0 waiting)
""",
    "who joins as the second one begins has to answer that": """
  1000  a calls 5 ago                  -> 1000000995, 0
        | roll_call 1
  1001  b answers                      -> member, 1, -, 0, -, 399, 0, -, 0
  1002  c answers                      -> member, 1, -, 0, -, 398, 0, -, 0
  1010  b calls 2 ago                  -> 1000001008, 0
  1011  a joins after 1 of 1:3, heard  -> waiting, 1, 5, -1, 0, 1000001011
        | broken 1: a regroups (1 waiting)
        | answered 1
        | roll_call 1
        * roll_call a: 3 nodes are there: all answered within 0.011 s
  1012  b joins after 1 of 1:3, heard  -> waiting, 1, 5, -1, 0, 0
  1013  c joins after 1 of 1:3, heard  -> waiting, 1, 5, -1, 0, 0
  1014  a joins after 1 of 1:3, heard  -> complete, 2, 0, 3, a:1, 0
        | answered 1
        | complete 2: max_nodes joined (0 waiting)
        * roll_call b: 3 nodes are there: all answered within 0.003 s
""",
    "the second one is in the name of who needs it, though the first's caller is gone": """
  1000  a calls 5 ago                  -> 1000000995, 0
        | roll_call 1
  1001  a joins after 1 of 1:3, heard  -> waiting, 1, 3, -1, 0, 0
        | broken 1: a regroups (1 waiting)
  1002  b answers                      -> member, 1, a regroups, 1, -, 398, 0, -, 0
  1010  b calls 2 ago                  -> 1000001008, 0
  1011  a leaves                       -> nothing
        * left a: left
  1012  c answers                      -> member, 1, a regroups, 0, -, 400, 0, -, 1000001012
        | answered 1
        | roll_call 1
        * roll_call a: 2 nodes are there: all answered within 0.012 s
  1013  b answers                      -> member, 1, a regroups, 0, -, 399, 0, -, 0
  1014  c answers                      -> member, 1, a regroups, 0, -, 5999, 0, -, 0
        | answered 1
        * roll_call b: 2 nodes are there: all answered within 0.002 s
""",
    "what was sent before it is no answer": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  1001  b joins after 1 of 1:3         -> waiting, 1, 3, -1, 0, 1000001000
        | broken 1: b regroups (1 waiting)
  1001  c beats                        -> member, 1, b regroups, 1, -, 399, 0, -, 1000001000
  1002  a answers                      -> member, 1, b regroups, 1, -, 398, 0, -, 0
  1002  b answers                      -> candidate, 1, b regroups, 1, -, 398, 0, -, 0
  1003  c answers                      -> member, 1, b regroups, 1, -, 5999, 0, -, 0
        | answered 1
        * roll_call a: 3 nodes are there: all answered within 0.003 s
""",
    "Redis was away for long: nobody is judged": """
  1000  a calls                        -> 1000001000, 0
        | roll_call 1
  9000  b beats                        -> member, 1, -, 0, -, 6000, 0, -, 0
        * outage: no heartbeat for 8.0 s: every lease starts anew
""",
    "an older round, a stranger, a closed run": """
  1000  a calls in 0                   -> nothing
  1000  x calls                        -> nothing
  1001  a closes                       -> by a
        | closed 1: by a (0 waiting)
        * closed: by a
  1002  a calls                        -> nothing
""",
}


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_stories_go_as_told(story: str, client: redis.Redis) -> None:
    story = OF_THREE + story.lstrip("\n")
    assert tell(story) == story
    assert tell(story, Server(client)) == story
