"""A job of real torchrun or `redelastic run` processes: start, kill and freeze nodes, and read what workers did."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import psutil
import pytest

from redelastic.redis.server import RedisServer
from tests.support import fault_matrix, launchers
from tests.support.long_tests import LONG
from tests.support.workers.train import reference

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

TRAIN: Final = Path(__file__).parent / "workers" / "train.py"
TOKEN: Final = "TEST_JOB"  # environment variable of all processes of a job, orphans too
LIMIT: Final = 60.0  # of each wait, in seconds: far above what it takes, since tests do not judge speed
POLL_INTERVAL: Final = 0.05  # in seconds
CONF: Final[Mapping[str, float]] = {
    "keep_alive_interval": 0.4,
    "keep_alive_max_attempt": 3,
    "last_call_timeout": 60,  # so a first round has max_nodes, unless a test says otherwise
    "join_timeout": 60,
}
ADMIT_AT_ONCE: Final = ("--admit=now", "--admit-interval=0")  # new nodes do not wait, unless a test says otherwise
# Leases of 6 s outlast the pauses of a busy machine; after those of 30 s, no pause is taken for a loss.
LONG_LEASES: Final[Mapping[str, float]] = {"keep_alive_max_attempt": 15}
LONGEST_LEASES: Final[Mapping[str, float]] = {"keep_alive_max_attempt": 75, "roll_call_timeout": 20}

# Kills all processes of a job once its stdin is closed: at the end of a test, or when pytest is killed.
REAPER: Final = """
import os, psutil, sys, time
sys.stdin.read()
name, token = sys.argv[1:]
while True:
    found = []
    for p in psutil.process_iter():
        try:
            if p.pid != os.getpid() and p.environ().get(name) == token and p.status() != psutil.STATUS_ZOMBIE:
                p.kill()
                found.append(p)
        except psutil.Error:
            pass
    if not found:
        break
    time.sleep(0.02)
"""


@dataclass(frozen=True)
class Line:
    """A line of the workers' record; see `workers/record.py`."""

    event: str
    time: float
    node: str
    pid: int
    epoch: int
    rank: int
    world: int
    group_rank: int
    restart: int
    step: int = -1
    samples: Sequence[int] = ()
    loss: float = float("nan")


class Node:
    """One node: the agent's process, and its workers in sessions of their own."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], directory: Path, *, fork: bool) -> None:
        self.name = name
        self.may_end = False  # whether the test expects it to end, or has killed it
        self._err, self._out = directory / f"{name}.err", directory / f"{name}.out"
        with self._err.open("wb") as err, self._out.open("wb") as out:
            self.process = launchers.start(command, env, out, err, fork=fork)

    @property
    def stderr(self) -> str:
        return self._err.read_text(errors="replace") if self._err.is_file() else ""  # else a test reads it from a pipe

    def log_tail(self, lines: int = 25) -> str:
        """The last lines of stdout and stderr, indented."""
        text = [*self._out.read_text(errors="replace").splitlines()[-5:], *self.stderr.splitlines()[-lines:]]
        return "\n".join(f"    {line}" for line in text)

    def tree(self) -> list[psutil.Process]:
        """The processes of the node, the agent first."""
        agent = psutil.Process(self.process.pid)
        return [agent, *agent.children(recursive=True)]

    def _signal_tree(self, number: signal.Signals) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def kill(self) -> None:
        """Kill the agent and all its workers at once, as if their host died."""
        self.may_end = True
        self._signal_tree(signal.SIGKILL)

    def kill_agent_alone(self) -> list[psutil.Process]:
        """Kill only the agent; returns its workers, which are not signalled."""
        self.may_end = True
        agent, *workers = self.tree()
        agent.kill()
        return workers

    def terminate(self) -> None:
        """Send SIGTERM to the agent, as a scheduler does."""
        self.may_end = True
        self.process.terminate()

    def freeze(self) -> None:
        self._signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal_tree(signal.SIGCONT)


class Job:
    """Nodes that share a run id and a server.

    Args:
        server: the Redis server.
        directory: where logs, the record and checkpoints go.
        nnodes: as for torchrun, "min:max".
        nproc: workers per node.
        conf: rendezvous parameters beside or instead of those of `CONF`.
        agent: whether nodes run `redelastic run`, with our agent; else they run torchrun.
        gloo: whether workers of `train.py` use torch and gloo; by default only in long runs.
        fork: whether launchers are forks of a process that has imported torch; by default not in long runs.
    """

    def __init__(
        self,
        server: RedisServer,
        directory: Path,
        nnodes: str,
        *,
        nproc: int = 1,
        conf: Mapping[str, float] | None = None,
        agent: bool = False,
        gloo: bool = LONG,
        fork: bool = not LONG,
    ) -> None:
        self._agent, self._gloo, self._fork = agent, gloo, fork
        self.server, self.directory, self.nnodes, self.nproc = server, directory, nnodes, nproc
        self.min_nodes, self.max_nodes = (int(n) for n in nnodes.split(":"))
        self.run_id = f"job-{uuid.uuid4().hex[:12]}"
        self.conf = {**CONF, **(conf or {})}
        self.nodes: dict[str, Node] = {}
        self._token = uuid.uuid4().hex
        self._lines: list[Line] = []
        self._read = 0  # bytes of the record that are in `_lines`
        directory.mkdir(parents=True, exist_ok=True)
        self._client = server.get_client(decode_responses=True)
        self._reaper = subprocess.Popen(
            [sys.executable, "-c", REAPER, TOKEN, self._token], stdin=subprocess.PIPE, start_new_session=True
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._client.close()
        for node in self.nodes.values():
            node.process.kill()  # a forked launcher has the environment of its template, so the reaper does not find it
        self._reaper.communicate(timeout=LIMIT)
        assert self._reaper.returncode == 0, "the job's processes may still be there"
        for node in self.nodes.values():
            node.process.wait(LIMIT)

    # -- acting

    def start(
        self,
        *names: str,
        nnodes: str | None = None,
        max_restarts: int = 20,
        env: Mapping[str, str] | None = None,
        options: Iterable[str] = (),
        conf: Mapping[str, float] | None = None,
        may_end: bool = False,
        script: Path = TRAIN,
        arguments: Iterable[str] = (),
    ) -> None:
        """Start nodes; `options` are the launcher's, `arguments` the script's, and `conf` is added to the job's."""
        for name in names:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=redis"]
            ours = [sys.executable, "-m", "redelastic", "run", f"--node-name={name}", *ADMIT_AT_ONCE]
            command = ours if self._agent else torchrun
            command += [
                f"--rdzv-id={self.run_id}",
                f"--rdzv-conf={self.settings(conf)}",
                f"--nnodes={nnodes or self.nnodes}",
            ]
            command += [f"--nproc-per-node={self.nproc}", f"--max-restarts={max_restarts}", *options]
            self.launch(name, [*command, str(script), str(self.directory), *arguments], env)
            self.nodes[name].may_end = may_end

    def settings(self, conf: Mapping[str, float] | None = None) -> str:
        """The rendezvous parameters as the value of `--rdzv-conf`."""
        return ",".join(f"{name}={value}" for name, value in {**self.conf, **(conf or {})}.items())

    def launch(self, name: str, command: list[str], env: Mapping[str, str] | None = None) -> None:
        """Start a node by any command, after an earlier node of that name has ended."""
        if earlier := self.nodes.get(name):
            earlier.process.wait(LIMIT)
        own = {"REDELASTIC_REDIS_URL": self.server.url, "OMP_NUM_THREADS": "1", "TEST_NODE": name}
        if self._gloo:
            own["TEST_GLOO"] = "1"
        environment = {**os.environ, **own, TOKEN: self._token, **(env or {})}
        self.nodes[name] = Node(name, command, environment, self.directory, fork=self._fork)

    def note(self, text: str) -> float:
        """Print what happens, for `pytest -s`; returns the time."""
        sys.stdout.write(f"{text}\n")
        return time.time()

    def tell(self, name: str) -> None:
        """Create a file that the workers' script looks for, such as "finish"."""
        (self.directory / name).touch()

    # -- observing

    def lines(self, event: str | None = None) -> list[Line]:
        """The lines of the workers' record so far, all or those of one event."""
        path = self.directory / "record.jsonl"
        if path.exists():
            with path.open("rb") as record:
                record.seek(self._read)
                for line in record:
                    if line.endswith(b"\n"):
                        self._lines.append(Line(**json.loads(line)))
                        self._read += len(line)
        return [line for line in self._lines if event in (None, line.event)]

    @property
    def epoch(self) -> int:
        """The newest epoch in which a step was made; 0 if there is none."""
        return max((line.epoch for line in self.lines("step")), default=0)

    def ranks(self, epoch: int) -> dict[str, int]:
        """Each node's rank in a round."""
        return {line.node: line.group_rank for line in self.lines("start") if line.epoch == epoch}

    def by_rank(self, epoch: int) -> list[Node]:
        """The nodes of a round in the order of their ranks."""
        ranks = self.ranks(epoch)
        return [self.nodes[name] for name in sorted(ranks, key=ranks.__getitem__)]

    def redis(self, name: str) -> Any:
        """The contents of one of the run's keys, by its name in `keys.py`; None if there is none."""
        key = f"redelastic:{{{self.run_id}}}:{name}"
        readers: dict[str, Callable[[str], Any]] = {
            "hash": self._client.hgetall,
            "zset": lambda k: self._client.zrange(k, 0, -1, withscores=True),
            "set": self._client.smembers,
            "stream": self._client.xrange,
        }
        kind = str(self._client.type(key))
        return readers[kind](key) if kind in readers else None

    def wait(self, what: str, condition: Callable[[], T], limit: float = LIMIT) -> T:
        """Wait until a condition holds; returns its value. Fails at once if a node fails that must not end."""
        deadline = time.monotonic() + limit
        while True:
            # Before the condition, which then sees all that a node did before it ended.
            dead = [n for n in self.nodes.values() if not n.may_end and n.process.poll() not in (None, 0)]
            if value := condition():
                return value
            if dead:
                pytest.fail(
                    f"While waiting until {what}, node {dead[0].name} ended with {dead[0].process.returncode}."
                    + self.report()
                )
            if time.monotonic() > deadline:
                pytest.fail(f"Not within {limit:g} s: {what}." + self.report())
            time.sleep(POLL_INTERVAL)

    def wait_round(self, nodes: Iterable[str], after: int | None = None, *, fault: float | None = None) -> int:
        """Wait until each of these nodes, and no other, has made two steps in a round; returns its epoch.

        Args:
            nodes: their names.
            after: the round's epoch must be later than this; None for the newest with steps.
            fault: time of the fault that led to the round, for :meth:`note_recovery`.
        """
        names = set(nodes)
        earlier = self.epoch if after is None else after

        def done() -> int:
            steps: defaultdict[int, Counter[str]] = defaultdict(Counter)
            for line in self.lines("step"):
                if line.epoch > earlier and line.world == len(names) * self.nproc:
                    steps[line.epoch][line.node] += 1
            return max((e for e, by in steps.items() if set(by) == names and min(by.values()) >= 2), default=0)

        epoch = self.wait(f"{sorted(names)} train together in a round after epoch {earlier}", done)
        if fault is not None:
            self.note_recovery(epoch, fault)
        return epoch

    def note_recovery(self, epoch: int, fault: float) -> None:
        """Note for the fault matrix, and print, how long after a fault the next round was complete and made a step."""
        nodes = len(self.ranks(epoch))
        first = min(line.time for line in self.lines("step") if line.epoch == epoch)
        started = min(line.time for line in self.lines("start") if line.epoch == epoch)
        completed = self._completed_at(epoch)
        fault_matrix.note("round complete", completed - fault)
        fault_matrix.note("first step", first - fault)
        self.note(
            f"  {self.nnodes}: {nodes} nodes in round {epoch}: round complete {completed - fault:5.2f} s, "
            f"first worker {started - fault:5.2f} s, first step {first - fault:5.2f} s after the fault"
        )

    def _completed_at(self, epoch: int) -> float:
        entries = self.redis("wake") or []
        times = [
            int(i.split("-")[0]) / 1000
            for i, change in entries
            if change["event"] == "complete" and int(change["epoch"]) == epoch
        ]
        return times[-1] if times else float("nan")

    def wait_end(self, name: str, limit: float = LIMIT) -> int:
        """Wait for a node to end; returns its exit status."""
        node = self.nodes[name]
        node.may_end = True
        self.wait(f"node {name} has ended", lambda: node.process.poll() is not None, limit)
        return int(node.process.wait())

    def report(self) -> str:
        """The run in Redis, the last lines of the record and the nodes' logs, for the message of a failure."""
        with contextlib.suppress(Exception):
            keys = {name: self.redis(name) for name in ("run", "ranks", "members", "candidates", "leases", "wake")}
            redis = "\n".join(f"    {name}: {value}" for name, value in keys.items())
            lines = "\n".join(f"    {line}" for line in self.lines()[-8:])
            logs = "\n".join(
                f"  node {n.name}, exit status {n.process.poll()}:\n{n.log_tail()}" for n in self.nodes.values()
            )
            return f"\n  Redis:\n{redis}\n  the workers' last records:\n{lines}\n{logs}"
        return "\n  (no report could be made)"

    # -- verdicts

    def checkpoint(self) -> dict[str, Any]:
        """The newest checkpoint of `train.py`."""
        newest = max(self.directory.glob("checkpoint-*.json"))
        return dict(json.loads(newest.read_text()))

    def finish(self, *names: str) -> None:
        """Let the workers finish, and check the whole job; these nodes must end with 0, and no others finish."""
        self.tell("finish")
        for name in names:
            status = self.wait_end(name)
            assert status == 0, f"Node {name} ended with {status}." + self.report()
        ended = {line.node for line in self.lines("end")}
        assert ended == set(names), f"{sorted(ended)} have finished, not {sorted(names)}." + self.report()
        self.check()

    def check(self) -> None:
        """Check that no step was lost or repeated, that the weights are right, and the rounds as I2 to I4 promise."""
        checkpoint = self.checkpoint()
        lineage = checkpoint["lineage"]
        assert [step for step, _, _ in lineage] == list(range(len(lineage))), "steps lost or done twice: " + str(
            lineage
        )
        assert {line.step for line in self.lines("end")} <= {len(lineage)}, "the last checkpoint is not the last step's"
        epochs = [epoch for _, epoch, _ in lineage]
        assert epochs == sorted(epochs), f"an older epoch came after a newer one: {lineage}"
        assert checkpoint["weights"] == pytest.approx(reference(len(lineage)), abs=1e-9)
        self.check_rounds()

    def check_rounds(self) -> None:
        """Check that the rounds were as I2 to I4 promise."""
        first_step: dict[int, float] = {}
        of_epoch: defaultdict[int, list[Line]] = defaultdict(list)
        of_node: defaultdict[str, list[Line]] = defaultdict(list)
        for line in self.lines():
            if line.event == "start":
                of_epoch[line.epoch].append(line)
                of_node[line.node].append(line)
            elif line.event == "step":
                first_step.setdefault(line.epoch, line.time)
        for epoch, lines in of_epoch.items():
            worlds = {line.world for line in lines}
            assert len(worlds) == 1, f"epoch {epoch} has several world sizes: {lines}"
            [world] = worlds
            assert self.min_nodes <= world / self.nproc <= self.max_nodes, f"world size {world} of epoch {epoch}"
            ranks = sorted(line.rank for line in lines)
            # no equality: a worker of a round that was cut while its group formed has recorded nothing
            assert len(set(ranks)) == len(ranks), f"ranks {ranks} of epoch {epoch}"
            assert set(ranks) <= set(range(world)), f"ranks {ranks} of epoch {epoch}"
            if epoch in first_step:
                assert ranks == list(range(world)), f"ranks {ranks} of epoch {epoch}, which has made steps"
        for node, lines in of_node.items():
            epochs = [line.epoch for line in lines]
            assert epochs == sorted(epochs), f"epochs {epochs} of node {node}"
            places = {(line.epoch, line.group_rank) for line in lines}
            assert len(places) == len(set(epochs)), f"node {node} was twice in one round: {sorted(places)}"
        began = sorted(first_step, key=first_step.__getitem__)
        assert began == sorted(began), f"the epochs' first steps came in the order {began}"
