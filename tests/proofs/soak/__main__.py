"""``python -m tests.proofs.soak``: a soak of minutes or hours; exits with 1 when a promise was not kept."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import session


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.soak", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the schedule follows from it")
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--nodes", type=int, default=6, help="about how many are alive at a time")
    parser.add_argument("--server-faults", action="store_true", help="Redis has faults too")
    parser.add_argument("--episode", type=int, help="only this one of them")
    parser.add_argument("--keep-going", action="store_true", help="go on after an episode that failed")
    parser.add_argument("--folder", type=Path, help="where histories of failed episodes are put")
    parser.add_argument("--check", type=Path, metavar="HISTORY", help="only judge a recorded history")
    given = parser.parse_args(arguments)
    if given.check:
        verdict = session.judge(given.check)
        _say("\n".join([*map(str, verdict.violations), session.summary([verdict])]))
        verdicts = [verdict]
    else:
        verdicts = session.soak(
            given.seed,
            given.minutes,
            given.nodes,
            server_faults=given.server_faults,
            only=given.episode,
            keep_going=given.keep_going,
            folder=given.folder,
            say=_say,
        )
    sys.exit(1 if any(verdict.violations for verdict in verdicts) else 0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
