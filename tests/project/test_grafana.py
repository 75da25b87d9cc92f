"""examples/grafana.json: each query, checked against a real node's /metrics."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser as promql
import pytest
from prometheus_client.parser import text_string_to_metric_families

from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.examples_site import EXAMPLES

VARIABLES = {"$run": "my-job", "$node": ".*", "$__range": "1h", "$__rate_interval": "1m"}
SHARED = {"run_id", "node"}  # labels of every metric of ours


def expressions() -> list[str]:
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def parsed(expression: str) -> Any:
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return promql.parse(expression)


def selectors(node: Any) -> Iterator[tuple[str, set[str]]]:
    """Each metric that an expression reads, and the labels that it is chosen by."""
    if isinstance(node, promql.VectorSelector):
        yield node.name or "", {matcher.name for matcher in node.matchers.matchers}
    for part in ("expr", "lhs", "rhs", "vector_selector", "vs"):
        if (inner := getattr(node, part, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(node, "args", None) or ():
        yield from selectors(inner)


def test_the_walk_finds_every_metric() -> None:
    for expression in expressions():
        assert len(list(selectors(parsed(expression)))) == expression.count("redelastic_"), expression


def metrics_of_training(url: str) -> str:
    """The node's metrics, once they count training time; else an empty string."""
    with urllib.request.urlopen(url, timeout=20) as answer:  # noqa: S310  # our own node's
        text: str = answer.read().decode()
    return text if re.search(r"^redelastic_training_seconds_total\{.*\} .*[1-9]", text, re.MULTILINE) else ""


@pytest.mark.timeout(200)
def test_every_query_is_for_metrics_that_a_node_has(server: RedisServer, tmp_path: Path, free_ports: list[int]) -> None:
    with AgentJob(server, tmp_path, "1:1") as job:
        job.begin("a", options=(f"--health-port={free_ports[0]}",))
        job.wait_round("a")
        url = f"http://127.0.0.1:{free_ports[0]}/metrics"
        text = job.wait("the metrics count training time", lambda: metrics_of_training(url))
        families = list(text_string_to_metric_families(text))
        samples = {sample.name: set(sample.labels) for family in families for sample in family.samples}
        counters = {f"{family.name}_total" for family in families if family.type == "counter"}
        names = {family.name for family in families} | counters
        for expression in expressions():
            for name, labels in selectors(parsed(expression)):
                assert name in names, expression
                assert labels <= samples.get(name, SHARED), expression  # there are no samples of GPUs here
        assert {"redelastic_training_seconds_total", "redelastic_effective_training_ratio"} <= samples.keys()
        value = next(f.samples[0].value for f in families if f.name == "redelastic_effective_training_ratio")
        assert 0 < value <= 1
        job.tell("finish")
        assert job.wait_end("a") == 0


def test_the_dashboard_imports_into_any_grafana() -> None:
    dashboard = json.loads((EXAMPLES / "grafana.json").read_text())
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"datasource", "run", "node"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    for panel in dashboard["panels"]:
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
