"""The schedule: what is done and when, all derived from the seed before anything runs.

The same seed gives the same episodes with the same actions at the same offsets. How the processes interleave is not
reproducible: that is up to the machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Final

INTERVAL: Final = 0.3  # between two heartbeats, in seconds
ATTEMPTS: Final = 4
LEASE: Final = INTERVAL * ATTEMPTS
LAST_CALL: Final = (
    1.0  # above one heartbeat: at an empty server newcomers must not be faster than members (PROTOCOL.md)
)


@dataclass(frozen=True)
class Action:
    """One thing done, ``at`` seconds after the start of its episode.

    ``what`` is start, leave, kill, freeze, thaw, drain, call (the roll) for a ``node``; down, up, forget (while it
    is down), stop, cont, scripts, clients, flush for the server. Two wait for a node: until it has asked for a round,
    or entered one; what follows is later by as much.
    """

    at: float
    what: str
    node: str = ""


@dataclass(frozen=True)
class Episode:
    """One run: its settings, the behaviour of each node, the actions, and whether a tool or a node closes it."""

    name: str
    min_nodes: int
    max_nodes: int
    replacement: float = 0.0
    seconds: float = 20.0
    closing: str = "tool"
    last_call: float = LAST_CALL
    interval: float = INTERVAL
    lease: float = LEASE
    actions: tuple[Action, ...] = ()
    nodes: dict[str, dict[str, float]] = field(default_factory=dict)  # name -> how it behaves, see node.py

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name not in {"actions", "nodes"}}


class Planner:
    """Makes up one episode, and tracks which nodes should be alive."""

    def __init__(self, seed: int, number: int, nodes: int, *, server_faults: bool) -> None:
        self._random = random.Random(f"soak {seed} {number}")  # the same for one number, however many there are
        self._name = f"soak-{seed}-{number}"
        self._nodes = nodes
        self._server_faults = server_faults
        self._actions: list[Action] = []
        self._behaviours: dict[str, dict[str, float]] = {}
        self._busy_until: dict[str, float] = {}  # of each node that is alive; it may be frozen
        self._server_busy_until = 0.0
        self._anchors: set[str] = set()
        self._lossy = self._random.random() < 0.5

    def plan(self) -> Episode:
        pick = self._random
        size = pick.randint(2, self._nodes)
        for _ in range(size):
            self._start(round(pick.uniform(0, 0.5), 3))
        # Somebody has to remember the run for a server that forgets it: two nodes stay from the beginning to the end.
        self._anchors = set(pick.sample(sorted(self._busy_until), 2)) if self._server_faults else set()
        seconds, now = pick.uniform(12, 25), 1.5
        while now < seconds:
            self._act(round(now, 3))
            # Often in a hurry or at the same moment, sometimes with time for a round to stand.
            longest = pick.choices([0.02, 0.3, 1.5, 4.0], [3, 2, 5, 2])[0]
            now += pick.uniform(longest / 2, longest)
        return Episode(
            self._name,
            min_nodes=pick.choice([1, 1, 2]),
            max_nodes=pick.randint(max(2, self._nodes // 2), self._nodes),
            replacement=pick.choice([0.0, 0.0, 0.0, 1.0]),
            seconds=round(max([seconds, *self._busy_until.values(), self._server_busy_until]), 3),
            closing=pick.choice(["tool", "node", "finish"]),
            actions=tuple(sorted(self._actions, key=lambda action: action.at)),
            nodes=self._behaviours,
        )

    def _do(self, at: float, what: str, node: str = "") -> None:
        self._actions.append(Action(round(at, 3), what, node))

    def _start(self, at: float) -> None:
        name = f"n{len(self._behaviours) + 1}"
        lag = self._random.choice([0.0, 0.0, 0.1, 0.5, 1.5])  # how long it takes to stop its workers
        self._behaviours[name] = {"lag": lag, "loss": 0.02 if self._lossy else 0.0}
        self._busy_until[name] = at + 0.5
        self._do(at, "start", name)

    def _act(self, now: float) -> None:
        pick = self._random
        alive = len(self._busy_until)
        free = sorted(name for name, until in self._busy_until.items() if until <= now)
        mortal = [name for name in free if name not in self._anchors]
        kinds: dict[str, float] = {"start": 3 * max(0, self._nodes - alive)}
        if mortal:
            kinds |= {"kill": alive, "leave": alive / 2, "drain": alive / 2, "freeze": alive}
        if free:
            kinds |= {"blink": alive / 2, "call": alive / 2}
        if self._server_faults and now >= self._server_busy_until:
            kinds |= {"server": alive}
        if not any(kinds.values()):
            return
        kind = pick.choices(list(kinds), list(kinds.values()))[0]
        match kind:
            case "start":
                self._start(now)
            case "kill" | "leave" | "drain":
                name = pick.choice(mortal)
                del self._busy_until[name]
                self._do(now, kind, name)
                if kind == "kill" and free != [name] and pick.random() < 0.5:  # as its peers' workers fail
                    self._do(
                        now + pick.uniform(0, 0.6), "call", pick.choice([other for other in free if other != name])
                    )
            case "call":
                self._do(now, "call", pick.choice(free))
            case "freeze" | "blink":  # for longer or shorter than the lease
                name = pick.choice(mortal if kind == "freeze" else free)
                seconds = pick.uniform(0.6, 3) * LEASE if kind == "freeze" else pick.uniform(0.1, 0.3) * LEASE
                self._do(now, "freeze", name)
                self._do(now + seconds, "thaw", name)
                self._busy_until[name] = now + seconds + 0.2
            case _:
                self._fault_of_the_server(now)

    def _fault_of_the_server(self, now: float) -> None:
        pick = self._random
        away = pick.uniform(0.1, 3.0)
        match pick.choice(["restart", "lose", "stop", "scripts", "clients", "clients", "flush"]):
            case "restart":
                self._do(now, "down")
                self._do(now + away, "up")
            case "lose":
                self._do(now, "down")
                self._do(now + away / 2, "forget")
                self._do(now + away, "up")
            case "stop":
                self._do(now, "stop")
                self._do(now + away, "cont")
            case what:
                self._do(now, what)
                away = 0.0
        self._server_busy_until = now + away + 0.5


def plan(seed: int, number: int, nodes: int, *, server_faults: bool) -> Episode:
    """Episode ``number`` of a soak."""
    return Planner(seed, number, nodes, server_faults=server_faults).plan()


def episodes(seed: int, minutes: float, nodes: int, *, server_faults: bool) -> Iterator[Episode]:
    """The episodes of a soak, for about so many minutes: each needs some time to settle and to close."""
    left, number = 60 * minutes, 0
    while left > 0:
        number += 1
        episode = plan(seed, number, nodes, server_faults=server_faults)
        left -= episode.seconds + 5
        if left > -10 or number == 1:
            yield episode
