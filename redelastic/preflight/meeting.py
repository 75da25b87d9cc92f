"""The exchange between hosts: reports and the next step, by a store of Redis. No host leads it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistNetworkError, DistStoreError

from redelastic.monitoring.wording import json_in
from redelastic.store import RedisStore

from .schedule import Report, Step, next_step

GRACE: Final = 10.0  # beyond a step's time limit, for a report to arrive, in seconds


class Meeting:
    """One host's view of what all hosts do.

    The host that reports last in a step decides what the next one is, by :func:`next_step`, and publishes that. If it
    does not come within the time limit, all decide by what is there, and the first to publish is right.

    Args:
        store: of this preflight; it outlives the rendezvous, which the loss of a host ends.
        host: this host's number.
        name: of this host.
        hosts: how many there are.
    """

    def __init__(self, store: RedisStore, host: int, name: str, hosts: int) -> None:
        self._store, self._host, self._hosts = store, host, hosts
        self._steps: list[Step] = []
        self._decided_last = False  # whether this host was the one to decide that no step follows
        store.set(f"name/{host}", name)

    @property
    def number(self) -> int:
        """Of the step that this host is in, from 0."""
        return len(self._steps) - 1

    def first(self) -> Step:
        """The first step, which needs no decision."""
        return self._entered(next_step(self._hosts, []))

    def _entered(self, step: Step | None) -> Step:
        assert step is not None  # noqa: S101 - there is a first one
        self._steps.append(step)
        return step

    def report(self, found: Report, deadline: float) -> Step | None:
        """Report what this host has found in the step that it is in, and wait for the next one.

        Args:
            found: by this host; not used if it takes no part in the step.
            deadline: for all hosts' reports, on the monotonic clock in seconds.

        Returns:
            The next step; None after the last.

        Raises:
            DistError: Redis cannot be reached, or has lost the store.
        """
        number, step = self.number, self._steps[-1]
        if self._host in step.hosts:
            self._store.set(f"{number}/{self._host}", json.dumps(found))
            if self._store.add(f"{number}/reports", 1) == len(step.hosts):
                return self._follow(self._decide(number))
        try:
            key, left = f"{number}/next", deadline + GRACE - time.monotonic()
            self._store.wait([key], timedelta(seconds=max(0.001, left)))
            plan = self._store.get(key)
        except DistNetworkError:
            raise
        except DistStoreError:  # some host is silent, perhaps the one that would have decided
            plan = self._decide(number)
        return self._follow(plan)

    def _follow(self, plan: bytes) -> Step | None:
        decided = json.loads(plan)
        if decided is None:
            return None
        pairs = tuple((pair[0], pair[1]) for pair in decided["pairs"])
        return self._entered(Step(decided["kind"], tuple(decided["hosts"]), pairs))

    def _decide(self, number: int) -> bytes:
        step = next_step(self._hosts, self.reported())
        plan = None if step is None else {"kind": step.kind, "hosts": step.hosts, "pairs": step.pairs}
        agreed = self._store.compare_set(f"{number}/next", "", json.dumps(plan))
        self._decided_last = json.loads(agreed) is None
        return agreed

    def reported(self) -> list[Step]:
        """All steps so far, with the reports that are there."""
        keys = [f"{number}/{host}" for number, step in enumerate(self._steps) for host in step.hosts]
        found = dict(zip(keys, self._store.peek(keys), strict=True))
        return [
            replace(step, reports={h: report for h in step.hosts if (report := _decoded(found[f"{n}/{h}"]))})
            for n, step in enumerate(self._steps)
        ]

    def agree(self, conclude: Callable[[list[Step], list[str]], Mapping[str, Any]]) -> tuple[dict[str, Any], bool]:
        """What came of it, once :meth:`report` has returned None.

        The host that decided that there is no further step concludes it, from all steps and the hosts' names. If it
        does not within some seconds, the others do, and the first is right: later ones may know of later reports.

        Returns:
            The conclusion, with ``by``: the number of the host that made it; and whether that is this host.
        """
        if not self._decided_last:
            with contextlib.suppress(DistStoreError):
                self._store.wait(["verdict"], timedelta(seconds=GRACE))
                return json.loads(self._store.get("verdict")), False
        own = json.dumps({**conclude(self.reported(), self._names()), "by": self._host}).encode()
        agreed = self._store.compare_set("verdict", "", own)
        return json.loads(agreed), agreed == own

    def _names(self) -> list[str]:
        """The hosts' names; a number where a host has died before it reported its own."""
        found = self._store.peek([f"name/{host}" for host in range(self._hosts)])
        return [f"host {host}" if name is None else name.decode(errors="replace") for host, name in enumerate(found)]


def _decoded(text: bytes | None) -> Report:
    found = json_in(text or b"{}")
    return found if isinstance(found, dict) else {}
