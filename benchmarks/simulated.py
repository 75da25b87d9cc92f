"""Nodes without threads, thousands in a process: each sends what a node of the package sends, over one connection.

The package's own code makes requests and takes in replies; only the waiting is done here.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import hiredis
import redis

from benchmarks.harness import raise_limit_of_files
from redelastic.monitoring.events import Left
from redelastic.redis import scripts
from redelastic.redis.connection import ATTEMPT_TIMEOUT, Connection, Timeout
from redelastic.redis.keys import RunKeys
from redelastic.redis.sockets import Command
from redelastic.redis.wire import Wire
from redelastic.rendezvous import replies
from redelastic.rendezvous.candidate import Candidate
from redelastic.rendezvous.keeper import COARSE, Keeper
from redelastic.rendezvous.node import Node
from redelastic.rendezvous.settings import Settings
from redelastic.rendezvous.view import Round, View

T = TypeVar("T")
PORT: Final = 29500  # where they would serve the bootstrap store, which none does
SINCE_RECEIVED: Final = slice(52, 56)  # of Linux' struct tcp_info: ms since the last data came
AT_ONCE: Final = 200  # connecting: more would overflow the server's backlog


class Sent(Exception):  # noqa: N818  # not an error: carries a command out of the code that would send it
    """A command on its way to Redis."""


class Recorder(Connection):
    """A connection that raises what it would send, unless it already has the reply."""

    def __init__(self) -> None:
        self.name, self.served, self.max_block = "a simulated node's Redis", False, ATTEMPT_TIMEOUT / 2
        self.reply: Any = None
        self.has_reply = False

    def attempt(self, operation: Callable[[Wire], T], timeout: Timeout = None) -> T:
        """See Connection."""
        del timeout
        if self.has_reply:
            self.has_reply = False
            return self.reply  # type: ignore[no-any-return]
        return operation(self)  # it is its own wire

    def exchange(self, *commands: Command, timeout: Timeout = None) -> list[Any]:
        """See Connection."""
        del timeout
        if self.has_reply:
            self.has_reply = False
            return [self.reply]
        raise Sent(commands[0])


class Unattended(Keeper):
    """A keeper without a thread."""

    def start(self, since: str) -> None:
        """Leave the beats to the node's task."""


class SimulatedNode(asyncio.Protocol):
    """A node of a run.

    Attributes:
        parked: whether it waits for a round.
        epoch: of the round that it is in.
        entered_at: when it entered that one, in seconds on the monotonic clock, like the next three.
        broken_at: when it heard that its round was broken.
        told_at: when the kernel had received that for it, which the other nodes of this process do not delay.
        renewed_at: when it last asked for its lease.
        may_join: whether it joins again as soon as it hears of that.
    """

    def __init__(self, keys: RunKeys, settings: Settings, number: int) -> None:
        host = f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
        self.connection = Recorder()
        self.node = Node(self.connection, keys, settings, host)
        self.keeper = Unattended(self.node)
        self.interval = settings.keep_alive_interval
        self.parked, self.epoch = False, 0
        self.entered_at = self.broken_at = self.heard_at = self.renewed_at = 0.0
        self.may_join = asyncio.Event()
        self.may_join.set()
        self._heard = "0-0"
        self._reader = hiredis.Reader()

    # -- its connection

    async def connect(self, login: dict[str, Any]) -> None:
        """Connect and log in."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_connection(lambda: self, login["host"], login["port"])
        await self.send("AUTH", login["password"])

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        self._reader.feed(data)
        if (reply := self._reader.gets()) is not False and not self._reply.done():
            self._reply.set_result(reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        if not self._reply.done():
            self._reply.set_exception(exc or ConnectionError("Redis closed a connection"))

    async def send(self, *command: Any) -> Any:
        """Send a command, and wait for its reply."""
        self._reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._transport.write(hiredis.pack_command(command))
        reply = await self._reply
        if isinstance(reply, Exception):
            raise RuntimeError(str(reply))  # noqa: TRY004  # an error reply from Redis
        return reply

    async def through(self, ask: Callable[[], T]) -> T:
        """Run code that asks Redis once: up to its command, and again with the reply."""
        try:
            ask()
        except Sent as sent:
            self.connection.reply = await self.send(*sent.args[0])
            self.connection.has_reply = True
        return ask()

    def _idle(self) -> float:
        """For how long the kernel has received nothing for it, in seconds."""
        sock = self._transport.get_extra_info("socket")
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SINCE_RECEIVED.stop)
        return int.from_bytes(info[SINCE_RECEIVED], sys.byteorder) / 1000

    def close(self) -> None:
        """Close the connection without notice."""
        self._transport.close()

    # -- what it does

    async def join(self) -> Round:
        """Like Candidate.join: returns once this node is in a new round."""
        candidate = Candidate(self.keeper, PORT, 0.0)
        self.node.watch.update(View.ask)
        while True:
            self.renewed_at = time.monotonic()
            reply = await self.through(candidate.ask)
            if isinstance(reply, replies.Complete):
                self.parked = False
                entered = candidate.round_from(reply)
                candidate.enter(entered)
                return entered
            if not isinstance(reply, replies.Waiting):
                raise RuntimeError(f"a node that joins got {reply}")  # noqa: TRY004  # an unexpected reply of Redis
            until = time.monotonic() + reply.wait_ms / 1000 if reply.wait_ms >= 0 else float("inf")
            self.parked = True
            self._heard = before = candidate.hear(reply)
            while self._heard == before and self.node.view.standing == "candidate":
                if (left := until - time.monotonic()) <= 0:
                    break
                await self._pump(left)

    async def live(self) -> None:
        """Join, hold the round until it is broken, as the keeper's thread does, and join again at once."""
        while True:
            entered = await self.join()
            self.epoch, self.entered_at = entered.epoch, time.monotonic()
            while not self.node.view.nodes_waiting:
                await self._pump(self.interval)
            self.broken_at = time.monotonic()
            self.heard_at = self.broken_at - self._idle()
            await self.may_join.wait()

    def leave(self, client: redis.Redis) -> None:
        """Leave the run, over another connection: this one is blocked in a read."""
        try:
            self.node.leave(Left(cause="exited"))
        except Sent as sent:
            client.execute_command(*sent.args[0])

    def call_roll(self, client: redis.Redis) -> None:
        """Call the roll, over another connection."""
        try:
            self.node.call_roll(time.monotonic())
        except Sent as sent:
            if not (reply := client.execute_command(*sent.args[0])):
                raise RuntimeError("no roll call was held: Redis was away, or the round is over") from None
            self.node.watch.update(View.apply_roll_call, replies.RollCall(*reply))

    @property
    def has_verdict(self) -> bool:
        """Whether it has heard that all have answered its roll call."""
        return self.node.view.knows_who_lives

    async def beat(self) -> None:
        """Renew the lease."""
        self.renewed_at = time.monotonic()
        await self.through(self.keeper.beat)
        due, _ = self.keeper.due()
        if due > self.renewed_at + self.interval:  # not counted from the reply
            self.keeper.schedule(self.renewed_at + self.interval - time.monotonic())

    async def _pump(self, longest: float) -> None:
        keeper, early = self.keeper, min(COARSE, self.interval / 2)
        due, urgent = keeper.due()
        if time.monotonic() >= due - (0 if urgent else early):
            await self.beat()
        until_beat = keeper.due()[0] - early - time.monotonic()
        if until_beat <= 0:
            await asyncio.sleep(max(0.0, until_beat + early))
            return
        since, block = {self.node.wake_key: self._heard}, min(longest, until_beat)
        if entries := (await self.through(lambda: self.connection.read(since, block))).get(self.node.wake_key):
            self._heard = entries[-1][0]
            keeper.hear(entries)


async def connected(
    n: int, login: dict[str, Any], keys: RunKeys, settings: Callable[[int], Settings]
) -> list[SimulatedNode]:
    """``n`` connected nodes.

    Args:
        n: how many.
        login: host, port and password of Redis.
        keys: of the run.
        settings: of a node, by its number.
    """
    nodes = [SimulatedNode(keys, settings(number), number) for number in range(n)]
    some = asyncio.Semaphore(AT_ONCE)

    async def connect(node: SimulatedNode) -> None:
        async with some:
            await node.connect(login)

    await asyncio.gather(*map(connect, nodes))
    for script in (scripts.JOIN, scripts.BEAT, scripts.LEAVE, scripts.ROLL_CALL):
        await nodes[0].send("SCRIPT", "LOAD", script.text)
    gc.collect()
    gc.freeze()  # they stay: no need for garbage collection to scan them again
    return nodes


async def while_alive(tasks: Iterable[asyncio.Task[Any]], holds: Callable[[], object], pause: float = 0.05) -> None:
    """Wait while a condition holds; raises what a task raised meanwhile."""
    while holds():
        await asyncio.sleep(pause)
        for task in tasks:
            if task.done() and (error := task.exception()):
                raise error


def simulate(what: Callable[..., Awaitable[T]], *arguments: Any) -> T:
    """Run a simulation in this process."""
    raise_limit_of_files()
    logging.disable(logging.WARNING)  # thousands of nodes would each say that their round is broken
    return asyncio.run(what(*arguments))  # type: ignore[arg-type]
