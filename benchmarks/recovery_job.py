"""A job of real agents and workers on this host, for `benchmarks.recovery`: start it, hurt it, watch it come back."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness import CONTEXT, TimeLimitError, free_port
from benchmarks.recovery_processes import node as run_node
from redelastic.redis.server import RedisServer

OURS, PLUGIN, C10D = "redelastic run", "torchrun, redis", "torchrun, c10d"
AGENT_KILLED, CRASHED = "kill of the agent alone", "crash of a worker"
JOIN: Final = "join"
# Done to a whole node, as if it were a machine, to its agent, or to its worker; or it is started.
FAULTS: Final = ("kill", "terminate", "freeze", AGENT_KILLED, CRASHED, JOIN)
UNSHARED: Final = "c10d, unshared"  # with a fresh store for each round's workers, set by an environment variable
C10DS: Final = (C10D, UNSHARED)
PROCESSES: Final = Path(__file__).with_name("recovery_processes.py")
CONTEXT.set_forkserver_preload(["torch.distributed.launcher.api", "redelastic.cli.run", run_node.__module__])
WARM: Final = "redelastic run --preload torch"
SURVIVING: Final = "redelastic run --survive"
AGENTS: Final = (OURS, WARM, SURVIVING)  # with our agent
HOST_ROLE, NEW = "the store's host", "a new node"
HOST: Final = 1  # the node that serves c10d's store; its rank is not 0, since c10d ranks nodes of one host by pid
LAST_CALL: Final = 2
MAX_RESTARTS: Final = 3
START: Final = 90.0  # for a job's first steps, in seconds
STEPS: Final = 20  # of every worker before the fault
POLL: Final = 0.02


@dataclass
class Worker:
    """A worker process: its node, and when it was created, had imported torch and did its steps (monotonic)."""

    pid: int
    node: int
    rank: int
    world: int
    born: float
    ready: float | None = None
    steps: list[float] = field(default_factory=list)


@dataclass
class Recovery:
    """How a job came back: seconds since the fault, None for what did not happen.

    Attributes:
        detected: the first of the survivors' workers ended.
        grouped: the last survivor started its worker in a round of all survivors, or began that round with the old one.
        stepped: every survivor made a step in it.
        paused: the longest that a survivor was without a step, until then.
        restarts: the most times that any survivor started its worker.
        missing: why something did not happen.
    """

    detected: float | None = None
    grouped: float | None = None
    stepped: float | None = None
    paused: float | None = None
    restarts: int | None = None
    missing: str = ""

    @property
    def start(self) -> float | None:
        """How long the workers' own start took."""
        return None if self.stepped is None or self.grouped is None else self.stepped - self.grouped


def _signal(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


class Job:
    """Nodes of one contender with one worker each; all end with `close`, or when this process is killed.

    Args:
        contender: `OURS`, `WARM`, `SURVIVING`, `PLUGIN`, `C10D` or `UNSHARED`.
        size: how many nodes at most; the job goes on with two of them, or with one of two.
        conf: settings beyond the contender's defaults.
        first: how many of the nodes start it; None for all.
        state: of each worker that survives, in MB.

    Attributes:
        nodes: their processes.
        server: the Redis that they use, if any.
        survives: whether the others go on without a worker that has crashed, until it is back.
    """

    def __init__(
        self, contender: str, size: int, conf: Mapping[str, float], first: int | None = None, state: int = 0
    ) -> None:
        self.contender, self.size, self._first, self._state = contender, size, first or size, state
        self.survives = contender == SURVIVING
        self._conf = {"last_call_timeout": LAST_CALL, **conf}
        self._port = free_port() if contender in C10DS else None
        self._run_id = f"bench-{uuid.uuid4().hex[:12]}"
        self._workers: list[Worker] = []  # with an entry for each round of one that survives
        self._newest: dict[int, Worker] = {}  # by pid
        self._read = 0  # how much of the record
        self._over = threading.Event()
        self._opened = ExitStack()
        self.nodes: list[Any] = []
        self.server: RedisServer | None = None

    def start(self) -> None:
        """Return once the first nodes have made some steps together.

        Raises:
            TimeLimitError: they did not do so in time.
            RuntimeError: a node ended.
        """
        try:
            self._directory = Path(tempfile.mkdtemp(prefix="redelastic-bench-")).resolve()
            command = [sys.executable, str(PROCESSES), "reaper", str(self._directory)]
            reaper = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
            self._opened.callback(self._end, reaper)
            self._record = self._directory / "record"
            self._record.touch()
            self._open_services()
            for _ in range(self._first):
                self._start_node()
            self._wait_for_steps()
        except BaseException:
            self.close()
            raise

    def _open_services(self) -> None:
        """Start what the nodes need."""
        if self.contender not in C10DS:
            self.server = self._opened.enter_context(RedisServer())

    def close(self) -> None:
        """End all processes, and anyone watching them; idempotent."""
        self._over.set()
        self._opened.close()

    def _start_node(self) -> None:
        number = len(self.nodes)
        given = (self._directory, f"{number}.log", self._env(), *self._command(number))
        self.nodes.append(CONTEXT.Process(target=run_node, args=given))
        self.nodes[-1].start()

    def _end(self, reaper: subprocess.Popen[bytes]) -> None:
        reaper.communicate()
        for node in self.nodes:
            node.join()

    def _env(self) -> dict[str, str]:
        """The nodes' environment variables, beyond this process' own."""
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(self._directory)}
        if self.contender == UNSHARED:
            env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if self.server:
            env["REDELASTIC_REDIS_URL"] = self.server.url
        return env

    def _command(self, number: int) -> list[str]:
        """What a node runs: a module and its arguments."""
        command = ["redelastic", "run"] if self.contender in AGENTS else ["torch.distributed.run"]
        conf = dict(self._conf)
        if self.contender in C10DS:
            command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{self._port}"]
            conf["is_host"] = int(number == HOST)
        else:
            command.append("--rdzv-backend=redis")
        command += [f"--rdzv-id={self._run_id}", "--local-addr=127.0.0.1"]
        command.append(f"--rdzv-conf={','.join(f'{name}={value}' for name, value in conf.items())}")
        if self.contender == WARM:
            command.append("--preload=torch")
        if self.contender == SURVIVING:
            command.append("--survive")
        command += [f"--nnodes={min(2, self.size - 1)}:{self.size}", f"--max-restarts={MAX_RESTARTS}"]
        worker = ["survivor", str(self._state)] if self.contender == SURVIVING else ["worker"]
        return [*command, str(PROCESSES), *worker, str(self._record), str(number)]

    def _settled(self) -> list[Worker]:
        """The workers in a round of all first nodes that have made some steps in it."""
        return [w for w in self.current() if w.world == self._first and len(w.steps) >= STEPS]

    def _wait_for_steps(self) -> None:
        deadline = time.monotonic() + START
        while len(self._settled()) < self._first:
            if ended := [number for number, node in enumerate(self.nodes) if not node.is_alive()]:
                tail = (self._directory / f"{ended[0]}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"node {ended[0]} ended before its first steps\n{tail}")
            if time.monotonic() > deadline:
                raise TimeLimitError(f"did not start within {START:g} s")
            time.sleep(POLL)

    # -- observing

    def workers(self) -> list[Worker]:
        """All workers so far."""
        with self._record.open("rb") as record:
            record.seek(self._read)
            whole, _, _ = record.read().rpartition(b"\n")
        self._read += len(whole) + 1 if whole else 0
        for line in whole.splitlines():
            report = json.loads(line)
            if "step" in report:
                self._newest[report["pid"]].steps.append(report["step"])
            elif "ready" in report:
                self._newest[report["pid"]].ready = report["ready"]
            else:
                self._newest[report["pid"]] = Worker(**report)
                self._workers.append(self._newest[report["pid"]])
        return self._workers

    def current(self) -> list[Worker]:
        """The newest worker of each node, by its rank."""
        newest = {w.node: w for w in sorted(self.workers(), key=lambda w: w.born)}
        return sorted(newest.values(), key=lambda w: w.rank)

    def by_role(self, role: str) -> int:
        """The node with a role."""
        if role in (HOST_ROLE, NEW):
            return HOST if role == HOST_ROLE else self.size - 1
        rank_0, *others = (w.node for w in self.current())
        return rank_0 if role == "rank 0" else next(node for node in others if node != HOST or self.size == 2)

    # -- hurting, and watching

    def hurt(self, fault: str, node: int) -> Watch:
        """Do one of `FAULTS` to a node.

        If its worker crashes and the others survive, they go on without it, until it has started another.
        """
        if fault == JOIN:
            watch = Watch(self, None)
            self._start_node()
            return watch
        agent = psutil.Process(self.nodes[node].pid)
        tree = [agent, *agent.children(recursive=True)]
        hurt, number = {
            "kill": (tree, signal.SIGKILL),
            "freeze": (tree, signal.SIGSTOP),
            "terminate": ([agent], signal.SIGTERM),
            AGENT_KILLED: ([agent], signal.SIGKILL),
            CRASHED: ([psutil.Process(w.pid) for w in self.current() if w.node == node], signal.SIGKILL),
        }[fault]
        watch = Watch(self, None if fault == CRASHED and not self.survives else node)
        _signal(hurt, number)
        if fault == "freeze":  # a frozen reaper never learns that its agent is gone
            self._opened.callback(_signal, tree, signal.SIGKILL)
        return watch

    def over(self, wait: float) -> bool:
        """Whether we have ended the job; waits for that."""
        return self._over.wait(wait)


class Watch:
    """Watches the survivors of a fault, from the moment it is made.

    Attributes:
        fault: that moment, on the monotonic clock.
        detected: a survivor has noticed, or will not.
        over: no more heavy computing: the new round's workers have started, or there will be none.
    """

    def __init__(self, job: Job, victim: int | None) -> None:
        """``victim`` is the node that does not come back, if any."""
        self._job = job
        self._survivors = set(range(job.size)) - {victim}
        self._before = [w for w in job.current() if w.node != victim]
        self._old = [os.pidfd_open(w.pid) for w in self._before]
        self.detected = threading.Event()
        self.over = threading.Event()
        self.fault = time.monotonic()

    def result(self, limit: float) -> Recovery:
        """Wait until all survivors have made a step together, or no longer can."""
        found = Recovery(missing=f"not within {limit:g} s")
        with ExitStack() as opened:
            ends = select.poll()
            for fd in self._old:
                opened.callback(os.close, fd)
                ends.register(fd, select.POLLIN)
            while found.stepped is None and (now := time.monotonic()) < self.fault + limit and not self._job.over(0):
                if found.detected is not None:
                    time.sleep(POLL)
                elif ends.poll(1000 * POLL):
                    found.detected = time.monotonic() - self.fault
                    self.detected.set()
                if ended := sum(not self._job.nodes[w.node].is_alive() for w in self._before):
                    found.missing = f"{ended} of {len(self._survivors)} others ended after {now - self.fault:.0f} s"
                    break
                self._look(found)
        return found

    def _look(self, found: Recovery) -> None:
        new = [w for w in self._job.workers() if w.born > self.fault and w.node in self._survivors]
        whole = {w.node: w for w in new if w.world == len(self._survivors)}  # the newest of each node
        if whole.keys() == self._survivors:
            found.grouped = max(w.born for w in whole.values()) - self.fault
            if all(w.ready for w in whole.values()):
                self.over.set()
            if all(w.steps for w in whole.values()):
                found.stepped = max(w.steps[0] for w in whole.values()) - self.fault
                known = {w.pid for w in self._before}
                found.restarts = max(Counter(w.node for w in new if w.pid not in known).values(), default=0)
                found.paused = max(
                    whole[w.node].steps[0] - max(step for step in w.steps if step < whole[w.node].steps[0])
                    for w in self._before
                )
