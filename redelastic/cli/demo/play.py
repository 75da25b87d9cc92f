"""The demo: nodes of one run on this machine, and the story of how they lose one and go on."""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import string
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import psutil

from redelastic.cli.events import Printer
from redelastic.cli.output import open_console
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.run.chronicle import Chronicle
from redelastic.run.control import RunControl
from redelastic.run.history import replay

if TYPE_CHECKING:
    from typing_extensions import Self

STEPS: Final = 500
SAVE_EVERY: Final = 10
PACE: Final = 0.05  # minimum seconds per step: a replacement that starts mid-training must join before the end
ACCURACY: Final = 0.95  # as promised
TIME_LIMIT: Final = 240.0  # for everything, in seconds
LOG_TAIL: Final = 15  # lines
PRELOAD: Final = "torch,torch._dynamo,numpy"  # including the second, which DDP and optimizers import when created

Report = dict[str, Any]  # see `report` in train.py; empty: rank 0 has reported nothing new


class DemoError(Exception):
    """The demo did not go as promised; ``code`` is its exit code."""

    code = 1


class Job:
    """A job's nodes, each a `redelastic run`, on a Redis of their own; prints its events while it waits.

    As a context manager, it leaves no process and no file, and takes in the signals that ask this process to end.

    Args:
        nnodes: as torchrun's.
        training: arguments of the training, ``train.py``.
    """

    def __init__(self, nnodes: str, *training: str) -> None:
        self.run_id = f"demo-{uuid.uuid4().hex[:4]}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._nnodes, self._training = nnodes, training
        self._killed: set[str] = set()
        self._signals: list[int] = []
        self._printer = Printer()
        self._reports = self._listen()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # first: nothing interrupts the cleanup
                before = signal.signal(number, lambda number, _frame: self._signals.append(number))
                stack.callback(signal.signal, number, before)
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="redelastic-demo-")))
            self.server = stack.enter_context(RedisServer())
            connection = Connection.open(self.server.url)
            stack.callback(connection.close)
            self.chronicle = Chronicle(RunControl(connection, RunKeys(self.run_id)))
            self._reader, self._writer = os.pipe()
            stack.callback(os.close, self._reader)
            stack.callback(os.close, self._writer)
            self._resources = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        with self._resources as stack:
            for node in self.nodes.values():
                stack.callback(kill_tree, node)

    def start(self, name: str) -> None:
        """Start a node."""
        # An outer torchrun's own settings must not reach the nodes.
        inherited = {
            name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCHELASTIC_"))
        }
        command = [sys.executable, "-m", "redelastic", "run", f"--preload={PRELOAD}", f"--rdzv-id={self.run_id}"]
        command += [f"--node-name={name}", f"--nnodes={self._nnodes}", "--nproc-per-node=1", "--max-restarts=5"]
        command += ["--local-addr=127.0.0.1", "--rdzv-conf=join_timeout=60", "-m", "redelastic.cli.demo.train"]
        with self._log(name).open("w") as log:
            self.nodes[name] = subprocess.Popen(
                [*command, f"--checkpoint={self._folder}/checkpoint.pt", *self._training],
                stdin=subprocess.DEVNULL,
                stdout=self._writer,
                stderr=log,
                cwd=self._folder,
                env=inherited
                | {
                    "REDELASTIC_REDIS_URL": self.server.url,  # with its password: never on a command line
                    "GLOO_SOCKET_IFNAME": "lo",  # all nodes are on this host, whatever its name resolves to
                    "OMP_NUM_THREADS": "1",
                    "CUDA_VISIBLE_DEVICES": "",
                    "TMPDIR": str(self._folder),  # torch's own files go with ours
                },
                start_new_session=True,  # the terminal's Ctrl-C goes to the demo, which then ends the nodes
            )

    def kill(self, name: str) -> None:
        """End a node as a power failure would: agent and worker at once."""
        self._killed.add(name)
        kill_tree(self.nodes[name])

    def running(self) -> set[str]:
        """The nodes whose agents have not ended."""
        return {name for name, node in self.nodes.items() if node.poll() is None}

    def until(self, expected: Callable[[Report], object]) -> Report:
        """Wait for a report, and print what happens meanwhile.

        Raises:
            DemoError: the training was over before, a node ended by itself, the time is up, or a signal came.
        """
        for report in self._reports:
            if expected(report):
                return report
            if report.get("event") == "done":
                break
        raise DemoError("the training was over too soon; this machine is very busy: try again")

    def _listen(self) -> Iterator[Report]:
        deadline, rest, is_done = time.monotonic() + TIME_LIMIT, b"", False
        while True:
            ended = (
                self.nodes.keys() - self.running() - self._killed
            )  # before the last reports are read: an agent may end with 0 after the last one
            ready = select.select([self._reader], [], [], 0.05)[0]
            *lines, rest = (rest + (os.read(self._reader, 1 << 16) if ready else b"")).split(b"\n")
            self._printer.print(self.chronicle.read())
            for report in (json.loads(line) for line in lines if line.startswith(b'{"event"')):
                is_done = is_done or report["event"] == "done"
                yield report
            if self._signals:
                error = DemoError(signal.Signals(self._signals[0]).name)
                error.code = 128 + self._signals[0]
                raise error
            for name in ended:
                if (code := self.nodes[name].returncode) or not is_done:
                    log = self._log(name).read_text(errors="replace").splitlines()[-LOG_TAIL:]
                    raise DemoError(
                        "\n".join([f"node {name}'s agent ended with exit code {code}; its log ends:", *log])
                    )
            if time.monotonic() > deadline:
                raise DemoError(f"the run was not over within {TIME_LIMIT:g} s")
            yield {}

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"


def kill_tree(agent: subprocess.Popen[bytes]) -> None:
    """Send SIGKILL to an agent and all its descendants, whatever their sessions, and wait until they are gone."""
    if agent.poll() is not None:
        return
    root = psutil.Process(agent.pid)
    root.suspend()  # so that it starts no worker unseen
    tree = [root, *root.children(recursive=True)]
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    agent.wait()
    while any(map(_is_alive, tree)):
        time.sleep(0.01)


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # init may be slow to reap it
    return False


# -- the story


def play(nodes: int, seed: int, *, kill: bool) -> int:
    """Run the demo from the first node's start to the last one's end.

    Returns:
        The exit code: 0 if all went as promised, 1 if not, 128 + n when signal n ended it.
    """
    nnodes = f"{nodes - 1 if kill else nodes}:{nodes}"
    kill_at = STEPS // 5 + random.Random(seed).randrange(1, SAVE_EVERY) if kill else None  # between two checkpoints
    try:
        with Job(nnodes, f"--steps={STEPS}", f"--save-every={SAVE_EVERY}", f"--pace={PACE}", f"--seed={seed}") as job:
            _perform(job, string.ascii_uppercase[:nodes], kill_at)
    except (DemoError, OSError, RuntimeError) as error:
        if (code := getattr(error, "code", 1)) == 1:
            _say(f"FAILED: {error}", style="bold red")
        else:
            _say(f"Ended by {error}: all processes are stopped, all files removed.", style="yellow")
        return code
    return 0


def _perform(job: Job, names: str, kill_at: int | None) -> None:
    _say(
        f"{len(names)} nodes, each a `redelastic run`, learn handwritten digits together (DDP, on the CPU).",
        f"They meet in a private Redis; `redelastic events {job.run_id} --follow` prints the lines with a time.",
    )
    _say(f"Nodes {_listed(names)} start. Each imports torch first, which takes some seconds.")
    for name in names:
        job.start(name)
    job.until(_step_of(len(names)))
    _say(f"The training runs. Every {SAVE_EVERY} steps, rank 0 saves a checkpoint.")
    outcome = "Nobody was killed." if kill_at is None else _lose_rank_0(job, names, kill_at)
    done = job.until(lambda report: report.get("event") == "done")
    _say(f"All {done['step']} steps are done. The nodes end by themselves, and the run closes.")
    job.until(lambda _: not job.running())
    job.until(lambda report: not report)  # the last events are printed
    accuracy, ettr = done["accuracy"], replay(job.chronicle.events).ettr or 0.0
    if accuracy < ACCURACY:
        raise DemoError(f"the accuracy is {accuracy:.1%}, less than {ACCURACY:.0%}")
    _say(
        f"As expected: {outcome}",
        f"Of {done['test_samples']} held-out digits, {accuracy:.1%} are read right (promised: {ACCURACY:.0%}).",
        f"Of the nodes' time, {ettr:.0%} was spent training (ETTR).",
        style="bold green",
    )


def _lose_rank_0(job: Job, names: str, kill_at: int) -> str:
    """Kill the node of rank 0, and replace it; returns the outcome."""
    last = job.until(lambda report: report.get("step", 0) >= kill_at)
    completed = next(event for event in reversed(job.chronicle.events) if event.event == "completed")  # by rank 0
    victim = completed.node.partition("-")[0]
    others = names.replace(victim, "")
    began = time.monotonic()
    job.kill(victim)
    _say(f"SIGKILL to node {victim}, agent and worker, at step {last['step']}: it has rank 0.", style="bold red")
    _say(f"Without it, workers of {_listed(others)} fail. The nodes call the roll: who is silent for 0.5 s is lost.")
    first = job.until(_step_of(len(others)))
    seconds = time.monotonic() - began
    replacement = string.ascii_uppercase[len(names)]
    job.start(replacement)
    _say(
        f"{seconds:.1f} s after the kill, {_listed(others)} train on, from the checkpoint of step {first['step'] - 1}.",
        f"Node {replacement} starts, as the replacement. It joins once it has imported torch.",
    )
    whole = job.until(_step_of(len(names)))
    _say(f"All {len(names)} train, from step {whole['step'] - 1}: {(STEPS - whole['step']) * PACE:.0f} s more.")
    return f"the node of rank 0 died, the training did not. The others trained on {seconds:.1f} s later."


def _step_of(size: int) -> Callable[[Report], bool]:
    """Whether a report is of a step of so many nodes."""
    return lambda report: report.get("event") == "step" and report["world_size"] == size


def _listed(names: str) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _say(*lines: str, style: str = "bold") -> None:
    open_console().print("", *lines, sep="\n", style=style)
