"""The agent's side of `redelastic/survival/channel.py`: which workers can enter a round."""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from redelastic.monitoring.wording import clean
from redelastic.survival.channel import MAX_REASON, VARIABLE


class Parked(NamedTuple):
    """A worker waits for a round.

    Attributes:
        why: what made it leave the last one; empty if it was in none.
        paused: whether it left that after the step that all ranks had agreed upon.
        at: when the agent heard of it, on the monotonic clock in seconds.
    """

    why: str
    paused: bool
    at: float


class WorkerChannels:
    """The channels to one group of workers.

    Args:
        workers: number of workers.
        notify: called after each message of a worker, from a thread.

    Attributes:
        armed: the last round that a worker will leave after an agreed step, by local rank.
        parked: the workers that are in no round, by local rank.

    Raises:
        OSError: no file descriptor is left.
    """

    def __init__(self, workers: int, notify: Callable[[], None]) -> None:
        self.armed: dict[int, int] = {}
        self.parked: dict[int, Parked] = {}
        self._notify = notify
        self._pausing = self._settling = 0  # epoch of the round that workers pause in; whose last step is being chosen
        self._names: list[str] = []
        self._commands: list[int] = []  # where the agent writes, by local rank
        self._replies: list[int] = []  # where it reads
        with contextlib.ExitStack() as opened:

            def pipe() -> tuple[int, int]:
                ends = os.pipe()
                for end in ends:
                    opened.callback(os.close, end)
                return ends

            for _ in range(workers):
                (command, send), (receive, reply) = pipe(), pipe()
                self._names.append(":".join(f"/proc/{os.getpid()}/fd/{end}" for end in (command, reply)))
                self._commands.append(send)
                self._replies.append(receive)
            self._stop, stop = pipe()
            listener = threading.Thread(target=self._listen, name="redelastic-channels", daemon=True)
            listener.start()
            opened.callback(listener.join)
            opened.callback(os.write, stop, b"\n")
            self._closing = opened.pop_all()

    def environment(self, local_rank: int) -> dict[str, str]:
        """The environment variable by which a worker finds its channel."""
        return {VARIABLE: self._names[local_rank]}

    def send_round(self, local_rank: int, environment: Mapping[str, str]) -> None:
        """Have a worker enter a round."""
        self.parked.pop(local_rank, None)
        self._send(local_rank, {"round": dict(environment)})

    def abort(self, epoch: int) -> None:
        """Have all workers leave a round, if they are in it."""
        self._send_to_all({"abort": epoch})

    def arm(self, epoch: int) -> bool:
        """Tell all workers that all ranks will leave a round after a common step; returns whether all know of it."""
        if self._pausing != epoch:
            self._pausing = epoch
            self._send_to_all({"pause": epoch})
        return all(self.armed.get(local_rank) == epoch for local_rank in range(len(self._commands)))

    def settle(self, epoch: int) -> None:
        """Have the first worker, which is rank 0, choose that step: every worker of the round knows that one comes."""
        if self._settling != epoch:
            self._settling = epoch
            self._send(0, {"settle": epoch})

    @property
    def are_parked(self) -> bool:
        """Whether all workers have left their round."""
        return len(self.parked) == len(self._commands)

    def _send_to_all(self, command: Mapping[str, Any]) -> None:
        for local_rank in range(len(self._commands)):
            self._send(local_rank, command)

    def _send(self, local_rank: int, command: Mapping[str, Any]) -> None:
        os.write(self._commands[local_rank], json.dumps(command).encode() + b"\n")

    def _listen(self) -> None:
        poll, rests = select.poll(), [b""] * len(self._replies)
        for end in (*self._replies, self._stop):
            poll.register(end, select.POLLIN)
        while True:
            for end, _ in poll.poll():
                if end == self._stop:
                    return
                local_rank = self._replies.index(end)
                *lines, rests[local_rank] = (rests[local_rank] + os.read(end, 1 << 16)).split(b"\n")
                for line in lines:
                    self._apply(local_rank, line)
            self._notify()

    def _apply(self, local_rank: int, line: bytes) -> None:
        with contextlib.suppress(ValueError, KeyError, TypeError):  # whatever a script has written there
            reply = json.loads(line)
            if "parked" in reply:
                why = clean(str(reply["parked"]))[:MAX_REASON]
                self.parked[local_rank] = Parked(why, reply["paused"] is True, time.monotonic())
            else:
                self.armed[local_rank] = int(reply["armed"])

    def close(self) -> None:
        """Close the channels; workers that still run end."""
        self._closing.close()
