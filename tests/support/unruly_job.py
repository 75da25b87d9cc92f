"""Jobs of `redelastic run` whose workers run `workers/unruly.py`, and what tests ask of the processes it leaves."""

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
REDELASTIC_RUN: Final = (sys.executable, "-m", "redelastic", "run")


def environment(action: str = "") -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("REDELASTIC_", "TORCHELASTIC_"))}
    return env | {"OMP_NUM_THREADS": "1", "UNRULY": action}


def run_standalone(directory: Path, action: str, *options: str, stdout: Any = None) -> subprocess.CompletedProcess[str]:
    """Run one node, whose worker misbehaves, on its own server."""
    command = [*REDELASTIC_RUN, "--standalone", *options, str(UNRULY), str(directory)]
    return launchers.run(command, environment(action), LIMIT, stdout)


def read_pid(file: Path) -> int:
    return int(file.read_text())


class UnrulyJob(AgentJob):
    """Nodes whose workers misbehave."""

    def begin(self, *names: str, action: str = "wait", **more: Any) -> None:
        self.start(*names, script=UNRULY, env={"UNRULY": action}, may_end=True, **more)

    def lose_redis(self) -> None:
        """Once all workers run, kill the server for good, and wait until the nodes know."""
        for name in self.nodes:
            self.wait_file(f"{name}-started")
        self.server.kill()
        knows = "Redis has been away"
        self.wait("all know", lambda: all(knows in node.stderr for node in self.nodes.values()))

    def wait_file(self, name: str) -> Path:
        self.wait(f"there is a file {name}", (self.directory / name).exists)
        return self.directory / name
