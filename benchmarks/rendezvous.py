"""How long does a group take to form, and to form again when a node has left?

Side by side: our native handler, torch's own state machine on our backend (``dynamic``), and torch's c10d and etcd-v2;
from torch 2.15 on also c10d with its ``cas_backoff_max_seconds``.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any, Final

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from benchmarks import report
from benchmarks.harness import CONTEXT, TimeLimitError, Timing, etcd_server, free_port, run_nodes
from benchmarks.report import Progress, Spread, Table
from redelastic.monitoring.events import Left
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler

OURS: Final = "redelastic"
BACKOFF: Final = "c10d, cas_backoff_max_seconds=0.1"  # which torch has from 2.15 on
HAS_BACKOFF: Final = "cas_backoff_max_seconds" in {field.name for field in fields(RendezvousSettings)}
PEERS: Final = (OURS, "dynamic", "c10d", *((BACKOFF,) if HAS_BACKOFF else ()), "etcd-v2")
TARGETS: Final = {2: 0.003, 8: 0.006, 64: 0.045, 256: 0.180, 1024: 0.800}  # seconds on 2 cores
LEADS: Final = {"c10d": 30.0, "etcd-v2": 3.0}  # times ours, at least
SIZES: Final = [2, 8, 64, 128, 256, 1024]
LAST_CALL: Final = 2.0  # torch's handlers wait this long when a group is below its maximum
PHASES: Final = ("form", "re-form")


def prepare(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make one node's handler, connected to its server; the timed phase is the one that the options name."""
    config: dict[str, Any] = {"last_call_timeout": LAST_CALL, "join_timeout": 300}
    peer, n = options["peer"], options["nodes"]
    backend = {OURS: "redis", "dynamic": "redis", BACKOFF: "c10d"}.get(peer, peer)
    if backend == "c10d":
        config["is_host"] = number == 0
    elif backend == "redis":
        config["protocol"] = "native" if peer == OURS else "dynamic"
    if peer == BACKOFF:
        config["cas_backoff_max_seconds"] = 0.1
    params = RendezvousParameters(backend, options["endpoint"], options["run_id"], max(1, n - 1), n, **config)
    handler: RendezvousHandler = get_rendezvous_handler(params)

    def form_again() -> Timing | None:
        """The last node leaves once all have formed a group; the others then join at once."""
        handler.next_rendezvous()
        options["formed"].wait()
        if number == n - 1:
            _leave(handler)
            began = time.monotonic()
            options["left"].set()
            return Timing(began, began)
        options["left"].wait()
        began = time.monotonic()
        handler.next_rendezvous()
        return Timing(began, time.monotonic())

    return handler.next_rendezvous if options["phase"] == "form" else form_again, handler.shutdown


def _leave(handler: RendezvousHandler) -> None:
    """Torch's handlers have no call for it; what they run when a node rejoins comes closest."""
    if isinstance(handler, RedisRendezvousHandler):
        handler.end(Left(cause="exited"), "goes on")
        return
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as theirs  # noqa: PLC0415

    assert isinstance(handler, theirs.DynamicRendezvousHandler)
    handler._stop_heartbeats()  # noqa: SLF001
    handler._op_executor.run(theirs._RendezvousExitOp(), handler._get_deadline(handler._settings.timeout.close))  # noqa: SLF001


def measure(peer: str, nodes: int, *, phase: str, endpoint: str, repeat: int, limit: float) -> list[list[Timing]]:
    """When each node of a group called and returned, for ``repeat`` groups, or as many as the limit has room for.

    An uncounted group is formed first in the same processes, except when forming again, which implies one.
    """
    warm_up = phase == "form"
    rounds = [
        {
            "peer": peer,
            "nodes": nodes,
            "phase": phase,
            "endpoint": f"localhost:{free_port()}" if peer in {"c10d", BACKOFF} else endpoint,
            "run_id": f"bench-{uuid.uuid4().hex[:12]}",
            "formed": CONTEXT.Barrier(nodes),
            "left": CONTEXT.Event(),
        }
        for _ in range(repeat + warm_up)
    ]
    groups = run_nodes(prepare, rounds, nodes, limit, as_many_as_fit=True)
    return groups[warm_up:] or groups


def whole(group: list[Timing]) -> float:
    """From the first node's call to the last one's return, in seconds."""
    return max(t.ended for t in group) - min(t.began for t in group)


def of_one_node(group: list[Timing]) -> Spread:
    """From each node's call to its return, in seconds, over all nodes."""
    return Spread.of(t.ended - t.began for t in group)


def tables(
    progress: Progress,
    sizes: list[int],
    peers: list[str],
    *,
    repeat: int,
    limit: float,
    phases: tuple[str, ...] = PHASES,
) -> Iterator[Table]:
    """Measure; peers take turns at each size; one that fails at a size is not tried with more nodes."""
    failed: dict[str, tuple[int, str]] = {}
    with ExitStack() as stack:
        endpoint = dict.fromkeys(peers, stack.enter_context(RedisServer()).url)
        if "etcd-v2" in peers:
            etcd = stack.enter_context(etcd_server())
            endpoint["etcd-v2"] = etcd[0] if etcd else ""

        def found(phase: str, peer: str, nodes: int) -> list[list[Timing]] | str:
            if peer in failed and nodes > failed[peer][0]:
                return f"not tried: {failed[peer][1]} with {failed[peer][0]}"
            if not endpoint[peer]:
                return "etcd is not installed"
            progress(f"{phase}, {nodes} nodes, {peer}")
            try:
                return measure(peer, nodes, phase=phase, endpoint=endpoint[peer], repeat=repeat, limit=limit)
            except TimeLimitError as e:
                failed[peer] = nodes, str(e)
                return str(e)

        for phase in phases:
            title = "Time to form a group" if phase == "form" else "Time to form again without one node, which left"
            table = Table(f"rendezvous-{phase}", title, "nodes", base=OURS)
            table.targets = {str(n): TARGETS[n] for n in sizes if phase == "form" and n in TARGETS}
            table.leads = {peer: LEADS[peer] for peer in peers if peer in LEADS}
            middle = Table(f"{table.name}-p50", f"{title}: one node's call, median", "nodes", base=OURS)
            slowest = Table(f"{table.name}-p99", f"{title}: one node's call, 99th percentile", "nodes", base=OURS)
            for nodes in sizes:
                for peer in peers:
                    groups = found(phase, peer, nodes)
                    missing = groups if isinstance(groups, str) else None
                    known = [] if isinstance(groups, str) else groups
                    table.put(nodes, peer, missing or [whole(group) for group in known])
                    middle.put(nodes, peer, missing or [of_one_node(group).median for group in known])
                    slowest.put(nodes, peer, missing or [of_one_node(group).p99 for group in known])
            yield from (table, middle, slowest)


def run(quick: bool, progress: Progress) -> Iterator[Table]:
    """As `python -m benchmarks` runs it."""
    if quick:
        again = PHASES[1:]  # forming again includes forming
        return tables(progress, [2], list(PEERS), repeat=1, limit=20, phases=again)
    return tables(progress, SIZES, list(PEERS), repeat=3, limit=8)


if __name__ == "__main__":
    sys.exit(report.main(run, "rendezvous", __doc__ or ""))
