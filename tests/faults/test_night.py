"""One night: a job loses a node, another hangs, a third drains; what the commands and /metrics say is the truth."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED, AgentJob
from tests.support.commands import run_command

pytestmark = pytest.mark.timeout(300)


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Values by name and, where there are any, worker or state."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, *(sample.labels[name] for name in ("local_rank", "state") if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def probe(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
            return reply.status, reply.read().decode().strip()
    except urllib.error.HTTPError as e:
        return e.code, e.read().decode().strip()


@pytest.mark.long
def test_the_commands_show_the_truth(  # noqa: PLR0915  (a night, from its beginning to its end)
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_ports: list[int]
) -> None:
    monkeypatch.setenv("REDELASTIC_REDIS_URL", server.url)
    ports = dict(zip("abcd", free_ports, strict=True))
    with AgentJob(server, tmp_path, "2:3") as job:

        def ask(name: str, *more: str) -> Any:
            done = run_command(name, *([] if name in ("doctor", "list") else [job.run_id]), *more, "--json")
            assert done.code == 0, done
            return done.json

        def reported(kind: str) -> list[dict[str, Any]]:
            return [event for event in ask("events")["events"] if event["event"] == kind]

        def begin(*names: str) -> None:
            for name in names:
                # A worker that has trained to its end still takes its time to exit, on a busy machine more than 2 s.
                # When b's worker hangs, its peer's waits for it: b's agent has to find the hang first.
                hang_timeout = 6 if name == "b" else 9
                options = (f"--hang-timeout={hang_timeout}", "--hang-start-timeout=50", f"--health-port={ports[name]}")
                job.begin(name, options=options, max_restarts=5)

        begin("a", "b")
        job.wait("two wait for a third", lambda: len(job.redis("candidates") or []) == 2)
        forming = ask("status")
        assert forming["phase"] == "forming"
        assert forming["waits_for"].startswith("2 of 3 nodes have joined; the round completes without more in ")
        assert probe(ports["a"], "/livez") == (200, "ok")
        assert probe(ports["a"], "/readyz") == (503, "the node is waiting")

        begin("c")
        epoch = job.wait_round("abc")
        job.wait("all steps are reported", lambda: all(node["step"] for node in ask("status")["nodes"]))
        running = ask("status")
        ids = {node["name"]: node["id"] for node in running["nodes"]}
        assert (running["phase"], running["epoch"], running["size"]) == ("running", epoch, 3)
        assert sorted(node["rank"] for node in running["nodes"]) == [0, 1, 2]
        assert running["problems"] == []
        assert [run["phase"] for run in ask("list")["runs"] if run["run"] == job.run_id] == ["running"]
        assert probe(ports["b"], "/readyz")[0] == 200

        rank_of = {node["name"]: node["rank"] for node in running["nodes"]}
        metrics = scrape(ports["b"])
        assert metrics["redelastic_epoch",] == epoch
        assert metrics["redelastic_rank",] == rank_of["b"]
        assert metrics["redelastic_world_size",] == 3
        assert metrics["redelastic_node_state", "running"] == 1
        assert metrics["redelastic_worker_step", "0"] >= 1
        assert metrics["redelastic_restarts_total",] == 0

        job.nodes["c"].kill()
        epoch = job.wait_round("ab", epoch)
        [lost] = reported("lost")
        assert lost["node"] == ids["c"], "by a roll call, or by its lease where that ran out before"
        job.wait("restarts for a lost node do not count", lambda: scrape(ports["b"])["redelastic_job_restarts",] == 0)
        assert scrape(ports["b"])["redelastic_restarts_total",] == 1, "its workers were started again all the same"

        job.tell("hang-b")
        epoch = job.wait_round("ab", epoch)
        [hung] = [event for event in reported("hung") if event["node"] == ids["b"]]
        assert "made no progress for " in hung["text"]
        assert "in hang" in hung["detail"]
        job.wait("the restart is reported", lambda: scrape(ports["b"])["redelastic_job_restarts",] == 1)
        assert ask("status")["restarts"] == 1

        begin("d")
        epoch = job.wait_round("abd", epoch)
        done = run_command("drain", job.run_id, "b", "--reason", "its fan is loud", "--wait", "--json")
        assert done.code == 0, done
        assert job.wait_end("b") == DRAINED
        epoch = job.wait_round("ad", epoch)
        assert [left["cause"] for left in reported("left")] == ["drained"]
        assert "its fan is loud" in reported("drain")[0]["reason"]
        last = ask("status")
        assert (last["phase"], last["epoch"], last["restarts"]) == ("running", epoch, 1)
        assert {node["name"] for node in last["nodes"]} == {"a", "d"}

        for line in ask("doctor")["findings"]:
            assert line["level"] != "problem", line

        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("d") == 0
        assert ask("status")["phase"] == "closed"

        history = ask("timeline", "--out", str(tmp_path / "night.html"))
        assert (tmp_path / "night.html").read_text().startswith("<!doctype html>")
        ends = {node["name"]: node["gone"] for node in history["nodes"]}
        assert ends["c"] == {name: value for name, value in lost.items() if name != "version"}
        assert [ends[name]["cause"] for name in "bad"] == ["drained", "finished", "finished"]
        assert [round_["size"] for round_ in history["rounds"]] == [3, 2, 2, 3, 2]
        assert json.dumps(history["rounds"][2]["members"]).count(":") == 2
