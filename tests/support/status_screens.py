"""Runs, nodes and workers as records, and the screen of `redelastic status` that they make."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from redelastic.cli.status.view import Screen
from redelastic.monitoring.events import Event
from redelastic.monitoring.records import Node, Run
from redelastic.monitoring.report import describe


def workers(*steps: int, **more: Any) -> list[dict[str, Any]]:
    return [{"local_rank": i, "rank": i, "pid": 100 + i, "step": s, "idle": 0.5} | more for i, s in enumerate(steps)]


def node_of(i: int, *, standing: str = "member", silence: float = 0.5, **status: Any) -> Node:
    document = {"name": f"host-{i:04d}", "host": f"10.0.0.{i}", "state": "running"} | status
    rank = i if standing == "member" else None
    return Node(f"host-{i:04d}-7-{i:012x}", standing, rank, 6 - silence, silence, "", document)


def run_of(*nodes: Node, **more: Any) -> Run:
    known: dict[str, Any] = {"run_id": "job", "epoch": 3, "size": len(nodes), "min_nodes": 2, "max_nodes": 4}
    known |= {"age": 700.0, "broken": None, "closed": None, "stopped": False, "deadline": None, "lease": 6.0}
    known |= {"restarts": 1, "idle": 0, "failures": {}, "barred": [], "nodes": nodes}
    return Run(**known | more)


def shown(run: Run, *events: Event, width: int = 80, rows: int | None = 25, **options: Any) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False, markup=False, emoji=False, **options)
    Screen(console, rows=rows, workers=True).print(describe(run, events, 1.7e9))
    return out.getvalue()
