"""A Redis user with the rules that SECURITY.md has for one job's user."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import redis

import redelastic
from redelastic.redis.server import RedisServer
from tests.support.commands import run_command

PACKAGE: Final = Path(redelastic.__file__).parent
PAGE: Final = (Path(__file__).parents[2] / "SECURITY.md").read_text()
CANARY: Final = "c4n4ry-s3cr3t"  # the user's password


def job_rules(run_id: str) -> list[str]:
    """The arguments of SECURITY.md's `ACL SETUSER` after the user's name, for this run."""
    block = PAGE.partition("ACL SETUSER my-job ")[2].partition("```")[0]
    words = shlex.split(block.replace("\\\n", " "))
    return [word.replace("my-job", run_id).replace(">password", f">{CANARY}") for word in words]


@dataclass
class AsUser:
    """A server with the URL of a job's user; the clients of `get_client` are the administrator's."""

    server: RedisServer
    url: str

    def get_client(self, **options: Any) -> redis.Redis:
        return self.server.get_client(**options)


def as_user_of(server: RedisServer, run_id: str, *more: str) -> AsUser:
    """Create the user of a run, with ``more`` rules."""
    with server.get_client() as admin:
        admin.execute_command("ACL SETUSER", run_id, *job_rules(run_id), *more)
    return AsUser(server, f"redis://{run_id}:{CANARY}@{server.endpoint}")


def command_line(process: psutil.Process) -> str:
    """A process's command line; "" once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def output_of(*argv: str, url: str, code: int = 0) -> str:
    """The output of a command that ends with this exit code; without stderr if it is JSON."""
    done = run_command(*argv, "--endpoint", url)
    assert done.code == code, (argv, done)
    return done.out + done.err if "--json" not in argv else done.out
