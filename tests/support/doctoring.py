"""Findings of `redelastic doctor` on a server, and a check that a server keeps its contents."""

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
    """The doctor's findings on a server, by name."""
    found = examine(parse_endpoint(url), "redelastic", run_id)
    assert len({finding.name for finding in found}) == len(found), "programs find a finding by its name"
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
