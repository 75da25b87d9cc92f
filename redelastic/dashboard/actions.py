"""Requests to runs that the page sends, if the dashboard was started with ``--allow-actions``."""

from __future__ import annotations

import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, NamedTuple

from redelastic.monitoring.operator import Run
from redelastic.monitoring.sentences import close_answer, drain_answer, save_answer

if TYPE_CHECKING:
    from redelastic.redis.endpoint import Endpoint

NAMES: Final = ("checkpoint", "drain", "close", "stop")
MAX_NAME: Final = 40  # characters of a person's name
MAX_ACTIONS: Final = 32  # at once: the answer to a request to save comes after up to half a minute


class Action(NamedTuple):
    """What a person asks for.

    Attributes:
        action: one of :data:`NAMES`.
        by: the person's name.
        reason: why; may be empty.
        node: id of the node to drain.
    """

    action: str
    by: str
    reason: str = ""
    node: str = ""

    @classmethod
    def parse(cls, body: bytes) -> Action:
        """From JSON.

        Raises:
            ValueError: it is not such an object.
        """
        try:
            found = json.loads(body)
        except RecursionError as e:
            raise ValueError("The request is nested too deeply.") from e
        given = found if isinstance(found, dict) else {}
        action, by, reason, node = (given.get(name, "") for name in cls._fields)
        if not all(isinstance(field, str) for field in (action, by, reason, node)) or action not in NAMES:
            raise ValueError(f"A request is an object with an action, one of {', '.join(NAMES)}, and texts.")
        if not by.strip():
            raise ValueError("Say in `by` who asks: the run's events name the person.")
        return cls(action, by.strip()[:MAX_NAME], reason, node)


class BusyError(Exception):
    """So many requests wait for their answers that there is no room for another."""


class Actions:
    """Asks runs on behalf of the people who use the page; each request is an event of the run that names them.

    Args:
        endpoint: of Redis.
        prefix: of the runs' keys.
    """

    def __init__(self, endpoint: Endpoint, prefix: str) -> None:
        self._endpoint, self._prefix = endpoint, prefix
        self._pool = ThreadPoolExecutor(MAX_ACTIONS, "redelastic-action")
        self._free = threading.Semaphore(MAX_ACTIONS)

    async def perform(self, run_id: str, asked: Action, address: str) -> str:
        """Do what is asked; returns what became of it, in a sentence.

        Args:
            run_id: of the run.
            asked: what is asked.
            address: of the person's browser, or of the last proxy.

        Raises:
            BusyError: too many requests wait for their answers; nothing was asked: one that waits might act much later.
            UnknownRunError, UnknownNodeError: there is no such run or node.
            RedelasticError: Redis cannot be reached, or the run cannot be read.
        """
        if not self._free.acquire(blocking=False):
            raise BusyError(f"{MAX_ACTIONS} requests wait for their answers: try again, or use redelastic's commands.")
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._act, run_id, asked, address)

    def close(self) -> None:
        """Forget the requests that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _act(self, run_id: str, asked: Action, address: str) -> str:
        person = f"{asked.by} at {address}, on the dashboard"
        try:
            with Run(self._endpoint, run_id, key_prefix=self._prefix, by=person) as run:
                if asked.action == "drain":
                    return drain_answer(run.drain(asked.node, reason=asked.reason))
                if asked.action == "checkpoint":
                    return f"Run {run_id!r}: {save_answer(run.checkpoint(reason=asked.reason))}."
                return close_answer(run_id, run.close(stop=asked.action == "stop", reason=asked.reason))
        finally:
            self._free.release()
