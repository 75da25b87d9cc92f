"""A job of `redelastic run` processes that report progress and save when asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, TypeVar

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Event
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.torchrun_job import Job

E = TypeVar("E", bound=Event)
# Exit codes of `redelastic run`, written out: a change of one is a change for its users.
FAILED, DRAINED, STOPPED, REFUSED, NO_PROGRESS, UNUSED = 1, 75, 76, 77, 78, 79
AWARE: Final = Path(__file__).parent / "workers" / "aware.py"


class AgentJob(Job):
    """Nodes of `redelastic run` whose workers run `workers/aware.py`, and the run as operators see it."""

    def __init__(self, server: RedisServer, directory: Path, nnodes: str, **more: Any) -> None:
        super().__init__(server, directory, nnodes, agent=True, **more)
        self.control = RunControl(Connection.open(server.url), RunKeys(self.run_id))

    def begin(self, *names: str, options: tuple[str, ...] = (), **more: Any) -> None:
        """Start nodes; ``more`` is as for `Job.start`."""
        self.start(*names, script=AWARE, options=options, **more)

    def events(self, kind: type[E]) -> list[E]:
        return [event for event in self.control.events() if isinstance(event, kind)]

    def wait_event(self, kind: type[E]) -> E:
        """Wait for an event of this kind; returns the last one."""
        found: list[E] = self.wait(f"there is a {kind.__name__}", lambda: self.events(kind))
        return found[-1]

    def id_of(self, name: str) -> str:
        """The id of the live node with this name."""
        return self.control.find(name).id
