"""compose.yaml in real containers: rank 0's is killed, others are stopped and added, Redis fails over.

The Docker daemon is the test's own, see docker_daemon.py.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import pytest

from tests.support import docker_daemon, docker_images
from tests.support.docker_daemon import DockerDaemon

T = TypeVar("T")

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

ROOT: Final = Path(__file__).parents[2]
STEPS: Final = 200
SAVE_EVERY: Final = 10  # the training's default, as the batch
BATCH: Final = 128
DRAINED: Final = 75
SETTINGS: Final = {"RUN": "digits", "STEPS": str(STEPS), "PACE": "0.3", "COMPOSE_PROFILES": ""}
LIMIT: Final = 180.0  # for anything to happen, in seconds
ASK: Final = """
import sys, urllib.request
asked = urllib.request.Request("http://localhost:8370/api/runs", headers={"Authorization": "Bearer " + sys.argv[1]})
print(urllib.request.urlopen(asked, timeout=20).read().decode())
"""
POLL: Final = 1.5  # each poll starts a docker process per container


@pytest.fixture(scope="module")
def daemon() -> Iterator[DockerDaemon]:
    """A daemon with the base images of the Dockerfile and compose.yaml, and the image that they build."""
    if why := docker_daemon.missing():
        pytest.skip(f"no containers: {why}")
    if not (ROOT / "redelastic").exists():
        pytest.skip("there is no source tree here, which the image is made from: the tests run on an installed wheel")
    before = bridges()
    with DockerDaemon() as started:
        started.import_image(
            named(r"FROM (\S+)", "Dockerfile"),
            docker_images.write_python,
            "ENV RES_OPTIONS='timeout:1 attempts:1'",  # only Docker's DNS answers: do not wait for others
        )
        redis = named(r"image: (redis:\S+)", "compose.yaml")
        started.import_image(redis, docker_images.write_redis, "WORKDIR /data", "VOLUME /data")
        started.compose(ROOT / "compose.yaml", "build", "node", settings=SETTINGS)
        yield started
    assert not started.folder.exists()
    assert not started.cgroups()
    assert str(started.folder) not in Path("/proc/self/mounts").read_text()
    assert bridges() == before


@dataclass(frozen=True)
class Line:
    """A line that rank 0 of a round has printed, and its container."""

    container: str
    event: str
    epoch: int
    step: int
    fields: dict[str, Any]


class ComposeJob:
    """The containers of compose.yaml."""

    def __init__(self, daemon: DockerDaemon, **settings: str) -> None:
        self.daemon = daemon
        self._settings = {**SETTINGS, "REDIS_URL": "", **settings}

    def compose(self, *arguments: str) -> str:
        return self.daemon.compose(ROOT / "compose.yaml", *arguments, settings=self._settings)

    def up(self, nodes: int) -> None:
        self.compose("up", "--detach", "--no-recreate", f"--scale=node={nodes}")

    def containers(self, service: str, state: str = "") -> list[str]:
        only = [f"--filter=status={state}"] if state else []
        label = f"--filter=label=com.docker.compose.service={service}"
        return self.daemon.docker("ps", "--all", "--quiet", label, *only).split()

    def lines(self) -> list[Line]:
        """In the order of rounds and steps."""
        found = []
        for container in self.containers("node"):
            for text in self.daemon.docker("logs", container).splitlines():
                if text.startswith("{"):
                    fields = json.loads(text)
                    found.append(Line(container, fields["event"], fields["epoch"], fields["step"], fields))
        return sorted(found, key=lambda line: (line.epoch, line.step))

    def wait(self, what: str, condition: Callable[[], T | None]) -> T:
        deadline = time.monotonic() + LIMIT
        while True:
            if value := condition():
                return value
            if time.monotonic() > deadline:
                logs = self.compose("logs", "--no-color", "--tail=40")
                pytest.fail(f"Not within {LIMIT:g} s: {what}.\n{self.daemon.docker('ps', '--all')}\n{logs}")
            time.sleep(POLL)

    def wait_round(self, nodes: int, after: int = 0) -> Line:
        """Wait until so many nodes have made a few steps in a later round; returns its rank 0's first line."""

        def begun() -> Line | None:
            lines = self.lines()
            begins = [x for x in lines if x.event == "start" and x.epoch > after and x.fields["world_size"] == nodes]
            trained = [b for b in begins if sum(x.event == "step" and x.epoch == b.epoch for x in lines) >= 3]
            return trained[-1] if trained else None

        return self.wait(f"{nodes} nodes train together in a round after {after}", begun)

    def last_step(self, epoch: int) -> int:
        return max(line.step for line in self.lines() if line.epoch == epoch)

    def ask(self, command: str, *arguments: str) -> str:
        """The output of a `redelastic` command about the run."""
        return self.compose("run", "--rm", "-T", "redelastic", command, "digits", *arguments)

    def ask_dashboard(self) -> dict[str, Any]:
        """What the dashboard knows of the run, with the token that its log tells."""
        [container] = self.containers("dashboard")

        def said() -> re.Match[str] | None:
            return re.search(r"/\?token=(\S+)", self.daemon.docker("logs", container))

        token = self.wait("the dashboard says where it is", said)[1]
        answer = self.daemon.docker("exec", container, docker_images.PYTHON, "-c", ASK, token)
        [run] = json.loads(answer)["runs"]
        return dict(run)

    def finish(self) -> dict[str, int]:
        """Wait until all nodes have ended; returns their exit codes."""
        [done] = self.wait("the training is done", lambda: [line for line in self.lines() if line.event == "done"])
        assert done.fields["accuracy"] >= 0.95
        assert (done.step, done.fields["samples"]) == (STEPS, STEPS * BATCH), "some steps were lost or counted twice"
        self.wait("all nodes have ended", lambda: not self.containers("node", "running"))
        codes = {
            node: int(self.daemon.docker("inspect", "--format={{.State.ExitCode}}", node))
            for node in self.containers("node")
        }
        sys.stdout.write(f"  accuracy {done.fields['accuracy']:.1%}, exit codes {sorted(codes.values())}\n")
        return codes


@pytest.fixture
def new_job(daemon: DockerDaemon) -> Iterator[Callable[..., ComposeJob]]:
    made = []

    def make(**settings: str) -> ComposeJob:
        made.append(ComposeJob(daemon, **settings))
        return made[-1]

    yield make
    for job in made:
        job.compose("down", "--volumes", "--timeout=1", "--remove-orphans")
    assert daemon.left() == []


def bridges() -> list[str]:
    """Docker's network bridges on the host."""
    return sorted(path.name for path in Path("/sys/class/net").iterdir() if path.name.startswith(("docker", "br-")))


def named(pattern: str, file: str) -> str:
    found = re.search(pattern, (ROOT / file).read_text())
    assert found
    return found[1]


def test_job_outlives_its_containers(new_job: Callable[..., ComposeJob]) -> None:
    job = new_job()
    job.up(nodes=3)
    first = job.wait_round(nodes=3)
    job.wait("there is a checkpoint to go on from", lambda: job.last_step(first.epoch) > 2 * SAVE_EVERY)
    assert job.ask_dashboard()["members"] == 3
    job.daemon.docker("kill", first.container)
    second = job.wait_round(nodes=2, after=first.epoch)
    reached = job.last_step(first.epoch)
    assert reached - SAVE_EVERY <= second.step <= reached, "it goes on from the last checkpoint"
    assert second.container != first.container

    job.up(nodes=4)  # restarts the dead container, and adds one
    third = job.wait_round(nodes=4, after=second.epoch)
    assert third.step >= second.step
    stopped = next(node for node in job.containers("node") if node != third.container)
    job.daemon.docker("stop", "--time=40", stopped)
    fourth = job.wait_round(nodes=3, after=third.epoch)
    assert fourth.step >= third.step

    users = {job.daemon.docker("inspect", "--format={{.Config.User}}", c).strip() for c in job.containers("node")}
    assert users == {"node"}, "not root"
    codes = job.finish()
    assert codes.pop(stopped) == DRAINED
    assert list(codes.values()) == [0, 0, 0]
    events = json.loads(job.ask("events", "--json", "-n", "1000"))["events"]
    members = [
        {event["node"][:12] for event in events if event["event"] == "started" and event["epoch"] == begin.epoch}
        for begin in (first, second, third, fourth)
    ]
    assert [len(names) for names in members] == [3, 2, 4, 3]
    assert members[1] == members[0] - {first.container}
    assert members[2] == set(job.containers("node"))
    assert members[3] == members[2] - {stopped}
    reasons = [(e["node"][:12], e["event"], e["text"]) for e in events]
    assert (first.container, "started", "rank 0 of 3") in reasons
    [lost] = [reason for node, event, reason in reasons if (node, event) == (first.container, "lost")]
    assert lost.startswith("did not answer the roll call of "), reasons  # a worker of another node failed at once
    assert (stopped, "left", "drained: SIGTERM") in reasons


def test_job_outlives_the_master_of_a_sentinel_group(new_job: Callable[..., ComposeJob]) -> None:
    job = new_job(REDIS_URL="redis+sentinel://sentinel:26379/mymaster", COMPOSE_PROFILES="sentinel")
    job.up(nodes=2)
    begin = job.wait_round(nodes=2)
    [master] = job.containers("redis")

    def ask_sentinel(*words: str) -> list[str]:
        said = job.daemon.docker("exec", job.containers("sentinel")[0], "redis-cli", "-p", "26379", "sentinel", *words)
        return said.split()

    def state() -> dict[str, str]:
        words = ask_sentinel("master", "mymaster")
        return dict(zip(words[::2], words[1::2], strict=True))

    job.wait(
        "the sentinels know all replicas and peers",
        lambda: (state()["num-slaves"], state()["num-other-sentinels"]) == ("2", "2"),
    )
    old = ask_sentinel("get-master-addr-by-name", "mymaster")
    job.daemon.docker("kill", master)
    job.wait("a replica is promoted", lambda: ask_sentinel("get-master-addr-by-name", "mymaster") != old)
    assert job.last_step(begin.epoch) < STEPS, "the training was over before"

    assert list(job.finish().values()) == [0, 0]
    assert [line for line in job.lines() if line.event == "start"] == [begin], "no worker was restarted"
    events = json.loads(job.ask("events", "--json", "-n", "1000"))["events"]
    assert [event["epoch"] for event in events if event["event"] == "completed"] == [begin.epoch]
    assert [event["event"] for event in events][-1] in ("closed", "left")
