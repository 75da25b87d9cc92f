"""Is this Redis, this host and this installation fit for our runs? What ``redelastic doctor`` checks.

``server.py`` asks the server about itself, ``trial.py`` tries our protocol, ``host.py`` looks at this machine. Nothing
is changed; what a trial writes is removed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Final

from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import Endpoint
from redelastic.redis.errors import RedelasticError, UnreachableError

from .finding import LEVELS, Finding, Group, Level
from .host import examine_host
from .server import examine_server
from .trial import Corner, examine_rights, examine_round_trips, try_rendezvous, try_store

__all__ = ["LEVELS", "Finding", "Group", "Level", "examine"]

LIMIT: Final = 7.0  # checks not begun within this time are skipped, in seconds
CONNECT_TIMEOUT: Final = 2.0
ATTEMPT_TIMEOUT: Final = 1.5
CALL_TIMEOUT: Final = 1.0  # including retries of what fails at once
_HINDRANCES: Final = ("role", "topology", "replicas")  # each of these makes writes impossible


def examine(endpoint: Endpoint, key_prefix: str, run_id: str = "") -> list[Finding]:
    """Examine everything: in about a second, or at most ten if the server is slow or silent.

    Args:
        endpoint: where Redis is.
        key_prefix: prefix of the runs' keys.
        run_id: the run whose keys the user may use; empty for a run of the examination's own. The trial stays in a
            corner of that run's keys, apart from the run's own, and leaves nothing there.

    Returns:
        The findings. The one called ``reachable`` is a problem if Redis did not answer or refused us.

    Raises:
        ValueError: the key prefix or run id cannot be part of a key.
    """
    corner = Corner(key_prefix, run_id)
    deadline = time.monotonic() + LIMIT
    try:
        connection = Connection.open(endpoint, ATTEMPT_TIMEOUT, CALL_TIMEOUT, CONNECT_TIMEOUT)
    except RedelasticError as e:
        found_it = "no" if isinstance(e, UnreachableError) else "yes, but it refuses the login"
        return [Finding("server", "reachable", "problem", found_it, str(e)), *examine_host(endpoint, None)]
    try:
        found = [Finding("server", "reachable", "ok", connection.name)]
        try:
            found += examine_server(connection, endpoint)
            found += examine_round_trips(connection)
            found += _try(connection, endpoint, corner, found, deadline)
        except UnreachableError as e:
            found[0] = Finding("server", "reachable", "problem", "no longer", str(e))
        return found + list(examine_host(endpoint, connection))
    finally:
        connection.close()


def _try(
    connection: Connection, endpoint: Endpoint, corner: Corner, found: list[Finding], deadline: float
) -> Iterator[Finding]:
    """Try our protocol, unless it is already known not to work."""
    trials: dict[str, Callable[[], Iterator[Finding]]] = {
        "rendezvous": lambda: try_rendezvous(endpoint, corner),
        "store": lambda: try_store(connection, corner),
    }
    hindrance = next((f.name for f in found if f.level == "problem" and f.name in _HINDRANCES), "")
    try:
        if not hindrance:
            rights = examine_rights(connection, corner)
            yield rights
            hindrance = rights.name if rights.level == "problem" else ""
        for name, trial in trials.items():
            if hindrance:
                yield Finding("trial", name, "note", f"skipped because of {hindrance}")
            elif time.monotonic() > deadline:
                yield Finding("trial", name, "problem", "skipped: the server is too slow", "See latency.")
            else:
                yield from trial()
    finally:
        corner.clear(connection)
