"""Jobs of `redelastic run` whose workers run `workers/unruly.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from tests.support import launchers
from tests.support.agent_job import AgentJob
from tests.support.torchrun_job import LIMIT

UNRULY: Final = Path(__file__).parent / "workers" / "unruly.py"
REDELASTIC_RUN: Final = (  # the command without its options
    sys.executable,
    "-m",
    "redelastic",
    "run",
)


def environment(action: str = "") -> dict[str, str]:
    """Environment variables of a node outside a job, whose workers do this action."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("REDELASTIC_", "TORCHELASTIC_"))}
    return env | {"OMP_NUM_THREADS": "1", "UNRULY": action}


def run_standalone(directory: Path, action: str, *options: str, stdout: Any = None) -> subprocess.CompletedProcess[str]:
    """Run a node with its own server to its end; its worker does this action."""
    command = [*REDELASTIC_RUN, "--standalone", *options, str(UNRULY), str(directory)]
    return launchers.run(command, environment(action), LIMIT, stdout)


def read_pid(file: Path) -> int:
    return int(file.read_text())


class UnrulyJob(AgentJob):
    """Nodes whose workers do an action of `workers/unruly.py`."""

    def begin(self, *names: str, action: str = "wait", **more: Any) -> None:
        self.start(*names, script=UNRULY, env={"UNRULY": action}, may_end=True, **more)

    def lose_redis(self) -> None:
        """Once all workers run, kill the server, and wait until every node has noticed."""
        for name in self.nodes:
            self.wait_file(f"{name}-started")
        self.server.kill()
        notice = "Redis has been away"
        self.wait("all nodes notice", lambda: all(notice in node.stderr for node in self.nodes.values()))

    def wait_file(self, name: str) -> Path:
        """Wait for a file that a worker makes; returns its path."""
        self.wait(f"there is a file {name}", (self.directory / name).exists)
        return self.directory / name
