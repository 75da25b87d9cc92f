"""One Redis carries many jobs, waiting nodes, keys and large values, and is empty afterwards.

The questions of benchmarks/load.py, scaled down; REDELASTIC_LONG=1 asks them at full size.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest
import torch.distributed as dist

from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore
from tests.support import launchers
from tests.support.fault_matrix import UNITS, Measured
from tests.support.long_tests import LONG

LIMIT: Final = 600 if LONG else 150
JOBS: Final = 500 if LONG else 10
NODES: Final = 10_000 if LONG else 200
KEYS: Final = 1_000_000 if LONG else 20_000
MEGABYTES: Final = 64 if LONG else 16

pytestmark = pytest.mark.timeout(LIMIT + 60)
Answer = Callable[..., dict[str, float]]


@pytest.fixture
def ask(tmp_path: Path, measured: Measured) -> Answer:
    """Runs the benchmark, in processes of its own, and notes what it has measured."""

    def run(question: str, *options: object, note: tuple[str, ...]) -> dict[str, float]:
        into = tmp_path / "load.json"
        command = [sys.executable, "-m", "benchmarks.load", question, "--limit", LIMIT, "--json", into, *options]
        done = launchers.run([*map(str, command)], os.environ | {"OMP_NUM_THREADS": "1"}, LIMIT + 30)
        assert done.returncode == 0, done.stderr
        found = json.loads(into.read_text())["load"][question]
        for what in note:
            value, unit = found[what]
            measured(what, value, unit if unit in UNITS else "")
        return {what: value for what, (value, _) in found.items()}

    return run


END: Final = ("keys gone after", "longest removal of what has expired", "memory that Redis keeps afterwards")


def assert_gone(found: dict[str, float]) -> None:
    """Nothing is left of it in Redis: no key, no connection, and not more memory than buffers and the scripts take."""
    assert found["connections afterwards"] == 0
    assert found["memory that Redis keeps afterwards"] < 8e6


@pytest.mark.fault("hundreds of jobs at once on one Redis", "I2, I7: all form, none loses a node, all keys go")
@pytest.mark.long
def test_many_jobs(ask: Answer) -> None:
    note = ("jobs", "all jobs formed", "memory per node", *END)
    found = ask("jobs", "--jobs", JOBS, *([] if LONG else ["--interval", 1]), note=note)
    assert found["jobs that stand after a lease"] == found["jobs"] == JOBS
    assert found["connections per node"] <= 2
    assert found["memory per node"] < 200e3
    assert_gone(found)


@pytest.mark.fault("a thousand nodes and more wait in one join", "I2, I6: all enter one round, each with its own rank")
def test_many_waiting_nodes(ask: Answer) -> None:
    note = ("nodes", "the last node comes: all are told after", "memory per waiting node", "longest script: completion")
    found = ask("waiting", "--nodes", NODES, *([] if LONG else ["--interval", 1]), note=(*note, *END))
    assert found["blocked at once"] > 0.9 * NODES, "they block, and do not poll"
    assert found["different ranks"] == NODES
    assert found["members after it"] == NODES, "after an outage nobody is evicted"
    assert found["memory per waiting node"] < 100e3
    assert_gone(found)


@pytest.mark.fault(
    "a store of very many keys", "its memory is in proportion, and all of it goes after the time to live"
)
@pytest.mark.long
def test_many_keys(ask: Answer) -> None:
    found = ask("keys", "--keys", KEYS, note=("keys", "memory per key", "client's peak", "written in", *END))
    assert found["keys"] == found["keys listed"] == KEYS
    assert found["memory per key"] < 300
    assert found["client's peak"] < 20e6, "it keeps nothing of what it has written"
    assert_gone(found)


@pytest.mark.fault("values of 64 MB in a store", "memory is a small multiple of the value, and all of it goes")
@pytest.mark.long
def test_a_large_value(ask: Answer) -> None:
    calls = ("set", "get", "compare_set", "queue_push", "queue_pop")
    note = (*(f"{call}: Redis computes" for call in calls), "Redis' peak", "set: client's peak")
    found = ask("value", "--megabytes", MEGABYTES, note=(*note, *END))
    size = found["size"]
    assert found["Redis' peak"] < 10 * size
    assert all(found[f"{call}: client's peak"] < 4 * size for call in calls)
    assert found["add after it: Redis remembers the reply"] < 1e3, "a large reply is kept up to the next request only"
    assert_gone(found)


@pytest.mark.fault("a value beyond the server's proto-max-bulk-len", "an error within the timeout, nothing is written")
@pytest.mark.parametrize("megabytes", [2, 64])
def test_a_value_beyond_the_limit(own_server: RedisServer, run_id: str, megabytes: int) -> None:
    store = RedisStore(own_server.url, run_id, timeout=3)
    with own_server.get_client() as client:
        client.config_set("proto-max-bulk-len", 1 << 20)
        store.set("key", b"x" * ((1 << 20) - 1))
        began = time.monotonic()
        with pytest.raises(dist.DistError):
            store.set("key", b"y" * (megabytes << 20))
        assert time.monotonic() - began < 30
        assert store.get("key") == b"x" * ((1 << 20) - 1)
    store.close()
