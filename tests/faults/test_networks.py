"""The network: a node is cut off from Redis, from its peers, from both, one way only; links are slow and lossy.

Each node is on a host of its own, see namespaces.py; the test itself is on the host of Redis.
REDELASTIC_LONG=1 has jobs of torchrun and of `redelastic run` meet every fault.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Left
from redelastic.redis.connection import Connection
from redelastic.redis.server import RedisServer
from redelastic.rendezvous.handler import RedisRendezvousHandler, handler_from_parameters
from tests.support.agent_job import AWARE
from tests.support.fault_matrix import Measured
from tests.support.liveness import lives
from tests.support.namespaces import LINK, Network, NetworkServer, both_ways, redis_and_hosts
from tests.support.servers import wait_until
from tests.support.torchrun_job import LIMIT, Job

pytestmark = pytest.mark.timeout(300)

NAMES: Final = ("a", "b", "c")
PAIR: Final = NAMES[:2]
INTERVAL: Final = 0.4
LEASE: Final = 3 * INTERVAL


@pytest.fixture
def network() -> Iterator[Network]:
    with redis_and_hosts(*NAMES) as network:
        yield network


@pytest.fixture
def redis(network: Network) -> Iterator[RedisServer]:
    with NetworkServer(network.addresses["redis"]) as server:
        yield server


# -- faults, each for a block; the first argument is the node's name


Fault = Callable[[Network, str], AbstractContextManager[None]]


def off_redis(network: Network, name: str) -> AbstractContextManager[None]:
    return network.cut(both_ways(name, ["redis"]))


def off_peers(network: Network, name: str) -> AbstractContextManager[None]:
    return network.cut(both_ways(name, set(NAMES) - {name}))


def off_all(network: Network, name: str) -> AbstractContextManager[None]:
    return network.cut(both_ways(name, {"redis", *NAMES} - {name}))


def requests_dropped(network: Network, name: str) -> AbstractContextManager[None]:
    return network.cut([(name, "redis")])


def replies_dropped(network: Network, name: str) -> AbstractContextManager[None]:
    return network.cut([("redis", name)])


@contextmanager
def unplugged(network: Network, name: str) -> Iterator[None]:
    network.pull_out(name)
    try:
        yield
    finally:
        network.plug_in(name)


def case(fault: Fault, what: str, promise: str) -> Any:
    return pytest.param(fault, id=fault.__name__, marks=pytest.mark.fault(what, promise))


FENCED: Final = "I1, I4, I7: out after its lease, the others regroup without it; healed, it is in a later round"
OFF_REDIS: Final = [
    case(off_redis, "a node is cut off from Redis", FENCED),
    case(requests_dropped, "what a node sends to Redis is dropped, replies would pass", FENCED),
    case(replies_dropped, "what Redis sends to a node is dropped, requests pass", FENCED),
    case(unplugged, "a node's link is down", FENCED),
    case(off_all, "a node is cut off from Redis and from its peers", FENCED),
]


# -- nodes that are handlers of this process


@dataclass
class Member:
    network: Network
    name: str
    handler: RedisRendezvousHandler

    def join(self) -> RendezvousInfo:
        with self.network.inside(self.name):
            return self.handler.next_rendezvous()

    @property
    def knows(self) -> bool:
        """Whether it knows that its round is broken."""
        return self.handler.num_nodes_waiting() > 0


@pytest.fixture
def members(request: pytest.FixtureRequest, network: Network, redis: RedisServer) -> Iterator[list[Member]]:
    """One on each host, of a run of 1 to 3 nodes, or of as many as the parameter says."""
    max_nodes: int = getattr(request, "param", 3)
    run_id = f"test-{uuid.uuid4().hex[:12]}"
    config: dict[str, Any] = {"keep_alive_interval": INTERVAL, "last_call_timeout": 1, "join_timeout": LIMIT}
    made = []
    for name in NAMES:
        with network.inside(name):
            params = RendezvousParameters("redis", redis.url, run_id, 1, max_nodes, node_name=name, **config)
            handler = handler_from_parameters(params)
        assert isinstance(handler, RedisRendezvousHandler)
        made.append(Member(network, name, handler))
    yield made
    for member in made:
        member.handler.shutdown()


def join(*members: Member) -> dict[str, tuple[int, int]]:
    """Rank and world size of each."""
    with ThreadPoolExecutor(len(members)) as pool:
        infos = [future.result(LIMIT) for future in [pool.submit(member.join) for member in members]]
    return {member.name: (info.rank, info.world_size) for member, info in zip(members, infos, strict=True)}


@contextmanager
def joining(member: Member) -> Iterator[Future[RendezvousInfo]]:
    """It joins meanwhile; who still does at the end would wait for ever, as a spare does."""
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(member.join)
        try:
            yield joined
        finally:
            if not joined.done():
                member.handler.shutdown()


@pytest.fixture
def control(members: list[Member], redis: RedisServer) -> RunControl:
    """The test's own look at the run, from the host of Redis."""
    return RunControl(Connection.open(redis.url), members[0].handler.backend.keys)


def lost(control: RunControl) -> list[str]:
    return [event.node for event in control.events() if event.event == "lost"]


@pytest.mark.parametrize(
    "fault",
    [OFF_REDIS[0], *(pytest.param(*c.values, id=c.id, marks=[*c.marks, pytest.mark.long]) for c in OFF_REDIS[1:])],
)
def test_a_member_is_cut_off(
    members: list[Member], control: RunControl, network: Network, fault: Fault, measured: Measured
) -> None:
    places = join(*members)
    cut, *others = sorted(members, key=lambda member: places[member.name])  # rank 0
    identity = cut.handler.node.id
    with fault(network, cut.name):
        since, wall = time.monotonic(), time.time()
        wait_until(lambda: all(member.knows for member in others), "the others know")
        known = time.time()
        [event] = [event for event in control.events() if event.event == "lost"]
        assert event.node == identity, "it is out, and nobody else"
        assert event.time - wall > LEASE - 2 * INTERVAL, "not before its lease has run out"
        measured("out of the round", event.time - wall)
        measured("survivors know", known - event.time)
        ranks = join(*others)
        assert sorted(ranks.values()) == [(0, 2), (1, 2)]
        measured("survivors regrouped", time.monotonic() - since)
        wait_until(lambda: cut.handler.node.watch.away > 0, "it has noticed that Redis is away")
        assert not cut.knows, "it keeps its round, and its workers (I9)"
    healed = time.monotonic()
    wait_until(lambda: cut.knows, "it hears that it was fenced")
    measured("it knows", time.monotonic() - healed)
    with joining(cut) as back:
        wait_until(lambda: all(member.knows for member in others), "there is room for it")
        places = join(*others)
        measured("back in a round", time.monotonic() - healed)
        assert {name: rank for name, (rank, _) in places.items()} == {n: rank for n, (rank, _) in ranks.items()}
        assert (back.result(LIMIT).rank, back.result(LIMIT).world_size) == (2, 3)
    run = control.state()
    assert (run.epoch, run.broken) == (3, None)
    assert lost(control) == [identity]
    assert cut.handler.node.id != identity, "it came back as a new node (I4)"


@pytest.mark.long
@pytest.mark.fault(
    "a spare is cut off from Redis", "I6, I7: the round stands; healed, it is a spare again, and promoted"
)
@pytest.mark.parametrize("members", [2], indirect=True)
def test_a_spare_is_cut_off(members: list[Member], control: RunControl, network: Network, measured: Measured) -> None:
    *first, spare = members
    join(*first)
    with joining(spare) as joined:
        wait_until(lambda: control.state().spares, "it waits")
        with off_redis(network, spare.name):
            since = time.time()
            wait_until(lambda: lost(control), "it is out")
            measured("out of the run", time.time() - since)
            assert not control.state().spares
        healed = time.monotonic()
        wait_until(lambda: control.state().spares, "it is a spare again")
        measured("a spare again", time.monotonic() - healed)
        run = control.state()
        assert (run.epoch, run.broken) == (1, None), "the round stands"
        leaving, stays = first
        leaving.handler.end(Left(cause="exited"), "goes on")
        wait_until(lambda: stays.knows, "there is a place")
        assert sorted([*join(stays).values(), (joined.result(LIMIT).rank, 2)]) == [(0, 2), (1, 2)]


@pytest.mark.long
@pytest.mark.fault("what a node sends comes 200 ms late", "I2, I7: nobody is evicted; a death is known as ever")
def test_a_slow_link(members: list[Member], control: RunControl, network: Network, measured: Measured) -> None:
    slow, dies, other = members
    with network.slow(slow.name, 0.2):
        since = time.monotonic()
        assert sorted(join(*members).values()) == [(0, 3), (1, 3), (2, 3)]
        measured("rendezvous complete", time.monotonic() - since)
        wait_until(lambda: (control.state().age or 0) > 3 * LEASE, "three leases have passed")
        assert lost(control) == []
        assert control.state().broken is None
        gone = dies.handler.node.id
        dies.handler.node.stop()
        since = time.monotonic()
        wait_until(lambda: slow.knows and other.knows, "its death is known")
        measured("a death known", time.monotonic() - since)
        assert sorted(join(slow, other).values()) == [(0, 2), (1, 2)]
        assert lost(control) == [gone]


# -- jobs: nodes that are processes, whose workers train


@contextmanager
def job_of(
    network: Network, server: RedisServer, directory: Path, *names: str, agent: bool, **start: Any
) -> Iterator[Job]:
    """A node on each of these hosts, by torchrun or by `redelastic run`."""
    with Job(server, directory, f"1:{len(names)}", agent=agent) as job:
        for name in names:
            with network.inside(name):
                job.start(name, env={"GLOO_SOCKET_IFNAME": LINK}, **start)
        yield job


def events(job: Job, kind: str) -> list[dict[str, str]]:
    return [event for _, event in job.redis("events") or [] if event["event"] == kind]


AGENTS: Final = [pytest.param(False, id="torchrun"), pytest.param(True, id="redelastic run")]
JOBS: Final = [
    pytest.param(*fault.values, *agent.values, id=f"{fault.id}-{agent.id}", marks=fault.marks)
    for fault in OFF_REDIS
    for agent in AGENTS
]


@pytest.mark.long
@pytest.mark.parametrize(("fault", "agent"), JOBS)
def test_a_training_node_is_cut_off(
    network: Network, redis: RedisServer, tmp_path: Path, fault: Fault, measured: Measured, *, agent: bool
) -> None:
    with job_of(network, redis, tmp_path, *NAMES, agent=agent) as job:
        epoch = job.wait_round(NAMES)
        cut, *others = job.by_rank(epoch)  # rank 0, whose agent serves the bootstrap store
        [pid] = {line.pid for line in job.lines("start") if line.node == cut.name}
        worker = psutil.Process(pid)
        with fault(network, cut.name):
            at = job.note(f"{cut.name} is cut off")
            smaller = job.wait_round([node.name for node in others], epoch, fault=at)
            measured("survivors train", time.time() - at)
            if fault in (off_all, unplugged):
                assert lives(worker), "its worker waits for peers that it does not hear, and is left alone (I9)"
            else:
                job.wait("its worker has failed, as its peers' have ended", lambda: not lives(worker))
        at = job.note("healed")
        job.wait_round(NAMES, smaller, fault=at)
        measured("all train", time.time() - at)
        assert not lives(worker)
        assert [line.epoch for line in job.lines("start") if line.node == cut.name][1:] == [smaller + 1]
        assert len(events(job, "lost")) == 1
        job.finish(*NAMES)


@pytest.mark.long
@pytest.mark.fault(
    "a node is cut off from its peers: briefly, then for longer than `--hang-timeout`",
    "I1: brief: no worker is restarted; longer: a new round of the same nodes, whose leases stand; healed, it trains",
)
def test_a_training_node_is_cut_off_from_its_peers(
    network: Network, redis: RedisServer, tmp_path: Path, measured: Measured
) -> None:
    options = ["--hang-timeout=6", f"--hang-start-timeout={LIMIT}"]
    with job_of(network, redis, tmp_path, *PAIR, agent=True, script=AWARE, options=options) as job:
        epoch = job.wait_round(PAIR)
        cut = job.by_rank(epoch)[0].name
        with off_peers(network, cut):
            before = len(job.lines("step"))
            time.sleep(1)
            assert len(job.lines("step")) < before + 2 * len(PAIR), "no step without it"
        healed = time.time()
        job.wait("they train on", lambda: len(job.lines("step")) > before + 3 * len(PAIR))
        measured("after a second: train on", time.time() - healed)
        assert job.epoch == epoch

        with off_peers(network, cut):
            at = time.time()
            job.wait("the hang is found, and they regroup", lambda: len(events(job, "completed")) == epoch + 1)
            measured("regrouped", time.time() - at)
            assert len(events(job, "hung")) > 0
            assert events(job, "lost") == []
        healed = job.note("healed")
        job.wait_round(PAIR, epoch, fault=healed)
        measured("train", time.time() - healed)
        assert job.redis("run")["restarts"] == "1", "charged once"
        job.tell("finish")
        assert [job.wait_end(name) for name in PAIR] == [0, 0]


@pytest.mark.long
@pytest.mark.fault(
    "what a node sends comes 200 ms late, and a fifth of it never",
    "I2, I8: the job trains, no step is lost or done twice",
)
def test_a_slow_and_lossy_link(network: Network, redis: RedisServer, tmp_path: Path, measured: Measured) -> None:
    """Leases are the default's. A lost packet costs a timeout of TCP, so that one may run out; then all regroup."""
    with (
        network.slow("a", 0.2, 0.2),
        job_of(network, redis, tmp_path, *PAIR, agent=False, conf={"keep_alive_interval": 2}) as job,
    ):
        at = time.time()
        job.wait_round(PAIR)
        measured("first steps", time.time() - at)
        at, done = time.time(), len(job.lines("step"))
        job.wait("they train", lambda: len(job.lines("step")) >= done + 4 * len(PAIR))
        measured("a step", (time.time() - at) / 4)
        measured("rounds", job.epoch, "")
        job.tell("finish")
        job.finish(*PAIR)


@pytest.mark.fault("whatever a node sends to Redis is dropped from the start", "an error in words, exit code 3")
def test_a_redis_that_never_answers(network: Network, redis: RedisServer, tmp_path: Path, measured: Measured) -> None:
    with Job(redis, tmp_path, "1:1", agent=True) as job, off_redis(network, "a"):
        at = time.time()
        with network.inside("a"):
            job.start("a", may_end=True, conf={"join_timeout": 10})
        assert job.wait_end("a") == 3
        measured("error after", time.time() - at)
        said = job.nodes["a"].stderr
        assert f"Redis at redis://{redis.endpoint} could not be reached within" in said
        assert redis.url not in said


@pytest.mark.fault(
    "an idle connection is forgotten on its way, without a reset", "the kernel gives it up within a lease"
)
def test_an_idle_connection_that_is_forgotten(network: Network, redis: RedisServer) -> None:
    with network.inside("a"):
        connection = Connection.open(redis.url, attempt_timeout=1.0)
        [descriptor] = [each.fd for each in psutil.Process().net_connections("tcp") if each.raddr]
        with socket.socket(fileno=os.dup(descriptor)) as channel, off_redis(network, "a"):
            look = select.poll()
            look.register(channel, select.POLLIN)
            assert look.poll(1000 * LIMIT), "it is an idle connection no longer"
            assert channel.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ETIMEDOUT
        connection.close()
