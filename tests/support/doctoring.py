"""What the tests of `redelastic doctor` share: its findings by name, and that it leaves a server as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis

from redelastic.doctor import Finding, examine
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.server import RedisServer

Found = dict[str, Finding]


def examined(url: str, run_id: str = "") -> Found:
    """What the doctor finds on a server."""
    found = examine(parse_endpoint(url), "redelastic", run_id)
    assert len({finding.name for finding in found}) == len(found), "names are for programs: each comes once"
    return {finding.name: finding for finding in found}


def names_at(found: Found, level: str) -> set[str]:
    return {name for name, finding in found.items() if finding.level == level}


def problems(found: Found) -> set[str]:
    return names_at(found, "problem")


def contents(client: redis.Redis) -> dict[bytes, object]:
    keys: list[Any] = client.keys("*")
    return {key: client.dump(key) for key in keys}


@contextlib.contextmanager
def unchanged(server: RedisServer) -> Iterator[None]:
    """Check that this block leaves all keys of a server as they were."""
    with server.get_client() as client:
        client.set("redelastic:{other}:run", "of somebody else")
        before = contents(client)
        yield
        assert contents(client) == before
