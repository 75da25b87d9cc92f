"""A pytest plugin for tests of commands: a command on the test's server, and the control of its run."""

from __future__ import annotations

import pytest

from redelastic.monitoring.control import RunControl
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.commands import Cli, CommandResult, run_command


@pytest.fixture
def cli(server: RedisServer) -> Cli:
    def run(name: str, *argv: str) -> CommandResult:
        return run_command(name, *argv, "--endpoint", server.url)

    return run


@pytest.fixture
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands give up a server that they do not reach after half a second."""
    monkeypatch.setattr("redelastic.monitoring.operator.TIMEOUT", 0.5)


@pytest.fixture
def control(connection: Connection, keys: RunKeys) -> RunControl:
    return RunControl(connection, keys)
