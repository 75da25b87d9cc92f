"""A worker's channel to its agent: rounds and their ends one way, what becomes of the worker the other way.

It consists of two pipes of the agent, which the worker opens through `/proc/<agent>/fd`, and carries lines of JSON:

- agent to worker: `{"round": {variable: value}}`, the environment of the next round; `{"abort": epoch}`, the end of
  one; `{"pause": epoch}`, all ranks are about to leave it after a common step; `{"settle": epoch}`, to rank 0: choose
  that step
- worker to agent: `{"parked": why, "paused": bool}`, it can enter a round: at first, and when it has left one;
  `{"armed": epoch}`, it will leave the round after the chosen step
"""

from __future__ import annotations

import json
import os
import select
from typing import Any, Final

from redelastic.worker import NAMESPACE, pid_namespace

VARIABLE: Final = "REDELASTIC_CHANNEL"  # <pipe of commands>:<pipe of replies>
MAX_REASON: Final = 500  # characters of a reason: a line must fit into a pipe at once


class Channel:
    """The worker's end.

    Args:
        commands, replies: descriptors, which are the channel's from now on.
    """

    def __init__(self, commands: int, replies: int) -> None:
        self._commands, self._replies = commands, replies
        self._rest = b""  # what has arrived of the next command

    @classmethod
    def open(cls) -> Channel | None:
        """Open the channel that the environment names; None if it names none.

        The variable is removed: a process that this one starts is no worker.

        Raises:
            RuntimeError: the agent is in another process namespace.
            OSError: the agent is gone.
        """
        name = os.environ.pop(VARIABLE, "")
        if not name:
            return None
        if os.environ.get(NAMESPACE, "") not in ("", pid_namespace()):
            raise RuntimeError("redelastic.survive() cannot reach the agent: it runs in another process namespace.")
        commands, replies = name.split(":")
        return cls(os.open(commands, os.O_RDONLY | os.O_CLOEXEC), os.open(replies, os.O_WRONLY | os.O_CLOEXEC))

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """The next command; None if none comes within ``timeout`` seconds.

        Raises:
            EOFError: the agent is gone.
        """
        while b"\n" not in self._rest:
            if not select.select([self._commands], [], [], timeout)[0]:
                return None
            if not (more := os.read(self._commands, 1 << 16)):
                raise EOFError("The agent is gone.")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        command: dict[str, Any] = json.loads(line)
        return command

    def send(self, **reply: Any) -> None:
        """Send a reply.

        Raises:
            OSError: the agent is gone.
        """
        os.write(self._replies, json.dumps(reply).encode() + b"\n")
