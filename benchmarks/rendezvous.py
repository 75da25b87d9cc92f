"""How long does a group take to form? From the first node's join to the last node's return, all nodes wanted at once.

Side by side: our native handler, torch's own state machine on our backend (``dynamic``), and torch's c10d rendezvous.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from benchmarks.harness import TimeLimitError, median_and_spread, milliseconds, provenance, run_nodes
from redelastic.server import RedisServer

PEERS = ("native", "dynamic", "c10d")
TARGETS = {2: 0.003, 8: 0.006, 64: 0.045, 256: 0.180, 1024: 0.800}  # seconds on 2 cores


def prepare(options: dict[str, Any], number: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Make one node's handler, connected to its server."""
    config: dict[str, Any] = {"last_call_timeout": 5, "join_timeout": 300}
    if options["peer"] == "c10d":
        config["is_host"] = number == 0
    else:
        config["protocol"] = options["peer"]
    n = options["nodes"]
    backend = "c10d" if options["peer"] == "c10d" else "redis"
    params = RendezvousParameters(backend, options["endpoint"], options["run_id"], n, n, **config)
    handler: RendezvousHandler = get_rendezvous_handler(params)
    return handler.next_rendezvous, handler.shutdown


def measure(peer: str, nodes: int, server: RedisServer, repeat: int, limit: float) -> dict[str, Any]:
    """Form groups, one after the other in the same processes; the first is not counted.

    Returns:
        Median and range of a group's whole time, and the median and 99th percentile of a node's own, in seconds.
    """
    rounds = [
        {
            "peer": peer,
            "nodes": nodes,
            "endpoint": f"localhost:{_free_port()}" if peer == "c10d" else server.url,
            "run_id": f"bench-{uuid.uuid4().hex[:12]}",
        }
        for _ in range(repeat + 1)
    ]
    groups = run_nodes(prepare, rounds, nodes, limit)[1:]
    whole = [max(t.ended for t in group) - min(t.began for t in group) for group in groups]
    own = sorted(t.ended - t.began for group in groups for t in group)
    return {
        **median_and_spread(whole),
        "node_p50": statistics.median(own),
        "node_p99": own[min(len(own) - 1, int(0.99 * len(own)))],
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Measure, print a table, and write JSON if asked to."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rendezvous", description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 8, 64], help="group sizes (default: 2 8 64)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="what to measure (default: all)")
    parser.add_argument("--repeat", type=int, default=5, help="groups of each size (default: 5)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one size of one peer (default: 120)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()

    found: dict[int, dict[str, Any]] = {}
    with RedisServer() as server:
        for nodes in options.nodes:
            found[nodes] = {}
            for peer in options.peers:
                print(f"\r{nodes} nodes, {peer} …".ljust(60), end="", file=sys.stderr, flush=True)
                try:
                    found[nodes][peer] = measure(peer, nodes, server, options.repeat, options.limit)
                except TimeLimitError as e:
                    found[nodes][peer] = {"failed": str(e)}
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
    print_table(found, options.peers)
    if options.json:
        options.json.write_text(json.dumps({"rendezvous": found, **provenance()}, indent=2) + "\n")
    return 0


def print_table(found: dict[int, dict[str, Any]], peers: list[str]) -> None:
    """Medians side by side, with their range, and ratios to the native handler."""
    print("Time to form a group: median (lowest to highest)\n")
    columns = [*peers, *(f"{peer} / native" for peer in peers if peer != "native" and "native" in peers), "target"]
    print(f"| nodes | {' | '.join(columns)} |\n|---:|{'---:|' * len(columns)}")
    for nodes, by_peer in found.items():
        cells = [
            by_peer[peer].get("failed")
            or f"{milliseconds(by_peer[peer]['median'])} "
            f"({1000 * by_peer[peer]['min']:,.1f} to {1000 * by_peer[peer]['max']:,.1f})"
            for peer in peers
        ]
        native = by_peer.get("native", {}).get("median")
        cells += [
            f"{by_peer[peer]['median'] / native:,.0f} x" if native and "median" in by_peer[peer] else "-"
            for peer in peers
            if peer != "native" and "native" in peers
        ]
        cells.append(milliseconds(TARGETS[nodes]) if nodes in TARGETS else "-")
        print(f"| {nodes} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(main())
