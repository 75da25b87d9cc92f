"""The demo: nodes of one run on this machine, which lose one and go on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import string
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil

from redelastic.cli.events import Printer
from redelastic.cli.output import open_console
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.event_log import EventLog
from redelastic.monitoring.history import replay
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.signals import handling

STEPS: Final = 500
KILL_AT: Final = 107  # step: between two checkpoints
PACE: Final = 0.05  # minimum seconds per step: what happens can be followed
ACCURACY: Final = 0.95  # as promised
TIME_LIMIT: Final = 240.0  # for everything, in seconds
LOG_TAIL: Final = 15  # lines
PRELOAD: Final = "torch,torch._dynamo,numpy"  # including the second, which DDP and optimizers import when created


class DemoError(Exception):
    """The demo did not go as promised; ``code`` is its exit code."""

    code = 1


class Job:
    """A job's nodes, each a `redelastic run`, on a Redis of their own; prints its events while it waits.

    Args:
        stack: when it is closed, no process and no file is left. Until then, signals that ask this process to end
            do so only in :meth:`until`.
        run_id: of the run.
        nnodes: as torchrun's.
        training: arguments of the training, ``train.py``.
        survive: whether workers keep their processes when another node is lost.

    Attributes:
        unfinished: a file: the training does not end while it exists, however long a node needs to start.
    """

    def __init__(
        self, stack: contextlib.ExitStack, run_id: str, nnodes: str, *training: str, survive: bool = False
    ) -> None:
        self._signals: list[int] = []
        endings = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        stack.enter_context(handling(endings, lambda number, _: self._signals.append(number)))
        self.run_id = run_id
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redelastic-demo-")))
        self.unfinished = self.folder / "unfinished"
        self.unfinished.touch()
        self.server = stack.enter_context(RedisServer())
        connection = Connection.open(self.server.url)
        stack.callback(connection.close)
        self.event_log = EventLog(RunControl(connection, RunKeys(self.run_id)))
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._stack, self._nnodes, self._training = stack, nnodes, training
        self._options = ["--survive"] if survive else []
        self._killed: set[str] = set()
        self._printer = Printer()
        self._deadline = time.monotonic() + TIME_LIMIT

    def start(self, name: str) -> None:
        """Start a node."""
        outer = ("PET_", "TORCHELASTIC_")  # an outer torchrun's own settings must not reach the nodes
        environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)} | {
            "REDELASTIC_REDIS_URL": self.server.url,  # with its password: never on a command line
            "GLOO_SOCKET_IFNAME": "lo",  # all nodes are on this host, whatever its name resolves to
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TMPDIR": str(self.folder),  # torch's own files are removed with the demo's
        }
        command = [sys.executable, "-m", "redelastic", "run", f"--preload={PRELOAD}", f"--rdzv-id={self.run_id}"]
        command += [f"--node-name={name}", f"--nnodes={self._nnodes}", "--nproc-per-node=1", "--max-restarts=5"]
        command += ["--local-addr=127.0.0.1", "--rdzv-conf=join_timeout=60", *self._options]
        command += ["-m", "redelastic.cli.demo.train"]
        command += [f"--checkpoint={self.folder}/checkpoint.pt", f"--while={self.unfinished}", *self._training]
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "cwd": self.folder, "env": environment}
        with (self.folder / f"{name}.out").open("w") as out, (self.folder / f"{name}.log").open("w") as log:
            # Its own session: the terminal's Ctrl-C goes to the demo, which then ends the nodes.
            node = subprocess.Popen(command, stdout=out, stderr=log, start_new_session=True, **files)
        self.nodes[name] = node
        self._stack.callback(kill_tree, node)

    def kill(self, name: str) -> None:
        """End a node as a power failure would: agent and worker at once."""
        self._killed.add(name)
        kill_tree(self.nodes[name])

    def until(self, reached: Callable[[], object]) -> None:
        """Print what happens until something is reached.

        Raises:
            DemoError: a node ended by itself, all have ended, the time is up, or a signal came.
        """
        while True:
            codes = {name: node.poll() for name, node in self.nodes.items() if name not in self._killed}
            self._printer.print(self.event_log.read())
            if reached():
                return
            if self._signals:
                error = DemoError(signal.Signals(self._signals[0]).name)
                error.code = 128 + self._signals[0]
                raise error
            for name, code in codes.items():
                if code:
                    log = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()[-LOG_TAIL:]
                    raise DemoError(
                        f"node {name}'s agent ended with exit code {code}; its log ends:\n" + "\n".join(log)
                    )
            if None not in codes.values():
                raise DemoError("the training was over too soon")
            if time.monotonic() > self._deadline:
                raise DemoError(f"the run was not over within {TIME_LIMIT:g} s")
            time.sleep(0.05)

    def ended(self) -> bool:
        """Whether all nodes have ended."""
        return all(node.poll() is not None for node in self.nodes.values())

    def reports(self) -> list[dict[str, Any]]:
        """Rank 0's reports, in the order of rounds; see ``report`` in ``train.py``."""
        lines = [
            line
            for path in self.folder.glob("*.out")
            for line in path.read_text(errors="replace").splitlines(keepends=True)
        ]
        found = [json.loads(line) for line in lines if line.startswith('{"event"') and line.endswith("\n")]
        return sorted(found, key=lambda report: (report["epoch"], report["step"]))

    def trains(self, size: int, step: int = 0) -> bool:
        """Whether the last report is of a round of ``size`` nodes, at ``step`` or later."""
        last: dict[str, Any] = (self.reports() or [{}])[-1]
        return last.get("event") == "step" and last["world_size"] == size and last["step"] >= step


def kill_tree(agent: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to an agent and all its descendants, whatever their sessions, and wait until they have ended."""
    if agent.poll() is None:
        root = psutil.Process(agent.pid)
        root.suspend()  # so that it starts no worker unseen
        tree = [root, *root.children(recursive=True)]
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        agent.wait()
        deadline = time.monotonic() + 10
        while any(map(_runs, tree)) and time.monotonic() < deadline:
            time.sleep(0.005)


def _runs(process: psutil.Process) -> bool:
    """Whether a process has not ended; one that init has not reaped yet has."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def play(nodes: int, *, survive: bool) -> int:
    """Run the demo from the first node's start to the last one's end.

    Args:
        nodes: with which it starts.
        survive: whether workers keep their processes when another node is lost.

    Returns:
        The exit code: 0 if all went as promised, 1 if not, 128 + n when signal n ended it.
    """
    try:
        with contextlib.ExitStack() as stack:
            run_id, nnodes = f"demo-{uuid.uuid4().hex[:4]}", f"{nodes - 1}:{nodes}"
            job = Job(stack, run_id, nnodes, f"--steps={STEPS}", f"--pace={PACE}", survive=survive)
            _perform(job, nodes, survive=survive)
    except (DemoError, OSError, RuntimeError) as error:
        if (code := getattr(error, "code", 1)) == 1:
            _say(f"FAILED: {error}", style="bold red")
        else:
            _say(f"Ended by {error}: all processes are stopped, all files removed.", style="yellow")
        return code
    return 0


def _perform(job: Job, nodes: int, *, survive: bool) -> None:
    names, replacement = string.ascii_uppercase[:nodes], string.ascii_uppercase[nodes]
    _say(
        f"{nodes} nodes, each a `redelastic run`, learn handwritten digits together (DDP, on the CPU).",
        f"They meet in a private Redis; `redelastic events {job.run_id} --follow` prints the lines with a time.",
    )
    _say(f"Nodes {_listed(names)} start. Each imports torch first, which takes some seconds.")
    for name in names:
        job.start(name)
    job.until(lambda: job.trains(nodes))
    _say("The training runs. Every 10 steps, rank 0 saves a checkpoint.")
    job.until(lambda: job.trains(nodes, KILL_AT))
    completed = next(event for event in reversed(job.event_log.events) if event.event == "completed")  # by rank 0
    victim = completed.node.partition("-")[0]
    others, began, step = _listed(names.replace(victim, "")), time.monotonic(), job.reports()[-1]["step"]
    job.kill(victim)
    _say(f"SIGKILL to node {victim}, agent and worker, at step {step}: it has rank 0.", style="bold red")
    end = "leave the round" if survive else "fail"
    _say(f"Without it, workers of {others} {end}. The nodes call the roll: who is silent for 0.5 s is lost.")
    job.until(lambda: job.trains(nodes - 1))
    seconds = time.monotonic() - began
    again = job.reports()[-1]["epoch"]
    resumed = next(report["step"] for report in job.reports() if report["epoch"] == again)
    how = f"in the same processes, from step {resumed}" if survive else f"from the checkpoint of step {resumed}"
    job.start(replacement)
    _say(
        f"{seconds:.1f} s after the kill, {others} train on, {how}.",
        f"Node {replacement} starts, as the replacement. It joins once it has imported torch.",
    )
    job.until(lambda: job.trains(nodes))
    step = job.reports()[-1]["step"]
    _say(f"All {nodes} train, from step {step - 1}: {max(0, STEPS - step) * PACE:.0f} s more.")
    job.unfinished.unlink()
    job.until(job.ended)
    done, ettr = job.reports()[-1], replay(job.event_log.events).ettr or 0.0
    if done["event"] != "done" or done["accuracy"] < ACCURACY:
        raise DemoError(f"the training did not reach an accuracy of {ACCURACY:.0%}: {done}")
    _say(
        f"As expected: the node of rank 0 died, the training did not. The others trained on {seconds:.1f} s later.",
        f"Of {done['test_samples']} held-out digits, {done['accuracy']:.1%} are read right (promised: {ACCURACY:.0%}).",
        f"Of the nodes' time, {ettr:.0%} was spent training (ETTR).",
        style="bold green",
    )
    if not survive:
        _say("`redelastic demo --survive`: the others keep their processes, and lose no step.")


def _listed(names: str) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _say(*lines: str, style: str = "bold") -> None:
    open_console().print("", *lines, sep="\n", style=style)
