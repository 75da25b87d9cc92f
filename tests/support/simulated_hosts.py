"""Simulated hosts of a preflight: their reports, by what is wrong with each host or link."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from redelastic.preflight.schedule import Report, Step, next_step

COMPUTE, MEMORY, RATE, LATENCY = 100.0, 10.0, 10.0, 0.1  # of a good host, in the units of reports


@dataclass
class Host:
    """What is wrong with a host; by default nothing.

    Attributes:
        compute: factor of the speed of its matrix products.
        send, receive: factor of the rate at which it sends and receives; 0: nothing comes through.
        delay: added to each round trip, in ms.
        silent_in: number of the step in which it hangs or dies; None: in no step.
    """

    compute: float = 1.0
    send: float = 1.0
    receive: float = 1.0
    delay: float = 0.0
    silent_in: int | None = None


@dataclass
class Site:
    """All hosts of a preflight, and the links that are slow or do not work.

    Attributes:
        hosts: the hosts.
        links: factor of a link's rate, by its ends in ascending order; 0: it does not work.
        rng: draws the noise.
        noise: standard deviation of the logarithm of each value.
    """

    hosts: Sequence[Host]
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    noise: float = 0.05

    def run(self) -> list[Step]:
        """Run a preflight; its steps with all reports."""
        steps: list[Step] = []
        while (step := next_step(len(self.hosts), steps)) is not None:
            reports = {
                host: self._report(step, host)
                for host in step.hosts
                if (when := self.hosts[host].silent_in) is None or len(steps) < when
            }
            steps.append(Step(step.kind, step.hosts, step.pairs, reports))
        return steps

    def _report(self, step: Step, host: int) -> Report:
        if step.kind == "own":
            return {"compute": self._noisy(COMPUTE * self.hosts[host].compute), "memory": self._noisy(MEMORY)}
        if step.kind == "group" and not all(self.hosts[one].send and self.hosts[one].receive for one in step.hosts):
            return {"error": "RuntimeError: no connection"}
        if step.kind == "group":
            return {"seconds": self._noisy(0.1), "bandwidth": self._noisy(RATE)}
        pair = next(pair for pair in step.pairs if host in pair)
        peer = pair[pair[0] == host]
        rate = min(self.hosts[host].send, self.hosts[peer].receive) * self.links.get(pair, 1.0)
        back = min(self.hosts[peer].send, self.hosts[host].receive) * self.links.get(pair, 1.0)
        if not rate or not back:
            return {"error": "RuntimeError: no connection"}
        latency = LATENCY + self.hosts[host].delay + self.hosts[peer].delay
        return {"send": self._noisy(RATE * rate), "latency": self._noisy(latency)}

    def _noisy(self, value: float) -> float:
        return value * self.rng.lognormvariate(0.0, self.noise)
