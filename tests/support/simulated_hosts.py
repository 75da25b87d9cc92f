"""Hosts of a preflight without a machine: what they would report, given what is wrong with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from redelastic.preflight.schedule import Report, Step, next_step

COMPUTE, MEMORY, RATE, LATENCY = 100.0, 10.0, 10.0, 0.1  # of a good host, in the units of the measures


@dataclass
class Host:
    """What is wrong with a host: factors of its speed, and more.

    Attributes:
        compute: of its matrix products.
        send, receive: of what it sends and receives; 0: nothing comes through.
        delay: added to each round trip, in ms.
        silent_in: number of the step in which it hangs or dies, if it does.
    """

    compute: float = 1.0
    send: float = 1.0
    receive: float = 1.0
    delay: float = 0.0
    silent_in: int | None = None


@dataclass
class Site:
    """Hosts, and links between two of them that do not work or are slow.

    Attributes:
        hosts: all.
        links: by both ends in ascending order, the factor of their speed; 0: they do not work.
        rng: draws the noise.
        noise: of each value, the standard deviation of its logarithm.
    """

    hosts: Sequence[Host]
    links: dict[tuple[int, int], float] = field(default_factory=dict)
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    noise: float = 0.05

    def run(self) -> list[Step]:
        """All steps of a preflight, with the reports."""
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
