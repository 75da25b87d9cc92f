"""Nodes of a soak: each a process of its own, forked from one that has imported torch already.

Like torch's agent: join; let a worker use the round's store and ask ``num_nodes_waiting`` meanwhile; join again.
``python -m tests.proofs.soak.node`` reads what nodes to make from its standard input, and ends with it.

REDELASTIC_SOAK_BREAK names a defect (see DEFECTS) to be put into the Lua texts of all nodes, for tests of the checker.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, NoReturn

import torch.distributed as dist
from redis.exceptions import ConnectionError as RedisConnectionError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
    RendezvousInfo,
    RendezvousParameters,
)

from redelastic.monitoring.events import Left
from redelastic.monitoring.sentences import cause
from redelastic.redis import scripts
from redelastic.redis.sockets import Command
from redelastic.redis.wire import PoolWire
from redelastic.rendezvous.backend import create_backend
from redelastic.rendezvous.handler import EPOCH_VARIABLE, RedisRendezvousHandler, create_handler
from redelastic.rendezvous.node import DrainedError
from redelastic.store import RedisStore, RoundBrokenError

from .history import Writer

log = logging.getLogger(__name__)

POLL: Final = 0.05  # in seconds, as everything here
STEP: Final = 0.15
LATE: Final = 0.25  # a pulse that comes so late means that this process did not run

# What is replaced in the Lua texts, by the name of the defect.
DEFECTS: Final[dict[str, tuple[tuple[str, str], ...]]] = {
    "I1: completes over members": (("redis.call('SCARD', MEMBERS) > 0 or run.restoring", "run.restoring"),),
    "I1: completes while a round is put back": (("MEMBERS) > 0 or run.restoring", "MEMBERS) > 0"),),
    "I2: all are rank 0": (("tonumber(redis.call('ZSCORE', RANKS, node)), run.size", "0, run.size"),),
    "I3: max_nodes is not kept": (("CANDIDATES, 0, run.max - 1,", "CANDIDATES, 0, -1,"),),
    "I4: stores are not fenced": (("elseif superseded() then", "elseif false then"),),
    "I5: closing is forgotten": (
        ("  set('closed', cause)", "  set('closed', nil)"),
        ("return run.closed\n", "return ARGV[1]\n"),
    ),
    "I6: the last call never ends": (("if now >= run.deadline then", "if false then"),),
    "I7: leases do not end": (("LEASES, '-inf', now, 'WITHSCORES'", "LEASES, '-inf', now - 60000, 'WITHSCORES'"),),
    "I8: requests count twice": (("'GET', DEDUP)", "'GET', DEDUP .. '?')"),),
    "I7: the dead have answered": (("LEASES, '-inf', run.roll_until) > 0", "LEASES, '-inf', run.roll_until) < 0"),),
    "I9: answers do not count": (("run.roll_until and heard ~= run.roll_called_at and", "run.roll_until and"),),
    "I9: an outage evicts": (("was_away = run.interval and (silence", "was_away = false and (silence"),),
}


_adds: Final = itertools.count(1)
_calls: Final = itertools.count(1)


class LeaveError(BaseException):
    """SIGTERM: this node is to leave, wherever it is."""


def leave(*_: object) -> NoReturn:
    raise LeaveError


class Node:
    def __init__(self, given: dict[str, Any]) -> None:
        self._given = given
        self._note = Writer(Path(given["history"]), given["name"])
        self._asked_to_close, self._asked_to_call = threading.Event(), threading.Event()
        self._asked_to_finish = threading.Event()

    def run(self) -> None:
        threading.Thread(target=self._pulse, daemon=True).start()
        try:
            handler = self._connect()
            try:
                self._take_part(handler)
            except (RendezvousClosedError, RendezvousGracefulExitError) as e:
                self._note("refused", why=str(e))
            except DrainedError:
                self._note("leaving", why="drained")
                handler.end(Left(cause="drained"), "goes on")
            except LeaveError:
                self._note("leaving", why="SIGTERM")
                handler.end(Left(cause="exited"), "goes on")
            self._note("left")
        except LeaveError:  # it was not connected yet
            self._note("leaving", why="SIGTERM")
        except Exception as e:
            log.exception("node %s", self._given["name"])
            self._note("error", error=f"{type(e).__name__}: {e}")

    def _pulse(self) -> None:
        """Notes when this process did not run, and so could not renew its lease."""
        last = time.monotonic()
        never = threading.Event()
        while True:
            never.wait(POLL)
            now = time.monotonic()
            if now - last > LATE:
                self._note("stalled", since=last, until=now)
            last = now

    def _connect(self) -> RedisRendezvousHandler:
        given = self._given
        times = {name: given[name] for name in ("last_call_timeout", "replacement_timeout", "keep_alive_interval")}
        config: dict[str, Any] = times | {"keep_alive_max_attempt": given["attempts"], "join_timeout": 600}
        config |= {"node_name": given["name"], "read_timeout": 30}
        params = RendezvousParameters(
            "redis", given["url"], given["run"], given["min"], given["max"], "127.0.0.1", **config
        )
        while True:
            try:
                backend, store = create_backend(params)
            except RendezvousConnectionError:
                self._note("no server")
                continue
            store.close()
            handler = create_handler(backend, params)
            assert isinstance(handler, RedisRendezvousHandler)
            return handler

    def _take_part(self, handler: RedisRendezvousHandler) -> None:
        signal.signal(signal.SIGUSR1, lambda *_: self._asked_to_close.set())
        signal.signal(signal.SIGHUP, lambda *_: self._asked_to_call.set())
        signal.signal(signal.SIGUSR2, lambda *_: self._asked_to_finish.set())
        worker: Worker | None = None
        while True:
            self._note("asks")
            info = handler.next_rendezvous()
            epoch = int(os.environ[EPOCH_VARIABLE])
            at = info.bootstrap_store_info
            assert at is not None
            entered = {"rank": info.rank, "size": info.world_size, "master": f"{at.master_addr}:{at.master_port}"}
            self._note("entered", epoch=epoch, node=handler.node.id, **entered)
            worker = Worker(self._note, info, epoch, handler.node.id, worker)
            why = self._train(handler)
            if why:
                self._note("leaving", why=why)
                finished = why == "finished"
                handler.end(Left(cause="finished" if finished else "exited"), "closes" if finished else "goes on")
                return
            self._note("broken", epoch=epoch, why=cause(broken.why if (broken := handler.node.view.broken) else None))
            time.sleep(self._given["lag"])  # the time to stop workers, which train until then
            worker.stop()

    def _train(self, handler: RedisRendezvousHandler) -> str:
        """Returns why the node leaves; empty if its round is broken."""
        while not handler.num_nodes_waiting():
            if self._asked_to_close.is_set():
                self._asked_to_close.clear()
                self._note("closing")
                handler.set_closed()
                self._note("closed")
            if self._asked_to_call.is_set():
                self._asked_to_call.clear()
                self._call(handler)
            if self._asked_to_finish.is_set():
                return "finished"
            if handler.node.view.closed:
                self._note("heard", why=handler.node.view.closed)
                return "heard"
            if any(drain.node == handler.node.id for drain in handler.node.view.drains):
                return "drained"
            time.sleep(POLL)
        return ""

    def _call(self, handler: RedisRendezvousHandler) -> None:
        """Calls the roll as when workers have failed; a thread waits for the verdict, since this one has to go on."""
        node = handler.node
        entered, number = node.view.round, next(_calls)
        assert entered is not None
        self._note("calls", call=number, epoch=entered.epoch)
        node.call_roll(time.monotonic())

        def wait() -> None:
            patience = self._given["keep_alive_interval"] * self._given["attempts"]
            if not node.watch.wait_for_loss(patience) and node.view.round is entered and node.view.knows_who_lives:
                self._note("answered", call=number, epoch=entered.epoch)

        threading.Thread(target=wait, daemon=True).start()


class Worker(threading.Thread):
    """Uses a round's store: writes its id, waits for its peers, and counts; first it tries the last round's store."""

    def __init__(self, note: Writer, info: RendezvousInfo, epoch: int, node: str, last: Worker | None) -> None:
        super().__init__(daemon=True)
        assert isinstance(info.store, RedisStore)
        self._note, self._node, self.epoch, self.store = note, node, epoch, info.store
        self._rank, self._size = info.rank, info.world_size
        self._last = last and (last.store, last.epoch)
        self._over = threading.Event()
        self.start()

    def stop(self) -> None:
        self._over.set()

    def run(self) -> None:
        try:
            if self._last:
                self._add(*self._last)
            self._last = None
            if self._meet():
                while not self._over.is_set() and self._add(self.store, self.epoch):
                    self._over.wait(STEP)
        except Exception as e:
            log.exception("worker of %s", self._node)
            self._note("error", error=f"worker: {type(e).__name__}: {e}")

    def _meet(self) -> bool:
        keys = [f"rank/{rank}" for rank in range(self._size)]
        while not self._over.is_set():
            try:  # each time: a server may lose its data
                self.store.set(keys[self._rank], self._node)
                self.store.wait(keys, timedelta(seconds=1))
                peers = [peer.decode() for peer in self.store.multi_get(keys)]
            except RoundBrokenError:
                return False
            except dist.DistError as e:
                self._note("apart", epoch=self.epoch, error=str(e)[:200])
            else:
                self._note("met", epoch=self.epoch, peers=peers)
                return True
        return False

    def _add(self, store: RedisStore, epoch: int) -> bool:
        this = {"epoch": epoch, "add": next(_adds)}
        self._note("adds", **this)
        try:
            value = store.add("steps", 1)
        except RoundBrokenError:
            self._note("fenced", **this)
            return False
        except dist.DistError as e:
            self._note("unsure", error=str(e)[:200], **this)
            return True
        self._note("added", value=value, **this)
        return True


def lose_replies(rate: float) -> None:
    """Loses some replies after their request took effect, as a broken connection does."""
    exchange = PoolWire.exchange

    def exchange_or_lose(self: PoolWire, *commands: Command) -> list[Any]:
        replies = exchange(self, *commands)
        if commands[0][0].startswith(b"EVAL") and random.random() < rate:
            self.close()
            raise RedisConnectionError("the soak has lost this reply")
        return replies

    PoolWire.exchange = exchange_or_lose  # type: ignore[method-assign]


def with_text(text: str) -> list[scripts.Script]:
    """The scripts that have this text."""
    return [s for s in vars(scripts).values() if isinstance(s, scripts.Script) and text in s.text]


def put_in(defect: str) -> None:
    """Puts a defect into the Lua texts."""
    for old, new in DEFECTS[defect]:
        for script in with_text(old):
            script.text = script.text.replace(old, new)
            script.digest = hashlib.sha1(script.text.encode(), usedforsecurity=False).hexdigest()


def main() -> None:
    """The process that nodes are forked from; it has one thread only."""
    logging.basicConfig(format="%(asctime)s %(process)d %(message)s")
    signal.signal(signal.SIGTERM, leave)  # nodes inherit it
    if defect := os.environ.get("REDELASTIC_SOAK_BREAK"):
        put_in(defect)
    os.write(1, b"ready\n")
    parent = os.getpid()
    for line in sys.stdin:
        with contextlib.suppress(ChildProcessError):  # chaos holds a pidfd of all earlier ones by now
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        pid = os.fork()
        if pid == 0:
            be_a_node(json.loads(line), parent)
        os.write(1, f"{pid}\n".encode())


def be_a_node(given: dict[str, Any], parent: int) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: nothing is left when the parent ends
        if os.getppid() == parent:
            random.seed()  # else all nodes would have the same jitter
            if given["loss"]:
                lose_replies(given["loss"])
            Node(given).run()
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
