"""What the tests of `redelastic doctor` share: a look at a server, which leaves it as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import redis

from redelastic import cli
from redelastic.doctor import Finding, examine
from redelastic.redis.endpoint import parse_endpoint
from redelastic.redis.server import RedisServer

Found = dict[str, Finding]


def look(url: str, run_id: str = "") -> Found:
    found = examine(parse_endpoint(url), "redelastic", run_id)
    assert len({finding.name for finding in found}) == len(found), "names are for programs: each comes once"
    return {finding.name: finding for finding in found}


def bad(found: Found, level: str = "problem") -> set[str]:
    return {name for name, finding in found.items() if finding.level == level}


def contents(client: redis.Redis) -> dict[bytes, object]:
    keys: list[Any] = client.keys("*")
    return {key: client.dump(key) for key in keys}


@contextlib.contextmanager
def untouched(server: RedisServer) -> Iterator[None]:
    with server.get_client() as client:
        client.set("redelastic:{other}:run", "of somebody else")
        before = contents(client)
        yield
        assert contents(client) == before


def run_command(*argv: str) -> int:
    return cli.main(["doctor", *argv])
