"""The demo's nodes, each a `redelastic run`, and what they report: one queue of events from all sources."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import string
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil
import redis

from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer

if TYPE_CHECKING:
    from typing_extensions import Self

PRELOAD: Final = "torch,torch._dynamo,numpy"  # including the second, which DDP and optimizers import when created
GONE_WITHIN: Final = 10.0  # how long killed processes may take to disappear, in seconds
LOG_TAIL: Final = 15  # lines

_NODE_ID: Final = re.compile(r"\S+-(?P<pid>\d+)-[0-9a-f]{12}")  # host, pid of the agent, a random part


@dataclass(frozen=True)
class Reported:
    """Rank 0 of a round wrote a line; see ``train.report``."""

    node: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Changed:
    """The run changed, or a node calls the roll: ``broken``, ``complete``, ``closed``, ``roll_call``, ….

    Attributes:
        event: which of them.
        epoch: of the round.
        reason: why, with nodes by their names in the demo.
        members: names of the nodes of a complete round, in the order of their ranks.
    """

    event: str
    epoch: int
    reason: str
    members: tuple[str, ...] = ()


@dataclass(frozen=True)
class Exited:
    """A node's agent ended; negative codes are signals."""

    node: str
    code: int


@dataclass(frozen=True)
class Interrupted:
    """This process received a signal to end."""

    signal: int


Event = Reported | Changed | Exited | Interrupted
Events = queue.SimpleQueue[Event]  # unlike queue.Queue's, its put may be called from a signal handler


class Nodes:
    """Starts nodes of one run on this machine, kills them, and listens to them.

    As a context manager, it ends all remaining processes on exit.

    Args:
        server: the run's; its URL reaches the nodes through their environment, never through a command line.
        folder: for all their files.
        nnodes: minimum and maximum number of nodes, as in torchrun's ``--nnodes``.
        command: the training script's module and arguments, for ``-m``.
        events: the queue for what the nodes report.
    """

    def __init__(
        self,
        server: RedisServer,
        folder: Path,
        nnodes: tuple[int, int],
        command: Sequence[str],
        events: Events,
    ) -> None:
        self.run_id = f"demo-{uuid.uuid4().hex[:4]}"
        self._events = events
        self._folder = folder
        self._command = [
            *(sys.executable, "-m", "redelastic.cli", "run", f"--preload={PRELOAD}", f"--rdzv-id={self.run_id}"),
            *(f"--nnodes={nnodes[0]}:{nnodes[1]}", "--nproc-per-node=1", "--max-restarts=5", "--local-addr=127.0.0.1"),
            "--rdzv-conf=join_timeout=60",
            *("-m", *command),
        ]
        self._environment = _environment(server.url, folder)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._client = server.get_client(decode_responses=True, socket_timeout=5)
        keys = RunKeys(self.run_id)
        self._wake_key = keys.wake
        self._ranks_key = keys.ranks
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="demo-watch", daemon=True)

    def __enter__(self) -> Self:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # if one step fails, the rest still runs
            stack.callback(self._client.close)
            stack.callback(self._watcher.join)
            stack.callback(self._stopping.set)
            for process in self._processes.values():
                stack.callback(kill_tree, process)

    def start(self) -> str:
        """Start another node; returns its name: A, B, C, …."""
        name = string.ascii_uppercase[len(self._processes)]
        with self.log(name).open("w") as log:
            self._processes[name] = process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=self._folder,
                env=self._environment,
                start_new_session=True,  # the terminal's Ctrl-C goes to the demo, which then ends the nodes
            )
        threading.Thread(target=self._listen, args=(name, process), name=f"demo-{name}", daemon=True).start()
        return name

    def kill(self, name: str) -> int:
        """End a node as a power failure would, agent and workers at once; returns how many processes there were."""
        return kill_tree(self._processes[name])

    def log(self, name: str) -> Path:
        """The file with what a node wrote to stderr."""
        return self._folder / f"{name}.log"

    def log_tail(self, name: str) -> str:
        """The end of a node's log."""
        return "\n".join(self.log(name).read_text(errors="replace").splitlines()[-LOG_TAIL:])

    def _listen(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None  # noqa: S101
        with process.stdout as lines:
            for line in lines:
                with contextlib.suppress(ValueError):  # something printed by torch
                    if isinstance(fields := json.loads(line), dict):
                        self._events.put(Reported(name, fields))
        self._events.put(Exited(name, process.wait()))

    def _watch(self) -> None:
        """Read the run's wake-ups, the same stream that tells nodes that something changed."""
        seen = "0-0"
        while not self._stopping.is_set():
            try:
                reply: Any = self._client.xread({self._wake_key: seen}, block=200)
                for _, entries in reply or ():
                    for seen, entry in entries:  # noqa: B007  # only the last one counts
                        self._events.put(self._understand(entry))
            except redis.RedisError:  # noqa: PERF203  # what breaks is the connection, not the loop
                self._stopping.wait(0.2)

    def _understand(self, entry: dict[str, str]) -> Changed:
        members: Any = ()
        if entry["event"] == "complete":
            members = self._client.zrange(self._ranks_key, 0, -1)
        names = {str(process.pid): name for name, process in self._processes.items()}

        def name_of(text: str) -> str:
            return _NODE_ID.sub(lambda node: names.get(node["pid"], node[0]), text)

        reason = name_of(entry.get("reason", ""))
        return Changed(entry["event"], int(entry["epoch"]), reason, tuple(name_of(node) for node in members))


def kill_tree(process: subprocess.Popen[str]) -> int:
    """Send SIGKILL to a process and all its descendants, and wait until they are gone; returns how many there were.

    Workers have sessions of their own, so there is no common group to signal; and the agent is stopped
    first, so that it starts no worker unseen.

    Raises:
        TimeoutError: one of them is still there after 10 seconds.
    """
    if process.poll() is not None:
        return 0
    try:
        agent = psutil.Process(process.pid)
        agent.suspend()
        tree = [*agent.children(recursive=True), agent]
    except psutil.NoSuchProcess:
        return 0
    for one in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
    deadline = time.monotonic() + GONE_WITHIN
    while alive := [one.pid for one in tree if _is_alive(one)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the processes {alive} are still there {GONE_WITHIN:g} s after SIGKILL")
        time.sleep(0.01)
    process.wait()
    return len(tree)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # init may be slow to reap it
    return False


def _environment(url: str, folder: Path) -> dict[str, str]:
    """The nodes' environment."""
    # An outer torchrun's own settings must not reach these nodes.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))}
    if sys.platform == "linux":
        inherited["GLOO_SOCKET_IFNAME"] = "lo"  # all nodes are on this host, whatever its name resolves to
    return inherited | {
        "REDELASTIC_REDIS_URL": url,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TMPDIR": str(folder),  # torch's own files go with ours
    }
