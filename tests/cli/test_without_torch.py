"""An operator's machine: its commands need neither torch nor anything else that `on-call.md` does not install."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from redelastic.redis.server import RedisServer
from tests.support.browsing import dashboard
from tests.support.commands import CommandResult
from tests.support.nodes import NodeFactory

LEFT_OUT: Final = ("torch", "prometheus_client")
TRAIN: Final = ("redelastic.doctor.trial", "redelastic.cli.demo.train")  # these may import torch
ROOT: Final = Path(__file__).parents[2]

# Each runs in an interpreter without LEFT_OUT. Its input and its output are JSON.
RUN_COMMANDS: Final = """
import dataclasses, json, sys
from tests.support.commands import run_command
print(json.dumps([dataclasses.asdict(run_command(*argv)) for argv in json.load(sys.stdin)]))
"""
IMPORT_ALL: Final = """
import json, pkgutil, sys
from importlib import import_module
packages, left_out = json.load(sys.stdin)
names = [*packages]
for package in packages:
    found = pkgutil.walk_packages(import_module(package).__path__, f"{package}.")
    names += [module.name for module in found if module.name not in left_out]
for name in names:
    import_module(name)
print(json.dumps(names))
"""


@pytest.fixture
def without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, object], Any]:
    """Hides torch from processes that the test starts; runs code in one, and returns what it prints."""
    (tmp_path / "sitecustomize.py").write_text(f"import sys; sys.modules |= dict.fromkeys({LEFT_OUT})\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    def run(code: str, given: object) -> Any:
        asked = [sys.executable, "-c", code]
        done = subprocess.run(asked, input=json.dumps(given), capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def test_packages_for_operators_import_no_torch(without_torch: Callable[[str, object], Any]) -> None:
    packages = [f"redelastic.{name}" for name in ("redis", "monitoring", "dashboard", "cli", "doctor")]
    imported = without_torch(IMPORT_ALL, [packages, TRAIN])
    assert {"redelastic.monitoring.control", "redelastic.dashboard.app", "redelastic.cli.demo.play"} <= set(imported)


def test_the_commands_on_a_real_run(
    server: RedisServer,
    new_node: NodeFactory,
    run_id: str,
    tmp_path: Path,
    without_torch: Callable[[str, object], Any],
) -> None:
    node = new_node(1, 1, node_name="vm-1")
    workers = [{"rank": 0, "pid": 1, "log": "/logs/0.log"}]
    node.node.describe = lambda status: json.dumps(status | {"agent": "redelastic", "workers": workers})
    node.next_rendezvous()
    node.keeper.beat()

    page = tmp_path / "run.html"
    asked: dict[str, tuple[list[str], int, str]] = {
        "status": ([run_id], 0, "running"),
        "list": ([], 0, run_id),
        "events": ([run_id], 0, "completed"),
        "logs": ([run_id], 0, "/logs/0.log"),
        "timeline": ([run_id, "--out", str(page)], 0, ""),
        "readmit": ([run_id, "vm-1"], 4, "has no failures"),
        "drain": ([run_id, "vm-2"], 4, f"has no node 'vm-2', by id, name or rank; it has {node.node.id}"),
        "doctor": ([], 1, "torch is not installed"),
        "close": ([run_id, "--reason", "enough"], 0, "is closed"),
    }
    endpoint = ["--endpoint", server.url]
    given = [[name, *arguments, *endpoint] for name, (arguments, _, _) in asked.items()]
    others: dict[str, tuple[list[str], int, str]] = {
        "run": (["--standalone", "train.py"], 2, "redelastic run: torch is not installed. Nodes need it"),
        "completion": (["bash"], 0, "--watch"),
        "demo": ([], 1, "redelastic demo: torch not installed"),
    }
    given += [[name, *arguments] for name, (arguments, _, _) in others.items()]
    done = [CommandResult(**one) for one in without_torch(RUN_COMMANDS, given)]
    for one, (name, (_, code, text)) in zip(done, (asked | others).items(), strict=True):
        assert one.code == code, (name, one)
        assert text in one.out + one.err, name
    assert node.is_closed()
    assert run_id in page.read_text()


def test_doctor_examines_all_but_the_trial(server: RedisServer, without_torch: Callable[[str, object], Any]) -> None:
    [done] = without_torch(RUN_COMMANDS, [["doctor", "--json", "--endpoint", server.url]])
    found = {finding["name"]: finding for finding in json.loads(done["out"])["findings"]}
    assert {name for name, finding in found.items() if finding["level"] == "problem"} == {"torch"}
    assert (found["latency"]["level"], found["rights"]["level"]) == ("ok", "ok")
    assert found["rendezvous"]["found"] == found["store"]["found"] == "skipped because of torch"


@pytest.mark.usefixtures("without_torch")
def test_the_dashboard_serves_a_run(server: RedisServer, new_node: NodeFactory, run_id: str) -> None:
    new_node(1, 1).next_rendezvous()
    with dashboard(f"--endpoint={server.url}") as (url, process):
        for path, text in ("", "<!doctype html>"), (f"api/runs/{run_id}", '"phase": "running"'):
            with urllib.request.urlopen(url + path, timeout=30) as answer:  # noqa: S310
                assert text in answer.read().decode()
        assert process.interrupt() == 0
