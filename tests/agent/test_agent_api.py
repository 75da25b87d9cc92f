"""RedisElasticAgent in other programs: it takes torch's `WorkerSpec`, returns its `RunResult`, and leaves nothing."""

from __future__ import annotations

import inspect
import json
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.health_check_server import HealthCheckServer
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

import redelastic.agent
from redelastic.agent import AgentOptions, RedisElasticAgent
from redelastic.agent.regrouping import RegroupingAgent
from redelastic.redis.server import RedisServer
from tests.support import launchers
from tests.support.nodes import NodeFactory

pytestmark = pytest.mark.timeout(180)

PROGRAM: Final = "tests.support.workers.embedding"
LIMIT: Final = 120.0


def embed(server: RedisServer, *runs: dict[str, Any]) -> list[dict[str, Any]]:
    """Have a program run agents one after the other; returns its line about each."""
    command = [sys.executable, "-m", PROGRAM, server.url, json.dumps(runs)]
    done = launchers.run(command, os.environ | {"OMP_NUM_THREADS": "1"}, LIMIT, cwd=launchers.ROOT)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("name", redelastic.agent.__all__)
def test_each_name_of_the_package_is_there(name: str) -> None:
    assert getattr(redelastic.agent, name).__name__ == name


def test_return_values_roles_and_ranks_of_two_agents(server: RedisServer, run_id: str) -> None:
    """Each agent returns the values of its own workers, by global rank; one forks them, the other spawns them."""
    common = {"run_id": run_id, "entrypoint": "report", "args": ("a", "b"), "nodes": 2}
    first = common | {"topology": "1", "role": "trainer", "workers": 1, "start_method": "spawn"}
    second = common | {"topology": "2", "role": "reader", "workers": 2, "start_method": "fork"}
    with ThreadPoolExecutor(2) as pool:
        [[one], [two]] = pool.map(lambda runs: embed(server, runs), (first, second))
    assert one["state"] == two["state"] == "SUCCEEDED"
    assert [*one["values"]] == ["0"]
    assert [*two["values"]] == ["1", "2"]
    same = {"WORLD_SIZE": 3, "words": ["a", "b"], "catches": []}
    trainer = {"role": "trainer", "GROUP_RANK": 0, "LOCAL_WORLD_SIZE": 1, "ROLE_WORLD_SIZE": 1}
    reader = {"role": "reader", "GROUP_RANK": 1, "LOCAL_WORLD_SIZE": 2, "ROLE_WORLD_SIZE": 2}
    assert one["values"]["0"] == same | trainer | {"RANK": 0, "LOCAL_RANK": 0, "ROLE_RANK": 0}
    assert two["values"]["1"] == same | reader | {"RANK": 1, "LOCAL_RANK": 0, "ROLE_RANK": 0}
    assert two["values"]["2"] == same | reader | {"RANK": 2, "LOCAL_RANK": 1, "ROLE_RANK": 1}


@pytest.mark.long
def test_agents_that_run_one_after_the_other_leave_nothing_behind(server: RedisServer, run_id: str) -> None:
    """However a run ends, its threads, files, processes and signal handlers end with it; the program's own stay."""
    function = {"entrypoint": "report", "start_method": "fork"}
    kinds: list[dict[str, Any]] = [
        function | {"start_method": "spawn"},  # spawning leaves multiprocessing's resource tracker
        function,
        {"entrypoint": sys.executable, "args": ["-c", "import os; os.environ['RANK']"]},
        {"entrypoint": "false"},
        {"entrypoint": "fail", "args": ["bad", "words"], "start_method": "fork", "max_restarts": 1},
        {"entrypoint": "fail_beside_a_waiting_rank", "workers": 2, "start_method": "fork"},
        function | {"unfit": True},
        function | {"times": 2},
    ]
    reports = embed(server, *(kind | {"run_id": f"{run_id}-{i}"} for i, kind in enumerate(kinds)))
    assert len(reports) == len(kinds)
    _, succeeded, command, false, raised, beside, unfit, twice = reports

    assert (succeeded["state"], succeeded["values"]["0"]["RANK"]) == ("SUCCEEDED", 0)
    assert (command["state"], command["values"]) == ("SUCCEEDED", {"0": None})
    assert (false["state"], false["failures"]["0"][0]) == ("FAILED", 1)
    assert raised["state"] == "FAILED"
    assert raised["epoch"] == "2", "the worker was restarted once"
    assert raised["failures"]["0"][1]["message"] == "ValueError: bad words are no good"
    assert beside["failures"]["1"][1]["message"] == "ValueError: lazy workers are no good"
    assert beside["seconds"] < 18, "a forked worker is ended by SIGTERM, not only by the SIGKILL after 20 s"
    assert unfit["error"].startswith("RefusedError: ")
    assert "no hands" in unfit["error"]
    assert (twice["state"], twice["epoch"]) == ("SUCCEEDED", "2")

    for one in reports:
        assert one["own child lives"]
        assert one["left"] == reports[0]["left"]
    assert reports[0]["left"]["threads"] == ["MainThread"]
    assert reports[0]["left"]["handlers"] == ["<Handlers.SIG_DFL: 0>"] * 2
    assert "sleep" in reports[0]["left"]["children"]
    assert len(reports[0]["left"]["children"]) == 2, "the program's own child, and multiprocessing's tracker"


def test_another_handler_is_refused() -> None:
    handler = DynamicRendezvousHandler.__new__(DynamicRendezvousHandler)
    spec = WorkerSpec(role="a", local_world_size=1, entrypoint="true", rdzv_handler=handler)
    with pytest.raises(TypeError, match="needs a RedisRendezvousHandler, not a DynamicRendezvousHandler"):
        RedisElasticAgent(spec, DefaultLogsSpecs())


def test_a_job_of_another_rendezvous_gets_torchs_agent_from_torchrun(tmp_path: Path) -> None:
    """The plugin replaces the launcher's agent for the rest of the process."""
    handler: Any = SimpleNamespace(get_run_id=lambda: "of c10d")
    spec = WorkerSpec(role="a", local_world_size=1, entrypoint="true", rdzv_handler=handler)
    agent = RegroupingAgent(spec=spec, logs_specs=DefaultLogsSpecs(str(tmp_path)), start_method="fork")
    assert type(agent) is LocalElasticAgent


def test_the_agent_takes_the_arguments_of_torchs_in_their_order(new_node: NodeFactory, tmp_path: Path) -> None:
    of_torch, own = (list(inspect.signature(agent).parameters) for agent in (LocalElasticAgent, RedisElasticAgent))
    assert own[: len(of_torch)] == of_torch
    spec = WorkerSpec("test", 1, new_node(1, 1), entrypoint="true")
    with pytest.raises(ValueError, match=r"no start_method=AgentOptions.* only .*spawn.*: options=…"):
        RedisElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), AgentOptions())  # type: ignore[arg-type]
    agent = RedisElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), "fork", 300, None, 5, None, 60)
    assert agent.run().state == WorkerState.SUCCEEDED


class NotedServer(HealthCheckServer):
    """Records each stop, with the starts of workers before it."""

    def __init__(self, starts: Path) -> None:
        super().__init__(lambda: int(time.time()), 0, 60)
        self._starts, self.stopped = starts, list[str]()

    def stop(self) -> None:
        self.stopped.append(self._starts.read_text())


def test_a_health_server_that_is_given_lives_as_long_as_the_agent(
    new_node: NodeFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's agent stops it when it restarts workers, and starts another one if the environment names a port."""
    starts = tmp_path / "starts"
    script = ("-c", f"echo -n x >> {starts}; test $(cat {starts}) = xx")
    spec = WorkerSpec("test", 1, new_node(1, 1), entrypoint="sh", args=script, max_restarts=1)
    given = NotedServer(starts)
    agent = RedisElasticAgent(spec, DefaultLogsSpecs(str(tmp_path)), health_check_server=given)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", str(taken.getsockname()[1]))
        assert agent.run().state == WorkerState.SUCCEEDED
    assert given.stopped == ["xx"]


@pytest.mark.parametrize("value", ["abc", "", "-1", "65536", "9" * 5000, "²"])
def test_a_wrong_port_in_torchs_variable_is_a_warning(
    value: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", value)
    assert AgentOptions().port is None
    assert f"TORCHELASTIC_HEALTH_CHECK_PORT={value[:80]!r} is not a port" in caplog.text
    assert AgentOptions(health_port=0).port == 0
    monkeypatch.setenv("TORCHELASTIC_HEALTH_CHECK_PORT", "8080")
    assert AgentOptions().port == 8080
