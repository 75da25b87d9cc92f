"""How a new node joins a job that trains: once the workers have saved, and several at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from redelastic.cli import run_options
from redelastic.monitoring.events import Admitted, Completed, Left, Save, Saved
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.commands import run_command

pytestmark = pytest.mark.timeout(300)


ALONE: Final = {"last_call_timeout": 0}  # the first node forms a round
SAVED: Final = ("--admit=saved",)


@pytest.mark.fault("a node joins a job that trains", "the workers save first: no step is lost")
def test_a_new_node_costs_no_step(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2") as job:
        job.begin("a", options=SAVED, conf=ALONE)
        epoch = job.wait_round("a")
        job.begin("b", options=SAVED)
        job.wait_round("ab", epoch)
        (save,) = job.events(Save)
        (admitted,) = job.events(Admitted)
        assert save.node == admitted.node == job.id_of("b")
        assert admitted.saved
        assert [event.drains for event in job.events(Saved)] == [()]
        (saved,) = job.lines("saved")
        assert [line.step for line in job.lines("start")] == [0, saved.step, saved.step]
        steps = [line.step for line in job.lines("step") if line.node == "a"]
        assert len(steps) - len(set(steps)) <= 1, "at most the step in which b was admitted is made twice"
        job.tell("finish")
        assert [job.wait_end(name) for name in "ab"] == [0, 0]


@pytest.mark.fault("several nodes join at about the same time", "they share one restart")
def test_nodes_that_come_soon_after_each_other_share_one_restart(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:4") as job:
        damped = (*SAVED, "--admit-interval=20")
        job.begin("a", options=damped, conf=ALONE)
        job.wait_round("a")
        job.begin("b", "c", "d", options=damped)
        job.wait_round("abcd", 1)
        assert [event.size for event in job.events(Completed)] == [1, 4]
        shown = run_command("status", job.run_id, "--json", "--endpoint", server.url).json
        assert {node["name"]: node["restarts"] for node in shown["nodes"]} == {"a": 1, "b": 0, "c": 0, "d": 0}


@pytest.mark.fault("workers exit with 0 when they are asked to save for a new node", "the job goes on, with that node")
def test_workers_that_end_when_they_are_asked_to_save_have_not_finished(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2") as job:
        job.tell("end-after-save")
        job.begin("a", options=SAVED, conf=ALONE)
        epoch = job.wait_round("a")
        job.begin("b", options=SAVED)
        job.wait_round("ab", epoch)
        assert not job.events(Left)
        job.tell("finish")
        assert [job.wait_end(name) for name in "ab"] == [0, 0]


def test_a_checkpoint_can_be_requested_and_a_stopped_run_saves_first(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2") as job:
        job.begin("a", "b")
        job.wait_round("ab")
        job.wait("b makes steps", lambda: [line for line in job.lines("step") if line.node == "b"])
        asked = run_command("checkpoint", job.run_id, "--endpoint", server.url)
        assert asked.code == 0, asked
        assert "the workers of 2 nodes have saved" in asked.out
        assert {line.node for line in job.lines("saved")} == {"a", "b"}
        job.nodes["a"].may_end = job.nodes["b"].may_end = True
        stopped = run_command("close", job.run_id, "--stop", "--endpoint", server.url)
        assert stopped.code == 0, stopped
        assert "Before, the workers of 2 nodes have saved." in stopped.out
        assert [job.wait_end(name) for name in "ab"] == [76, 76]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((), {"admit_timeout": 30.0, "admit_interval": 10.0}),
        (("--drain-timeout=90",), {"admit_timeout": 90.0, "admit_interval": 10.0}),
        (("--admit=now", "--admit-interval=0"), {"admit_timeout": 0.0, "admit_interval": 0.0}),
        (("--admit=checkpoint",), {"admit_timeout": float("inf"), "admit_interval": 10.0}),
        (("--survive",), {"admit_timeout": 30.0, "admit_interval": 0.0}),
        (("--rdzv-conf=admit_timeout=5",), {"admit_interval": 10.0}),
        (("--rdzv-conf=admit_timeout=5", "--admit=now"), {"admit_timeout": 0.0, "admit_interval": 10.0}),
    ],
)
def test_the_options_become_parameters_of_the_rendezvous(given: tuple[str, ...], expected: dict[str, float]) -> None:
    arguments = run_options.make_parser().parse_args([*given, "script.py"])
    conf = dict(pair.split("=") for pair in arguments.rdzv_conf.split(",") if pair)
    assert run_options.admission(arguments, conf) == expected


def test_another_mode_is_refused() -> None:
    arguments = run_options.make_parser().parse_args(["script.py"])
    arguments.admit = "soon"  # as PET_ADMIT gives it
    with pytest.raises(ValueError, match="--admit=soon is invalid: it must be one of now, saved, checkpoint"):
        run_options.admission(arguments, {})
