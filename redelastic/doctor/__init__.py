"""What ``redelastic doctor`` checks: whether Redis, this host and the installation are fit for a run.

``server.py`` asks the server about itself, ``rights.py`` what this user may do, ``trial.py`` tries the protocol on it,
``host.py`` checks this machine. Nothing is changed; what a trial writes is removed again. Only the trial needs torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Final

from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import Endpoint
from redelastic.redis.errors import RedelasticError, UnreachableError
from redelastic.torch_internals import require_torch

from .finding import LEVELS, Finding, Group, Level
from .host import examine_host
from .rights import Corner, examine_rights
from .server import examine_round_trips, examine_server

__all__ = ["LEVELS", "Finding", "Group", "Level", "examine"]

LIMIT: Final = 7.0  # checks not begun within this time are skipped, in seconds
CONNECT_TIMEOUT: Final = 2.0  # in seconds
ATTEMPT_TIMEOUT: Final = 1.5  # in seconds
CALL_TIMEOUT: Final = 1.0  # in seconds, including retries of what fails at once
_HINDRANCES: Final = ("role", "topology", "replicas")  # each of these makes writes impossible


def examine(endpoint: Endpoint, key_prefix: str, run_id: str = "") -> list[Finding]:
    """Examine everything: in about a second, or at most ten if the server is slow or silent.

    Args:
        endpoint: where Redis is.
        key_prefix: prefix of the runs' keys.
        run_id: the run whose keys the user may use; empty for a run of the examination's own. The trial stays in a
            corner of that run's keys, apart from the run's own, and leaves nothing there.

    Returns:
        The findings. The one called ``reachable`` is a problem if Redis did not answer, or refused the login.

    Raises:
        ValueError: the key prefix or run id cannot be part of a key.
    """
    corner = Corner(key_prefix, run_id)
    trial = _trial()
    deadline = time.monotonic() + LIMIT
    try:
        connection = Connection.open(endpoint, ATTEMPT_TIMEOUT, CALL_TIMEOUT, CONNECT_TIMEOUT)
    except RedelasticError as e:
        found_it = "no" if isinstance(e, UnreachableError) else "yes, but it refuses the login"
        return [Finding("server", "reachable", "problem", found_it, str(e)), *examine_host(endpoint, None)]
    with contextlib.closing(connection):
        found = [Finding("server", "reachable", "ok", connection.name)]
        try:
            found += examine_server(connection, endpoint)
            found.append(examine_round_trips(connection))
            found += _try(connection, endpoint, corner, found=found, trial=trial, deadline=deadline)
        except UnreachableError as e:
            found[0] = Finding("server", "reachable", "problem", "no longer", str(e))
        return found + list(examine_host(endpoint, connection))


def _trial() -> ModuleType | None:
    """The module ``trial``, which imports torch for seconds; None where torch is missing or too old."""
    try:
        require_torch()
    except ImportError:
        return None
    from . import trial  # noqa: PLC0415

    return trial


def _try(
    connection: Connection,
    endpoint: Endpoint,
    corner: Corner,
    *,
    found: list[Finding],
    trial: ModuleType | None,
    deadline: float,
) -> Iterator[Finding]:
    """Try the protocol, unless it is already known not to work."""
    hindrance = next((f.name for f in found if f.level == "problem" and f.name in _HINDRANCES), "")
    try:
        if not hindrance:
            rights = examine_rights(connection, corner)
            yield rights
            hindrance = rights.name if rights.level == "problem" else ""
        for name in ("rendezvous", "store"):
            if hindrance or trial is None:
                yield Finding("trial", name, "note", f"skipped because of {hindrance or 'torch'}")
            elif time.monotonic() > deadline:
                yield Finding("trial", name, "problem", "skipped: the server is too slow", "See latency.")
            elif name == "rendezvous":
                yield from trial.try_rendezvous(endpoint, corner)
            else:
                yield from trial.try_store(connection, corner)
    finally:
        corner.clear(connection)
