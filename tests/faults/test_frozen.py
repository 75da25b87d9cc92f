"""Nodes are frozen for longer than their lease, and thawed: nothing that they still write has an effect (I4)."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import psutil
import pytest
import redis

from redelastic.monitoring.events import Lost
from redelastic.redis import scripts
from redelastic.redis.keys import RunKeys
from redelastic.redis.scripts import Script
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.store import RedisStore
from tests.support.agent_job import AWARE, AgentJob
from tests.support.faulty_proxy import Fault, FaultyProxy
from tests.support.liveness import lives
from tests.support.nodes import NodeFactory
from tests.support.servers import wait_until
from tests.support.torchrun_job import LONG_LEASES
from tests.support.unruly_job import UnrulyJob, read_pid
from tests.support.workers.frozen_node import JOINS, REQUESTS, WRITES

pytestmark = pytest.mark.timeout(150)

WORKERS: Final = Path(__file__).parents[1] / "support" / "workers"
INTERVAL: Final = 3.4  # between heartbeats; a lease is three, and even half a lease outlasts a busy machine's pause
LIMIT: Final = 60.0
STORE: Final = {"k": b"v", "n": b"5", "k of the other": b"v"}


class FrozenNode:
    """A process that runs `workers/frozen_node.py`."""

    def __init__(self, url: str, run_id: str) -> None:
        query = {"run_id": run_id, "min_nodes": 1, "max_nodes": 2, "keep_alive_interval": INTERVAL}
        command = [sys.executable, str(WORKERS / "frozen_node.py"), f"{url}?{urlencode(query)}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def read(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the process has ended"
        return line.strip()

    def ask(self, *verbs: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.writelines(f"{verb}\n" for verb in verbs)
        self.process.stdin.flush()

    def outcomes(self, n: int) -> dict[str, str]:
        """How the next n verbs ended."""
        return dict(json.loads(self.read()) for _ in range(n))

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=LIMIT)


@pytest.fixture
def proxy(server: RedisServer, client: redis.Redis) -> Iterator[FaultyProxy]:
    for script in vars(scripts).values():
        if isinstance(script, Script):
            client.script_load(script.text)  # else the first request of a verb would be sent twice
    host, _, port = server.endpoint.rpartition(":")
    with FaultyProxy(host, int(port)) as started:
        yield started


class Pair:
    """A node that is to be frozen and one that is not, in one round."""

    def __init__(self, frozen: FrozenNode, other: RedisRendezvousHandler, client: redis.Redis, keys: RunKeys) -> None:
        self.frozen, self.other, self._client, self._keys = frozen, other, client, keys
        store = other.next_rendezvous().store
        assert isinstance(store, RedisStore)
        assert frozen.read() == "joined"
        store.multi_set(list(STORE), list(STORE.values()))
        store.queue_push("q", "item")

    def go_on_without_it(self) -> None:
        wait_until(lambda: self.other.num_nodes_waiting() > 0, "the other knows", LIMIT)
        assert self.other.next_rendezvous().world_size == 1

    def stored(self) -> dict[str, Any]:
        """The run's data in Redis, without events and without what the other node's heartbeats renew."""
        read: dict[Any, Callable[[str], Any]] = {
            b"hash": self._client.hgetall,
            b"zset": lambda key: self._client.zrange(key, 0, -1, withscores=True),
            b"set": self._client.smembers,
            b"stream": self._client.xrange,
            b"string": self._client.get,
            b"list": lambda key: self._client.lrange(key, 0, -1),
        }
        prefix = self._keys.run.removesuffix("run")
        names = {name.decode() for name in self._client.scan_iter(match=f"{prefix}*", count=1000)}
        names = {name for name in names if not name.startswith((self._keys.status(""), self._keys.events))}
        found: dict[str, Any] = {name: read[self._client.type(name)](name) for name in sorted(names)}
        del found[self._keys.run][b"beat_at"]
        found[self._keys.leases] = [node for node, _ in found[self._keys.leases]]
        assert found[self._keys.store(1).data] == {key.encode(): value for key, value in STORE.items()}
        return found


@pytest.fixture
def pair(
    new_node: NodeFactory, server: RedisServer, proxy: FaultyProxy, client: redis.Redis, keys: RunKeys
) -> Iterator[Pair]:
    """The node that is to be frozen reaches Redis through the proxy."""
    frozen = FrozenNode(server.url.replace(server.endpoint, f"127.0.0.1:{proxy.port}"), keys.run_id)
    try:
        other = new_node(1, 2, keep_alive_interval=INTERVAL, last_call_timeout=30, join_timeout=LIMIT)
        yield Pair(frozen, other, client, keys)
    finally:
        frozen.end()


VERBS: Final = WRITES | REQUESTS
REFUSED: Final = {  # outcomes for a node that is gone
    **dict.fromkeys(WRITES, "RoundBrokenError"),
    "drain": "0",
    "charge": "[0, 0, b'']",
    "leave": "None",
}


@pytest.mark.fault(
    "a process is frozen for longer than its lease, thawed, and goes on", "I4: its writes are refused, nothing counts"
)
def test_requests_of_a_thawed_node_have_no_effect(pair: Pair) -> None:
    pair.frozen.freeze()
    pair.go_on_without_it()
    before = pair.stored()
    pair.frozen.ask(*VERBS)
    pair.frozen.thaw()
    outcomes = pair.frozen.outcomes(len(VERBS))
    assert outcomes.pop("beat").startswith("[b'fenced', 2,")
    assert outcomes == REFUSED
    assert pair.stored() == before
    assert pair.other.num_nodes_waiting() == 0


@pytest.mark.fault("a node is frozen while requests of it are in flight, which arrive late", "I4: none has an effect")
def test_requests_from_before_the_freeze_have_no_effect(pair: Pair, proxy: FaultyProxy) -> None:
    """The network delays the requests for longer than the lease."""
    held = [proxy.add(Fault(digest(verb), hold_request=True, keep=None, hold=LIMIT)) for verb in VERBS]
    pair.frozen.ask(*VERBS)
    wait_until(lambda: all(fault.fired.is_set() for fault in held), "all are in flight", LIMIT)
    pair.frozen.freeze()
    pair.go_on_without_it()
    before = pair.stored()
    for fault in held:
        fault.release()
    assert pair.stored() == before
    pair.frozen.thaw()
    outcomes = pair.frozen.outcomes(len(VERBS))
    # A heartbeat of the node's own may have been in flight.
    assert outcomes.pop("beat").startswith(("[b'fenced', 2,", "[b'member', 1,"))
    assert outcomes == REFUSED
    assert pair.stored() == before


def digest(verb: str) -> bytes:
    """The bytes that every request of a verb contains."""
    if verb in WRITES:
        name = {"multi_set": "STORE_SET", "delete_key": "STORE_DELETE"}.get(verb, f"STORE_{verb.upper()}")
        name = name.replace("STORE_QUEUE", "QUEUE")
    else:
        name = verb.upper()
    script = getattr(scripts, name)
    assert isinstance(script, Script)
    return script.digest.encode()


@pytest.mark.fault("a join of a node that was fenced arrives late", "I4: it does not bring the node back")
def test_a_late_join_of_the_old_identity_has_no_effect(pair: Pair) -> None:
    pair.frozen.freeze()
    pair.go_on_without_it()
    before = pair.stored()
    pair.frozen.ask(*JOINS)
    pair.frozen.thaw()
    outcomes = pair.frozen.outcomes(len(JOINS))
    assert pair.stored() == before, outcomes
    assert pair.other.num_nodes_waiting() == 0


@pytest.mark.fault(
    "an agent and its workers are frozen for longer than the lease, and thawed",
    "I4: REDELASTIC_EPOCH shows that the workers' writes are stale; they are stopped, the node comes back as a new one",
)
def test_a_frozen_tree_is_replaced_and_its_worker_overwrites_no_checkpoint(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.start("a", "b", script=WORKERS / "frozen_saver.py")

        def epoch_of(name: str, after: int = 0) -> int:
            found = [int(path.name.split("-")[1]) for path in tmp_path.glob(f"{name}-*-saves")]
            return max((epoch for epoch in found if epoch > after), default=0)

        first = job.wait("both save in one round", lambda: epoch_of("a") == epoch_of("b") and epoch_of("a"))
        before = job.id_of("b")
        stale = int((tmp_path / f"b-{first}-pid").read_text())
        with (tmp_path / "checkpoint.lock").open("w") as lock:  # a worker that is frozen in a save would keep the lock
            fcntl.flock(lock, fcntl.LOCK_EX)
            job.nodes["b"].freeze()
            job.wait("it is frozen", lambda: psutil.Process(stale).status() == psutil.STATUS_STOPPED)
        second = job.wait("a saves in a later round", lambda: epoch_of("a", first))
        [lost] = job.events(Lost)
        assert lost.node == before
        os.kill(stale, signal.SIGCONT)  # first: its agent would have stopped it
        job.wait("it is refused", (tmp_path / f"b-{first}-refused").exists)
        assert json.loads((tmp_path / "checkpoint").read_text())[0] == second
        job.nodes["b"].thaw()
        job.wait("its agent stops it", lambda: not lives(stale))
        job.wait("b saves in a later round", lambda: epoch_of("b", second))
        assert job.id_of("b") != before
        assert json.loads((tmp_path / "checkpoint").read_text())[0] > second
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


@pytest.mark.fault("an agent is frozen, and thawed", "I4: it comes back as a new node")
def test_a_frozen_agent_comes_back_as_a_new_node(server: RedisServer, tmp_path: Path) -> None:
    with AgentJob(server, tmp_path, "1:2", conf=LONG_LEASES) as job:
        job.begin("a", "b")
        epoch = job.wait_round("ab")
        agent, *others = job.nodes["b"].tree()
        [worker] = [process for process in others if str(AWARE) in process.cmdline()]
        before = job.id_of("b")
        agent.suspend()
        epoch = job.wait_round("a", epoch)
        assert [event.node for event in job.events(Lost)] == [before]
        assert agent.status() == psutil.STATUS_STOPPED
        agent.resume()
        job.wait_round("ab", epoch)
        assert job.id_of("b") != before
        assert not lives(worker.pid)
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0


@pytest.mark.fault("an agent is frozen, its workers are not", "they are stopped once it is thawed")
def test_a_frozen_agents_workers_are_stopped(server: RedisServer, tmp_path: Path) -> None:
    """The workers would never end by themselves."""
    with UnrulyJob(server, tmp_path, "1:2", conf={"last_call_timeout": 0.2}) as job:
        job.begin("b")
        worker = read_pid(job.wait_file("b-started"))
        [agent, *_] = job.nodes["b"].tree()
        before = job.control.state().members[0].id
        agent.suspend()
        job.wait("its lease is over", lambda: job.control.state().members[0].lease < 0)
        job.begin("a")
        job.wait("b is lost", lambda: before in [event.node for event in job.events(Lost)])
        assert lives(worker), "its agent cannot stop it"
        agent.resume()
        job.wait("it is stopped", lambda: not lives(worker))
        job.wait("b is back", lambda: len(job.control.state().members) == 2)
        assert before not in [node.id for node in job.control.state().members]
        job.tell("finish")
        assert job.wait_end("a") == job.wait_end("b") == 0
