"""A run and its nodes as data, decoded from untrusted replies."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, NamedTuple

from redelastic.redis.connection import text
from redelastic.redis.errors import CorruptStateError
from redelastic.redis.keys import MAX_KEY_PART, RunKeys

from .events import EXCLUDED, MAX_TEXT, Event, decode_cause, number_in
from .wording import few, json_in

MAX_STATUS: Final = 65_536  # in bytes: longer statuses are not read; redelastic writes at most 8,192
# Xid errors that NVIDIA attributes to the application, not the GPU; its Kubernetes device plugin ignores these too:
# 13 graphics engine exception, 31 page fault, 43 GPU stopped processing, 45 preemptive cleanup, 68 video processor.
APPLICATION_XIDS: Final = frozenset({13, 31, 43, 45, 68})
LARGEST: Final = 10**15  # limit of scores: beyond any time in ms, and exact as a double


@dataclass(frozen=True)
class Node:
    """A node of a run.

    Attributes:
        id: of this process on this host.
        standing: ``member`` of the last round, or ``candidate`` for the next one, or ``spare``: a candidate for which
            the last round, which stands, has no room.
        rank: in the last round; None if it was not in it.
        lease: how long it stays without another heartbeat, in seconds; negative once expired.
        silence: time since its last heartbeat, in seconds.
        draining: why it was asked to drain; empty if it is not.
        status: its last report: ``name``, ``host``, ``pid``, ``state``, and with redelastic's agent
            ``agent``, ``restarts``, ``cpu``, ``memory``, ``workers``, ``gpus``. ``name``, ``host`` and ``state`` are
            strings; anyone with write access may have put anything into the rest.
    """

    id: str
    standing: str
    rank: int | None
    lease: float
    silence: float
    draining: str
    status: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its host's name, as people know it."""
        return str(self.status["name"])

    @property
    def workers(self) -> list[Mapping[str, Any]]:
        """Its workers, as far as it reported them."""
        return self._reported("workers")

    @property
    def gpus(self) -> list[Mapping[str, Any]]:
        """Its GPUs, as far as it reported them."""
        return self._reported("gpus")

    def _reported(self, name: str) -> list[Mapping[str, Any]]:
        found = self.status.get(name)
        return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []

    @property
    def step(self) -> int | None:
        """The lowest step that its workers last reported."""
        steps = [w["step"] for w in self.workers if isinstance(w.get("step"), int)]
        return min(steps, default=None)


@dataclass(frozen=True)
class Run:
    """A run at one moment; times in seconds.

    Attributes:
        run_id: its id.
        epoch: of its last completed round; 0 before the first.
        size: number of nodes of that round.
        min_nodes, max_nodes: how many nodes a round may have; None if no node has joined yet.
        age: since that round was completed; None before the first.
        broken: why its members must regroup; None while the round stands.
        closed: why the run was closed; None while it is open.
        stopped: whether workers have to end too.
        deadline: time until the rendezvous completes with the nodes that have joined; None if none is set.
        lease: how long a silent node stays.
        restarts: that the job has made, after worker failures.
        idle: how many of the latest restarts brought no progress, as judged at the last failure.
        failures: how many rounds in a row a host's workers were the first to fail, by the host's name.
        barred: names of hosts that are excluded for their failures.
        nodes: members by rank, then candidates in order.
        time: on the server's clock, in seconds since 1970.
        progress: the first step that no round before the last failure had made.
    """

    run_id: str
    epoch: int
    size: int
    min_nodes: int | None
    max_nodes: int | None
    age: float | None
    broken: Event | None
    closed: Event | None
    stopped: bool
    deadline: float | None
    lease: float
    restarts: int
    idle: int
    failures: Mapping[str, int]
    barred: Sequence[str]
    nodes: Sequence[Node] = field(default=())
    time: float = 0.0
    progress: int = 0

    @cached_property
    def members(self) -> list[Node]:
        """Nodes that hold the last round, by rank."""
        return [node for node in self.nodes if node.standing == "member"]

    @cached_property
    def candidates(self) -> list[Node]:
        """Nodes that wait for the next round and may be in it."""
        return [node for node in self.nodes if node.standing == "candidate"]

    @cached_property
    def spares(self) -> list[Node]:
        """Nodes that wait for a member of the last round to leave."""
        return [node for node in self.nodes if node.standing == "spare"]

    @property
    def is_alive(self) -> bool:
        """Whether any node's lease goes on."""
        return any(node.lease > 0 for node in self.nodes)

    @property
    def died_at(self) -> float | None:
        """When the last lease ended, on the server's clock, in seconds since 1970.

        None if the run is closed, has no nodes, or one of them is alive.
        """
        if self.closed or not self.nodes or self.is_alive:
            return None
        return round(self.time + max(node.lease for node in self.nodes), 3)

    @property
    def phase(self) -> str:
        """``stopped``, ``closed``, ``running``, ``regrouping``, ``forming`` or ``empty``."""
        if self.closed:
            return "stopped" if self.stopped else "closed"
        if self.members:
            return "regrouping" if self.broken else "running"
        return "forming" if self.candidates else "empty"

    @property
    def waits_for(self) -> str:
        """Why the next round is not complete, in one sentence; empty if there is none to complete."""
        n = len(self.candidates)
        if self.closed or self.phase == "running" or self.min_nodes is None:
            return ""
        if self.phase == "empty":
            return f"No nodes are there: at least {self.min_nodes} must join."
        if self.members:
            late = min(self.members, key=lambda node: node.lease)
            held = few([node.id for node in self.members], 3)
            return (
                f"{len(self.members)} of {self.size} members still hold round {self.epoch}: {held}; the first of "
                f"their leases expires in {max(0.0, late.lease):.1f} s."
            )
        if n < self.min_nodes:
            return f"{n} of at least {self.min_nodes} nodes have joined."
        if self.deadline is not None:
            return (
                f"{n} of {self.max_nodes} nodes have joined; the round completes without more in {self.deadline:.1f} s."
            )
        return f"{n} of {self.max_nodes} nodes have joined; the next one to ask completes the round."


class RunReply(NamedTuple):
    """The reply of ``inspect.lua``, decoded.

    Attributes:
        now: on the server's clock, in ms since 1970.
        run: the run's fields, by name.
        ranks: of the nodes of the last round.
        members: the nodes that hold it.
        candidates: the nodes that wait for the next one, in order.
        leases: when each node's lease ends, in ms since 1970.
        failures: how many rounds in a row a host's workers were the first to fail, by the host's name.
    """

    now: int
    run: Mapping[str, str]
    ranks: Mapping[str, str]
    members: Collection[str]
    candidates: Collection[str]
    leases: Mapping[str, str]
    failures: Mapping[str, str]

    @classmethod
    def decode(cls, reply: Sequence[Any]) -> RunReply:
        """From the script's reply, as RESP2 or RESP3 gives it."""
        now, run, ranks, members, candidates, leases, failures = reply
        return cls(
            int(now),
            run=pairs_of(run),
            ranks=pairs_of(ranks),
            members={text(node) for node in members},
            candidates=list(pairs_of(candidates)),
            leases=pairs_of(leases),
            failures=pairs_of(failures),
        )

    @property
    def nodes(self) -> list[str]:
        """Members by rank, then candidates in order."""
        return [*(node for node in self.ranks if node in self.members), *self.candidates]


def decode_run(keys: RunKeys, reply: RunReply, statuses: Mapping[str, bytes | str | None]) -> Run | None:
    """The run in the reply of ``inspect.lua``; None if there is none.

    Args:
        keys: of the run.
        reply: of the script.
        statuses: as the nodes wrote them, by the nodes' ids.

    Raises:
        CorruptStateError: a field that should be a number is not.
    """
    now, run, ranks, members, _, leases, failures = reply
    if not run:
        return None

    def number(name: str, default: int = 0) -> int:
        value = run.get(name, str(default))
        if (found := number_in(value)) is None:
            raise CorruptStateError(
                f"The key {keys.run!r} in Redis is corrupt: its field {name} is {value[:80]!r}, not a number. Remove "
                "that key once no node of the run is alive."
            )
        return found

    lease, size, limit = number("lease"), number("size"), number("limit", 0)
    full = size > 0 and size == number("max") == len(members)

    def node_of(node: str) -> Node:
        left = _score(leases.get(node, "0")) - now
        standing = "member" if node in members else "spare" if full else "candidate"
        return Node(
            id=node,
            standing=standing,
            rank=_score(ranks[node]) if node in ranks and node in members else None,
            lease=left / 1000,
            silence=(lease - left) / 1000,
            draining=run.get(f"draining {node}", "").partition(" ")[2][:MAX_TEXT],
            status=decode_status(node, statuses.get(node)),
        )

    # Redis counts a restart when workers fail; it is made when the next round is complete, if that happens.
    restart_is_due = "charged" in run and number("charged") == number("epoch")
    failed = {name: count for name, value in failures.items() if (count := number_in(value)) is not None}
    return Run(
        run_id=keys.run_id,
        epoch=number("epoch"),
        size=size,
        min_nodes=number("min") if "min" in run else None,
        max_nodes=number("max") if "max" in run else None,
        age=(now - number("completed_at")) / 1000 if "completed_at" in run else None,
        broken=decode_cause(run.get("broken", "")),
        closed=decode_cause(run.get("closed", "")),
        stopped="stop" in run,
        deadline=(number("deadline") - now) / 1000 if "deadline" in run else None,
        lease=lease / 1000,
        restarts=max(0, number("restarts") - restart_is_due),
        idle=number("idle"),
        failures=failed,
        barred=sorted(name for name, count in failed.items() if count >= (limit or EXCLUDED)),
        nodes=tuple(node_of(node) for node in reply.nodes),
        time=now / 1000,
        progress=number("progress"),
    )


def decode_status(node: str, reply: bytes | str | None) -> dict[str, Any]:
    """A node's status; name, host and state are always there and are short strings."""
    document = json_in(reply) if reply and len(reply) <= MAX_STATUS else None
    status = document if isinstance(document, dict) else {}
    strings = {"name": node.rsplit("-", 2)[0], "host": "", "state": ""}
    known = {k: v[:MAX_KEY_PART] if isinstance(v := status.get(k), str) else default for k, default in strings.items()}
    return status | known


def _score(value: str) -> int:
    """A score of a sorted set as a whole number; other programs may have written an infinite one."""
    return int(min(max(float(value), -LARGEST), LARGEST))


def pairs_of(reply: Any) -> dict[str, str]:
    """Names and values, from a RESP2 or RESP3 reply."""
    pairs = reply.items() if isinstance(reply, dict) else zip(reply[::2], reply[1::2], strict=True)
    return {text(name): text(value) for name, value in pairs}
