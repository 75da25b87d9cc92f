"""Applies a schedule to real processes and a real Redis, and records what it does."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import redis

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.sentences import sentence
from redelastic.redis.connection import Connection
from redelastic.redis.errors import RedelasticError
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer

from .history import Event, Tail, Writer, read
from .schedule import ATTEMPTS, Episode

POLL: Final = 0.05  # in seconds
SLOW: Final = 0.25  # a reply of Redis that takes longer is noted
SIGNALS: Final = {
    "kill": signal.SIGKILL,
    "leave": signal.SIGTERM,
    "freeze": signal.SIGSTOP,
    "thaw": signal.SIGCONT,
    "call": signal.SIGHUP,
}
WAITS: Final = {"asked": "asks", "entered": "entered"}  # action -> the event of a node that it waits for


@contextlib.contextmanager
def zygote(log: Path, defect: str = "") -> Iterator[Callable[[dict[str, Any]], int]]:
    """The process that forks nodes; yields a function that makes one of its parameters and returns its process id."""
    path = os.pathsep.join(sys.path)
    environment = os.environ | {"PYTHONPATH": path, "REDELASTIC_SOAK_BREAK": defect}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.proofs.soak.node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=environment,
            text=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    to, back = process.stdin, process.stdout

    def answer() -> str:
        line = back.readline()
        if not line:
            raise RuntimeError(f"the process that forks nodes has ended, see {log}: {log.read_text()[-2000:]}")
        return line.strip()

    def make(parameters: dict[str, Any]) -> int:
        to.write(json.dumps(parameters) + "\n")
        to.flush()
        return int(answer())

    try:
        assert answer() == "ready"
        yield make
    finally:
        to.close()
        process.kill()  # its children end with it
        back.close()
        process.wait(10)


@dataclass
class Seen:
    """A node as chaos knows it: its process, and what it wrote last."""

    process: int  # a pidfd: once it has ended, another process may have its id
    tail: Tail
    epoch: int = 0
    size: int = 0
    holds: bool = False
    alive: bool = True
    said: set[str] = field(default_factory=set)

    def look(self) -> None:
        for event in self.tail.read():
            self.said.add(event["what"])
            if event["what"] == "entered":
                self.epoch, self.size, self.holds = event["epoch"], event["size"], True
            elif event["what"] in {"asks", "broken", "leaving"}:
                self.holds = False

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.process, number)


class Chaos:
    """One episode.

    Args:
        server: the Redis of its run, with a data directory.
        make: makes nodes, see :func:`zygote`.
        folder: for what is written down.
        patience: how much later than promised things may happen on a busy machine, in seconds.
        say: called with lines of progress.
    """

    def __init__(
        self,
        episode: Episode,
        server: RedisServer,
        make: Callable[[dict[str, Any]], int],
        folder: Path,
        *,
        patience: float,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.episode, self._server, self._make, self._folder = episode, server, make, folder
        self._patience, self._say = patience, say
        self._note = Writer(folder / "chaos.jsonl", "chaos")
        self._nodes: dict[str, Seen] = {}
        self._ended = threading.Event()
        self._next_word = 0.0
        self._last = ""

    def run(self) -> list[Event]:
        """Returns the history."""
        pinger = threading.Thread(target=self._ping, daemon=True)
        self._note("episode", patience=self._patience, **self.episode.as_dict())
        pinger.start()
        try:
            began = time.monotonic()
            for action in self.episode.actions:
                self._wait(lambda at=began + action.at: time.monotonic() >= at)  # type: ignore[misc]
                self._last = f"{action.what} {action.node}".strip()
                self._do(action.what, action.node)
                if action.what in WAITS:
                    began = max(began, time.monotonic() - action.at)
            self._wait(lambda: time.monotonic() >= began + self.episode.seconds)
            self._note("calm")
            self._close(settled=self._wait(self._settled, self._limit + 2))
            self._wait(lambda: not any(node.alive for node in self._nodes.values()), 2 + self._patience)
            self._note("ends")
            self._copy_events()
        finally:
            self._ended.set()
            for node in self._nodes.values():
                node.signal(signal.SIGKILL)
                os.close(node.process)
            pinger.join()
            self._note.close()
        return read(self._folder.glob("*.jsonl"))

    @property
    def _limit(self) -> float:
        """The seconds within which a rendezvous has to complete (I6)."""
        e = self.episode
        return e.last_call + e.replacement + 2 * e.lease + self._patience

    def _wait(self, holds: Callable[[], bool], timeout: float = 3600.0) -> bool:
        until = time.monotonic() + timeout
        while not holds():
            now = time.monotonic()
            if now >= until:
                return False
            if now >= self._next_word:
                self._next_word = now + 2
                self._say(self._words())
            time.sleep(POLL)
            self._look()
        return True

    def _look(self) -> None:
        with selectors.DefaultSelector() as selector:
            for node in self._nodes.values():
                if node.alive:
                    node.look()
                    selector.register(node.process, selectors.EVENT_READ, node)
            for key, _ in selector.select(0):
                key.data.alive = False
                key.data.look()

    def _words(self) -> str:
        alive = [node for node in self._nodes.values() if node.alive]
        epoch = max((node.epoch for node in self._nodes.values()), default=0)
        train = sum(node.holds for node in alive)
        return f"round {epoch}, {train} of {len(alive)} nodes train; {self._last}"

    def _settled(self) -> bool:
        """Whether all live nodes are in one round, as far as it has room; or they are too few."""
        alive = [node for node in self._nodes.values() if node.alive]
        inside = [node for node in alive if node.holds]
        if len(alive) < self.episode.min_nodes:
            return not inside
        epoch = max((node.epoch for node in inside), default=0)
        everybody = len(inside) == min(len(alive), self.episode.max_nodes)
        return everybody and all(node.epoch == epoch and node.size == len(inside) for node in inside)

    # -- actions

    def _do(self, what: str, name: str) -> None:
        if name:
            if what == "start":
                self._start(name, **self.episode.nodes[name])
            elif what in WAITS:
                self._wait(lambda: WAITS[what] in self._nodes[name].said, self._limit)
            elif what == "drain":
                self._drain(name)
            else:
                self._note(what, node=name)
                self._nodes[name].signal(SIGNALS[what])
            return
        self._note(what)
        match what:
            case "down":
                self._server.kill()
            case "up":
                self._server.start()
            case "forget":
                data = self._server.data_dir
                assert data is not None
                shutil.rmtree(data)
            case "stop":
                self._signal_server(signal.SIGSTOP)
            case "cont":
                self._signal_server(signal.SIGCONT)
            case _:
                command = {"scripts": "SCRIPT FLUSH", "clients": "CLIENT KILL TYPE NORMAL", "flush": "FLUSHALL"}[what]
                with self._server.get_client() as client:
                    client.execute_command(*command.split())
        self._note("done", action=what)

    def _signal_server(self, number: int) -> None:
        pid = self._server.pid
        assert pid is not None
        os.kill(pid, number)

    def _start(self, name: str, **behaviour: float) -> None:
        e = self.episode
        path = self._folder / f"{name}.jsonl"
        parameters: dict[str, Any] = {"name": name, "history": str(path), "url": self._server.url, "run": e.name}
        parameters |= {"min": e.min_nodes, "max": e.max_nodes, "keep_alive_interval": e.interval, "attempts": ATTEMPTS}
        parameters |= {"last_call_timeout": e.last_call, "replacement_timeout": e.replacement} | behaviour
        self._note("start", node=name)
        self._nodes[name] = Seen(os.pidfd_open(self._make(parameters)), Tail(path))

    @contextlib.contextmanager
    def _control(self, patience: float = 1.0) -> Iterator[RunControl]:
        connection = Connection.open(self._server.url, 1.0, patience, patience)
        try:
            yield RunControl(connection, RunKeys(self.episode.name))
        finally:
            connection.close()

    def _drain(self, name: str) -> None:
        self._note("drain", node=name)
        with contextlib.suppress(RedelasticError, LookupError), self._control() as control:
            control.drain(control.find(name).id, "by chaos", 1)
            return
        self._note("not drained", node=name)  # Redis is away, or it has not joined yet

    def _close(self, *, settled: bool) -> None:
        """Closes the run; then a newcomer has to be refused. A finishing node closes a run only if its round stands."""
        closer = next((node for node in self._nodes.values() if node.alive and node.holds and settled), None)
        if closer is None or self.episode.closing == "tool":
            self._note("closing")
            with self._control(10.0) as control:
                control.close("the soak ends", stop=False, ttl=60)
            self._note("closed")
        else:
            node = self.episode.closing == "node"
            closer.signal(signal.SIGUSR1 if node else signal.SIGUSR2)
            self._wait(lambda: bool(closer.said & {"closed", "left"}), 2 + self._patience)
            self._note("closed")
        self._start("late", lag=0, loss=0)

    # -- in the background

    def _ping(self) -> None:
        """Notes when Redis, or this process, is slow: the checker demands nothing of a machine that stands still."""
        with self._server.get_client(socket_timeout=30) as client:
            while not self._ended.wait(POLL):
                since = time.monotonic()
                with contextlib.suppress(redis.RedisError):
                    client.ping()
                if time.monotonic() - since > SLOW:
                    self._note("slow", since=since, until=time.monotonic())

    def _copy_events(self) -> None:
        """Copies the events of Redis, in their order there."""
        with self._control(10.0) as control:
            for event in control.events():
                fields = {"event": event.event, "epoch": event.epoch, "node": event.node, "reason": sentence(event)}
                self._note("record", **fields)
