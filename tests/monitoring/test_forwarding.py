"""The examples that send a run's events elsewhere; they end with the run."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import redelastic
from redelastic.monitoring.events import Failed
from redelastic.redis.server import RedisServer
from tests.support.nodes import NodeFactory
from tests.support.processes import Processes

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def ended(server: RedisServer, run_id: str, new_node: NodeFactory) -> Iterator[redelastic.Run]:
    """A run in which a worker has failed, and which is closed."""
    node = new_node(1, 1)
    node.next_rendezvous()
    with redelastic.Run(server.url, run_id) as run:
        run.control.note(Failed(rank=0, exit_code=3, message="no memory", node=node.node.id))
        run.close(reason="enough")
        yield run


def test_opentelemetry_gets_a_span_for_each_round(ended: redelastic.Run) -> None:
    exporter = InMemorySpanExporter()
    runpy.run_path(str(EXAMPLES / "events_to_opentelemetry.py"))["forward"](ended, exporter)
    [span] = exporter.get_finished_spans()
    assert span.name == "round 1"
    assert span.resource.attributes["redelastic.run"] == ended.id
    assert [event.name for event in span.events][-2:] == ["failed", "closed"]
    assert span.end_time == span.events[-1].timestamp
    attributes = span.events[-2].attributes
    assert attributes is not None
    assert attributes["redelastic.exit_code"] == 3


class Wandb(ModuleType):
    """The part of the module ``wandb`` that the example uses; keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.logged: list[dict[str, Any]] = []
        self.alerts: list[str] = []

    @contextmanager
    def init(self, **_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(log=self.logged.append, alert=lambda title, text: self.alerts.append(f"{title}: {text}"))


def _send_to_wandb(url: str, run_id: str) -> tuple[list[dict[str, Any]], list[str]]:
    sys.modules["wandb"] = wandb = Wandb()
    sys.argv[1:] = [url, run_id]
    runpy.run_path(str(EXAMPLES / "events_to_wandb.py"))
    return wandb.logged, wandb.alerts


def test_wandb_gets_curves_and_an_alert_for_each_fault(
    ended: redelastic.Run, server: RedisServer, processes: Processes
) -> None:
    processes.start(_send_to_wandb, server.url, ended.id)
    [(logged, alerts)] = processes.values()
    assert [(one["epoch"], one["nodes"]) for one in logged] == [(1, 1)]
    [alert] = alerts
    assert "failed" in alert
    assert "no memory" in alert
