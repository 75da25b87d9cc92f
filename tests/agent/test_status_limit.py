"""A node's status within its size limit: which fields are dropped first."""

from __future__ import annotations

import json
from typing import Any

from redelastic.host.telemetry import Telemetry, bounded
from tests.support.fake_nvml import UUIDS


def status(gpus: int = 8, workers: int = 8) -> dict[str, Any]:
    return {
        "host": "node-17",
        "pid": 4711,
        "step": 123_456,
        "workers": [{"pid": 5000 + rank, "cpu": 99.5, "memory": 10**11} for rank in range(workers)],
        "gpus": [{"index": i, "uuid": UUIDS[0], "name": "NVIDIA H200", "memory_used": 10**11} for i in range(gpus)],
    }


def test_a_status_within_the_limit_is_whole() -> None:
    text = bounded(status())
    assert json.loads(text) == status()
    assert len(text) < 2048
    assert " " not in text.replace("NVIDIA H200", "")
    assert bounded(status(), len(text)) == text


def test_fields_are_dropped_in_their_order() -> None:
    """Every limit, from too small for any field to large enough for all."""
    whole = status()
    stages: list[dict[str, Any]] = []
    for limit in range(2, len(bounded(whole)) + 1):
        text = bounded(whole, limit)
        assert len(text) <= limit
        kept = json.loads(text)
        if not stages or stages[-1] != kept:
            stages.append(kept)
    assert whole == status()  # the caller's status is unchanged
    *_, own, without_gpus, without_usage, without_names, last = stages
    assert last == whole
    assert without_names == {**whole, "cut": True, "gpus": [{"index": i, "memory_used": 10**11} for i in range(8)]}
    assert without_usage == {**without_names, "workers": [{"pid": 5000 + rank} for rank in range(8)]}
    assert without_gpus == {key: value for key, value in without_usage.items() if key != "gpus"}
    assert own == {"host": "node-17", "pid": 4711, "step": 123_456, "cut": True}


def test_the_nodes_own_fields_are_shortened_before_they_are_dropped() -> None:
    long = {"host": "node-17", "reason": "ü" * 20_000, "why": "x" * 20_000, "extra": list(range(20_000)), "step": 1}
    kept = json.loads(bounded(long))
    assert kept == {"host": "node-17", "reason": "ü" * 63 + "…", "why": "x" * 63 + "…", "step": 1, "cut": True}


def test_odd_values_are_no_error() -> None:
    odd = {"gpus": "none", "workers": [1, {"cpu": 3}], "at": object(), ("a",): 1, "bytes": b"\xff", "lone": "\ud800"}
    assert len(bounded(odd)) > len(bounded(odd, 100)) > 2  # type: ignore[arg-type]
    assert bounded(odd, 100).isascii()  # type: ignore[arg-type]


def test_eight_workers_with_gpus_fit() -> None:
    """The status of a node of 8 GPUs is far below the limit."""
    gpu = {"index": 7, "uuid": UUIDS[0], "name": "NVIDIA H100 80GB HBM3", "memory_used": 10**11, "memory_total": 10**11}
    gpu |= {"utilization": 100, "temperature": 100, "ecc": 10_000, "xid": 10_000}
    sample = Telemetry().sample({}) | {"gpus": [gpu] * 8, "workers": status()["workers"]}
    assert json.loads(bounded(sample, 4096)) == sample
