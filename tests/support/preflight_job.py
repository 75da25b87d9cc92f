"""A preflight of real processes that stand for hosts: on loopback, or each on a host of a `Network`."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from typing_extensions import Self

from redelastic.preflight.host import SUFFIX
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import launchers
from tests.support.namespaces import Network
from tests.support.servers import wait_until

LIMIT: Final = 200.0  # for a preflight to end, in seconds


@dataclass
class Ended:
    """A host's command that has ended: its exit code, its JSON and its stderr."""

    code: int
    document: dict[str, Any]
    errors: str


class Hosts:
    """The hosts of one preflight, for one block, which kills those that have not ended.

    Args:
        server: the server by which they meet.
        endpoint: its endpoint.
        run_id: the job's run id.
        folder: where their output goes.
        options: more options of `redelastic preflight`.
        network: the network on whose hosts of the same names they run; None: all run on this host.
    """

    def __init__(
        self,
        server: RedisServer,
        endpoint: str,
        run_id: str,
        folder: Path,
        *options: str,
        network: Network | None = None,
    ) -> None:
        self._server, self._run_id, self._folder, self._network = server, run_id, folder, network
        self._arguments = ["--json", "--rdzv-endpoint", endpoint, "--rdzv-id", run_id, *options]
        self._started: dict[str, Any] = {}
        self._frozen: list[psutil.Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        for frozen in self._frozen:
            frozen.kill()
        for process in self._started.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the process that measures ends when its stdin is closed
                process.wait(LIMIT)

    def start(self, *names: str, options: Sequence[str] = ()) -> None:
        for name in names:
            local = () if self._network else ("--local-addr", "127.0.0.1")
            command = [sys.executable, "-m", "redelastic", "preflight", *self._arguments, *local, *options]
            command += ["--node-name", name]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            out, err = (self._folder / f"{name}.{kind}" for kind in ("out", "err"))
            with self._network.inside(name) if self._network else nullcontext(), out.open("w") as o, err.open("w") as e:
                self._started[name] = launchers.start(command, environment, o, e)

    def pid(self, name: str) -> int:
        return int(self._started[name].pid)

    def wait_for_step(self, number: int) -> None:
        """Wait until the hosts have decided on the step of this number."""
        pattern = RunKeys(self._run_id + SUFFIX).store("preflight").data + "-*"
        with self._server.get_client() as client:

            def is_decided() -> bool:
                kinds = ((key, client.type(key)) for key in client.keys(pattern))
                return any(client.hexists(key, f"{number - 1}/next") for key, kind in kinds if kind == b"hash")

            wait_until(is_decided, f"step {number}", LIMIT)

    def freeze(self, name: str) -> None:
        """Stop a host's processes, as if it hung."""
        process = psutil.Process(self.pid(name))
        self._frozen += [process, *process.children(recursive=True)]
        for one in self._frozen:
            one.suspend()

    def results(self, *names: str) -> dict[str, Ended]:
        """Wait for these hosts to end; their results by name."""
        ended = {}
        for name in names:
            code = self._started[name].wait(LIMIT)
            out, errors = ((self._folder / f"{name}.{kind}").read_text() for kind in ("out", "err"))
            ended[name] = Ended(code, json.loads(out) if out else {}, errors)
        return ended
