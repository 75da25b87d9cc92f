"""An agent that is killed: its warden ends the workers, and has the node leave at once, not a lease later."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from redelastic.agent.workers import warden
from redelastic.redis.connection import Connection
from redelastic.redis.endpoint import URL_VARIABLE
from redelastic.redis.keys import RunKeys
from redelastic.redis.server import RedisServer
from redelastic.run.control import RunControl
from redelastic.run.records import BEREFT
from tests.support import servers
from tests.support.agent_job import AgentJob
from tests.support.job_user import CANARY, as_user_of
from tests.support.worker_processes import DAEMON, lives, said, until

pytestmark = pytest.mark.timeout(300)
DEFAULT_LEASE = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3}
NOBODY_HEARS = 1000.0  # a lease that no test waits for, in seconds

# An agent's part: it holds a round, has a tree of processes, and does what its lines say.
AGENT = """
import os, subprocess, sys, time
from torch.distributed.elastic.rendezvous import RendezvousParameters
from redelastic import create_backend, create_handler
from redelastic.agent.workers import processes

url, run_id, folder, lease = sys.argv[1:]
params = RendezvousParameters("redis", url, run_id, 1, 1, keep_alive_interval=float(lease) / 3)
handler = create_handler(create_backend(params)[0], params)
tree = processes.ProcessTree(lambda: handler.membership.last_words("lost its agent"))
handler.next_rendezvous()

def brief():
    while tree.look([]) is None or tree._guard._unsent:
        time.sleep(0.01)  # it does not listen yet, and its pipe is full

def start(source):
    command = [sys.executable, "-I", "-S", "-c", source, folder]
    environment = {**os.environ, **tree.environment}
    subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, start_new_session=True)

brief()
print(handler.membership.node, flush=True)
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Agent:
    """A node in a process of its own, whose death is known by nothing but its warden for as long as a test lasts."""

    def __init__(self, url: str, run_id: str, folder: Path) -> None:
        self.control = RunControl(Connection.open(url), RunKeys(run_id))
        self.process = subprocess.Popen(
            [sys.executable, "-c", AGENT, url, run_id, str(folder), str(NOBODY_HEARS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.node = self._answer()
        self.warden = psutil.Process(int(self.ask("tree._guard.pid")))

    def ask(self, question: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(question + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def leaves(self) -> list[tuple[str, str]]:
        return [(event.node, event.reason) for event in self.control.events() if event.event in {"left", "lost"}]

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def agent(server: RedisServer, run_id: str, tmp_path: Path) -> Iterator[Agent]:
    made = Agent(server.url, run_id, tmp_path)
    yield made
    made.kill()


# -- a job


@pytest.mark.fault(
    "an agent alone is killed (as by the OOM killer), with a lease of 6 s",
    "its workers end, its node leaves at once, the others regroup",
)
def test_the_others_do_not_wait_for_the_lease_of_an_agent_that_was_killed(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:3", conf=DEFAULT_LEASE) as job:
        job.begin("a", "b", "c")
        epoch = job.wait_round("abc")
        node = job.id_of("b")
        fault = job.note("SIGKILL of b's agent")
        workers = job.nodes["b"].kill_agent_alone()
        epoch = job.wait_round("ac", epoch, fault=fault)
        assert not any(map(lives, workers))
        assert [(event.node, event.reason) for event in job.events("left")] == [(node, BEREFT)]
        assert job.events("lost") == [], "no lease had to run out"
        assert job.control.state().restarts == 0, "it costs nobody a restart"
        assert f"{node} {BEREFT}." in job.nodes["a"].stderr + job.nodes["c"].stderr

        job.begin("d")  # a supervisor starts it anew
        job.wait_round("acd", epoch)
        job.tell("finish")
        assert [job.wait_end(name) for name in "acd"] == [0, 0, 0]


def test_a_node_that_waits_for_a_round_leaves_too(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "2:2", conf=DEFAULT_LEASE) as job:
        job.begin("a")
        node = job.wait_event("joined").node
        job.nodes["a"].kill_agent_alone()
        assert job.wait_event("left").node == node
        assert job.events("lost") == []


# -- the warden


def test_the_node_leaves_when_its_workers_are_gone(agent: Agent, tmp_path: Path) -> None:
    agent.ask(f"start({DAEMON!r})")
    workers = said(tmp_path, "worker", "left").values()
    agent.ask("brief()")
    agent.kill()
    until(agent.leaves, "that it leaves")
    assert not any(map(lives, workers))
    assert agent.leaves() == [(agent.node, "lost its agent")]
    until(lambda: not lives(agent.warden), "the warden's end")


HELPLESS = f"""
import sys
sys.path.append({str(Path(warden.__file__).parent)!r})
import warden
warden.LIMIT, warden._signal, warden._ambush = 0.5, lambda *_: None, lambda *_: False
warden.watch(sys.argv[1], *map(int, sys.argv[2:]))
"""


@pytest.mark.fault("an agent is killed whose workers SIGKILL does not end", "its node keeps its place for a lease (I1)")
def test_a_node_whose_workers_do_not_die_does_not_leave(agent: Agent, tmp_path: Path) -> None:
    helpless = tmp_path / "helpless.py"
    helpless.write_text(HELPLESS)
    agent.ask(f"setattr(processes.warden, '__file__', {str(helpless)!r})")
    agent.warden.kill()
    until(lambda: not lives(agent.warden), "the warden's end")
    agent.ask("brief()")
    another = psutil.Process(int(agent.ask("tree._guard.pid")))
    agent.ask(f"start({DAEMON!r})")
    workers = said(tmp_path, "worker", "left").values()
    agent.kill()
    until(lambda: not lives(another), "the end of its warden")
    assert all(map(lives, workers))
    assert agent.leaves() == []
    for worker in workers:
        worker.kill()


def test_an_agent_that_ends_by_itself_leaves_no_words(agent: Agent) -> None:
    """It says itself why it leaves, or keeps silent: that is for its handler to decide."""
    assert agent.ask("tree.close()") == "None"
    assert not lives(agent.warden)
    agent.kill()
    assert agent.leaves() == []


def test_the_words_are_those_of_who_the_node_is_now(agent: Agent) -> None:
    agent.ask("handler.membership.leave('goes')")
    agent.ask("handler.next_rendezvous()")
    agent.ask("brief()")
    node = agent.ask("handler.membership.node")
    assert node != agent.node
    agent.kill()
    until(lambda: len(agent.leaves()) == 2, "that it leaves again")
    assert agent.leaves() == [(agent.node, "goes"), (node, "lost its agent")]


def test_words_that_no_pipe_takes_at_once_arrive_in_the_end(agent: Agent) -> None:
    """A warden that is behind is briefed piece by piece, and a line that was cut short is none."""
    agent.warden.suspend()
    agent.ask("handler.membership.leave('goes')")
    agent.ask("handler.next_rendezvous()")
    agent.ask("[tree._guard.brief([processes.Process(p, 0, 0, 0, 1, True) for p in range(10**7, 10**7 + 9000)])]")
    assert int(agent.ask("len(tree._guard._unsent)")) > 0
    agent.warden.resume()
    until(lambda: agent.ask("tree.look([]) or len(tree._guard._unsent)") == "0", "that all is told")
    node = agent.ask("handler.membership.node")
    agent.kill()
    until(lambda: (node, "lost its agent") in agent.leaves(), "that it leaves")


@pytest.mark.fault("an agent is killed while Redis is away", "its workers end; its lease does the rest")
@pytest.mark.parametrize("how", ["frozen", "gone"])
def test_the_warden_ends_though_redis_is_away(own_server: RedisServer, run_id: str, tmp_path: Path, how: str) -> None:
    agent = Agent(own_server.url, run_id, tmp_path)
    agent.ask(f"start({DAEMON!r})")
    workers = said(tmp_path, "worker", "left").values()
    agent.ask("brief()")
    if how == "gone":
        own_server.kill()
        agent.kill()
        until(lambda: not lives(agent.warden), "the warden's end")
    else:
        with servers.frozen(own_server):
            agent.kill()
            until(lambda: not lives(agent.warden), "the warden's end")
    assert not any(map(lives, workers))


def test_the_password_is_nowhere_to_be_seen(
    server: RedisServer, run_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = as_user_of(server, run_id).url
    monkeypatch.setenv(URL_VARIABLE, url)
    agent = Agent(url, run_id, tmp_path)
    seen = [" ".join(agent.warden.cmdline()), *agent.warden.environ().values()]
    assert not any(CANARY in text for text in seen)
    agent.kill()
    until(agent.leaves, "that it leaves")
