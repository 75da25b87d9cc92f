"""Random faults on jobs whose workers survive: each job has to end as a run in one process does.

The faults of a job are drawn from its seed before it begins: a job that has failed can be run again by
``REDELASTIC_LONG=1 REDELASTIC_SURVIVAL_SEED=7 REDELASTIC_SURVIVAL_FAULTS=20 pytest`` and this file. Of more faults,
each job of 20 has the next seed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import psutil
import pytest

from redelastic.monitoring.events import Lost
from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED
from tests.support.fault_matrix import Measured
from tests.support.surviving_job import SurvivingJob
from tests.support.torchrun_job import LIMIT
from tests.support.waiting import Within

SEED: Final = int(os.environ.get("REDELASTIC_SURVIVAL_SEED", "7"))
FAULTS: Final = int(os.environ.get("REDELASTIC_SURVIVAL_FAULTS", "60"))
FAULTS_PER_JOB: Final = 20
FEWEST_NODES: Final = 2
MOST_NODES: Final = 5
MOST_WORKERS: Final = 2  # per node
CONF: Final = {"last_call_timeout": 1.0, "keep_alive_interval": 0.4, "keep_alive_max_attempt": 4}
LONGEST_OUTAGE: Final = 2.5  # of Redis, in seconds: longer than a lease
LINGER: Final = (
    0.3  # how long each rank makes the exchange of state last, where a fault is to strike amid it, in seconds
)
PRELOAD: Final = "--preload=torch.nn.parallel,torch.distributed.nn.functional,torch._dynamo"
PACE: Final = 0.15  # of a step, in seconds: so many processes are not to keep the machine busy
# What a node's stderr has if gloo holds a worker, or ends one: it may abort one that was frozen while a group was made.
HELD: Final = ("has not left round", "gloo::EnforceNotMet")
MOST_HELD: Final = 1  # nodes of a job: docs/how-to/survive.md names it as a limit
ROOM: Final = 30e6  # that a survivor may grow by in a job, in bytes: caches of torch and of the allocator

until = Within(LIMIT)

# -- what is done to a job: data

WORKER: Final = "a worker is killed"
AGENT: Final = "an agent is killed"
NODE: Final = "a node is killed"
FREEZE: Final = "a node is frozen, and thaws"
CUT: Final = "a node is cut off from Redis"
CONNECTIONS: Final = "all connections to Redis are cut"
OUTAGE: Final = "Redis is away"
JOIN: Final = "a node joins"
DRAIN: Final = "a node is drained"
KINDS: Final = {  # and how often, compared with the others: a new agent costs 5 s of a core
    WORKER: 4,
    AGENT: 1,
    NODE: 1,
    FREEZE: 3,
    CUT: 3,
    CONNECTIONS: 1,
    OUTAGE: 2,
    JOIN: 2,
    DRAIN: 2,
}
ENDS_WORKERS: Final = (WORKER, AGENT, NODE, DRAIN)  # of the node that it strikes; all others keep theirs
PLANNED: Final = (JOIN, DRAIN)
ENDS_NO_ROUND: Final = (CONNECTIONS, OUTAGE)
MAY_HOLD: Final = (WORKER, AGENT, NODE, FREEZE)  # a peer that stops amid a message may leave another in gloo for good

TRAINING: Final = "while all train"
AT_ONCE: Final = "at about the same time"  # as the fault before
PARKED: Final = "between parked and join"
FORMING: Final = "while the group is made"
SHARING: Final = "during the exchange of state"
LATEST: Final = {AT_ONCE: 0.3, PARKED: 0.05, FORMING: 0.1, SHARING: 0.05}  # how long after the moment, in seconds


class Fault(NamedTuple):
    """One fault.

    Attributes:
        kind: what is done.
        whom: the node's name; empty for what strikes all.
        when: after which moment; all but TRAINING refer to the fault before this one.
        delay: how long after it, in seconds.
        worker: which of the node's workers.
        lasts: how long Redis is away, in seconds.
    """

    kind: str
    whom: str = ""
    when: str = TRAINING
    delay: float = 0.0
    worker: int = 0
    lasts: float = 0.0


Strike = tuple[Fault, ...]  # faults that the job has to recover from together


class Schedule(NamedTuple):
    """A job, and what is done to it.

    Attributes:
        seed: of which it was drawn.
        workers: per node.
        options: of the nodes.
        nodes: that begin it.
        strikes: one after the other.
    """

    seed: int
    workers: int
    options: tuple[str, ...]
    nodes: tuple[str, ...]
    strikes: tuple[Strike, ...]


class Draw:
    """Draws a schedule: with fewer faults it is the same, but shorter."""

    def __init__(self, seed: int, faults: int) -> None:
        self._dice, self._names = Random(seed), (f"n{i}" for i in count())
        nodes = tuple(next(self._names) for _ in range(self._dice.randint(FEWEST_NODES, MOST_NODES)))
        self._workers, options = self._dice.randint(1, MOST_WORKERS), (PRELOAD,) if self._dice.random() < 0.9 else ()
        self._nodes = [*nodes]
        strikes: list[Strike] = []
        while (left := faults - sum(map(len, strikes))) > 0:
            strikes.append(self._strike(left))
        self.schedule = Schedule(seed, self._workers, options, nodes, tuple(strikes))

    def _strike(self, most: int) -> Strike:
        whole = self._dice.sample(self._nodes, len(self._nodes))  # the nodes that this strike has not struck
        first = self._fault(KINDS, whole, TRAINING, self._dice.uniform(0, 0.2))
        if most == 1 or len(whole) == 1 or self._dice.random() < 0.5:  # one node keeps the state
            return (first,)
        if first.kind in ENDS_NO_ROUND:
            when, kinds = AT_ONCE, [kind for kind in KINDS if kind != first.kind]
        else:
            when, kinds = self._dice.choice((AT_ONCE, PARKED, FORMING, SHARING)), [*KINDS]
        return first, self._fault(kinds, whole, when, self._dice.uniform(0, LATEST[when]))

    def _fault(self, kinds: Collection[str], whole: list[str], when: str, delay: float) -> Fault:
        """A fault of any kind that is possible now."""
        room = {JOIN: len(self._nodes) < MOST_NODES, DRAIN: len(self._nodes) > FEWEST_NODES}
        weights = [often * (kind in kinds and room.get(kind, True)) for kind, often in KINDS.items()]
        [kind] = self._dice.choices([*KINDS], weights)
        lasts = self._dice.uniform(0.2, LONGEST_OUTAGE) if kind == OUTAGE else 0.0
        if kind in ENDS_NO_ROUND:
            return Fault(kind, "", when, delay, lasts=lasts)
        whom = next(self._names) if kind == JOIN else whole.pop()
        self._nodes += [whom] if kind == JOIN else []
        self._nodes = [name for name in self._nodes if kind != DRAIN or name != whom]
        return Fault(kind, whom, when, delay, self._dice.randrange(self._workers) if kind == WORKER else 0)


# -- doing it


class Campaign:
    """Does to a job what its schedule says.

    Each node has a way to Redis of its own: a proxy in a process that passes nothing on while it is frozen.
    """

    def __init__(self, job: SurvivingJob, schedule: Schedule, server: RedisServer) -> None:
        self._job, self._schedule, self._server = job, schedule, server
        self._oracle = Oracle(job)
        self._nodes: set[str] = set()
        self._links: dict[str, subprocess.Popen[bytes]] = {}
        self._urls: dict[str, str] = {}
        self._outage = threading.Timer(0, str)  # ends the last one of Redis
        self._outage.start()
        self._epoch = 0  # of the last round in which all have trained

    def run(self) -> None:
        """Run the job to its end."""
        for name in self._schedule.nodes:
            self._begin_node(name)
        self._epoch = self._oracle.await_training(self._nodes)
        for strike in self._schedule.strikes:
            what = f"round {self._epoch} of {' '.join(sorted(self._nodes))}: {' + '.join(map(str, strike))}"
            self._job.note(f"{time.time():.3f}, {what}")
            self._strike(strike)
        self._job.end(*self._nodes)
        self._oracle.check_steps()
        self._oracle.check_leaks()
        self._job.check_rounds()

    @property
    def held(self) -> int:
        """Nodes whose workers were started anew, since gloo held or ended one."""
        return self._oracle.held

    def close(self) -> None:
        """End what this process has started for the job."""
        for link in self._links.values():
            link.kill()
            link.communicate()

    def _strike(self, strike: Strike) -> None:
        """Have faults happen, each at its moment, and heal what can be; then all have to train again."""
        before, struck = self._job.pids(self._epoch), time.time()
        linger = self._job.directory / "linger"
        if any(fault.when == SHARING for fault in strike):
            linger.write_text(str(LINGER))
        for fault in strike:
            until(partial(self._is_time, fault), fault.when)
            threading.Event().wait(fault.delay)
            self._begin(fault)
        linger.unlink(missing_ok=True)
        self._end(strike)
        self._epoch = self._oracle.await_training(self._nodes)
        kept = before.keys() & self._nodes - {fault.whom for fault in strike if fault.kind in ENDS_WORKERS}
        may_hold = any(fault.kind in MAY_HOLD for fault in strike)
        self._oracle.check({name: before[name] for name in kept}, self._epoch, may_hold=may_hold)
        if len(strike) == 1 and strike[0].kind in PLANNED:
            self._oracle.check_each_step_once({pid for name in kept for pid in before[name]}, struck)

    def _is_time(self, fault: Fault) -> bool:
        if fault.when == PARKED:  # Redis knows that the round has ended
            changes = [change for _, change in self._job.redis("wake") or ()]
            return any(change["event"] == "broken" and int(change["epoch"]) >= self._epoch for change in changes)
        if fault.when == FORMING:
            return int(self._job.redis("run")["epoch"]) > self._epoch
        if fault.when == SHARING:
            new = {line.node for line in self._job.lines("shares") if line.epoch > self._epoch}
            return bool(new) if fault.whom not in self._job.pids(self._epoch) else fault.whom in new
        return True

    def _begin(self, fault: Fault) -> None:
        """Have a fault happen, and see that it has."""
        happen = {
            WORKER: lambda name: self._kill_worker(name, fault.worker),
            AGENT: self._kill_agent,
            NODE: self._kill_node,
            FREEZE: lambda name: freeze(*self._job.nodes[name].tree()),
            CUT: lambda name: freeze(psutil.Process(self._links[name].pid)),
            CONNECTIONS: lambda _: self._cut_connections(),
            OUTAGE: lambda _: self._stop_redis(fault.lasts),
            JOIN: self._begin_node,
            DRAIN: lambda name: self._job.nodes[name].terminate(),
        }
        happen[fault.kind](fault.whom)

    def _end(self, strike: Strike) -> None:
        """End what lasts: first what the others wait for."""
        self._outage.join()
        for fault in strike:
            if fault.kind == DRAIN:
                assert self._job.wait_end(fault.whom) == DRAINED
                self._nodes.remove(fault.whom)
        silent = {fault.whom for fault in strike if fault.kind in (FREEZE, CUT)}
        if silent:
            self._job.wait_round(self._nodes - silent, self._epoch)
        for fault in strike:
            if fault.kind == FREEZE:
                self._job.nodes[fault.whom].thaw()
            elif fault.kind == CUT:
                self._links[fault.whom].send_signal(signal.SIGCONT)

    def _begin_node(self, name: str) -> None:
        self._nodes.add(name)
        if name not in self._links:
            command = [sys.executable, "-m", "tests.support.faulty_proxy", *self._server.endpoint.split(":")]
            link = self._links[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert link.stdout
            self._urls[name] = self._server.url.replace(
                self._server.endpoint, f"127.0.0.1:{int(link.stdout.readline())}"
            )
        env = {"REDELASTIC_REDIS_URL": self._urls[name], "TEST_PACE": str(PACE)}
        self._job.begin(name, options=self._schedule.options, max_restarts=1000, env=env)

    def _kill_worker(self, name: str, number: int) -> None:
        victim = psutil.Process(sorted(self._job.pids(self._epoch)[name])[number])
        victim.kill()
        await_ends(victim)

    def _kill_agent(self, name: str) -> None:
        processes = self._job.nodes[name].tree()
        self._job.nodes[name].kill_agent_alone()
        await_ends(*processes)
        self._begin_node(name)

    def _kill_node(self, name: str) -> None:
        processes = self._job.nodes[name].tree()
        self._job.nodes[name].kill()
        await_ends(*processes)
        self._begin_node(name)

    def _cut_connections(self) -> None:
        with self._server.get_client() as client:
            assert client.client_kill_filter(_type="normal", skipme=True)

    def _stop_redis(self, seconds: float) -> None:
        assert self._server.pid is not None
        freeze(psutil.Process(self._server.pid))
        self._outage = threading.Timer(seconds, os.kill, (self._server.pid, signal.SIGCONT))
        self._outage.start()


def freeze(*processes: psutil.Process) -> None:
    """Stop processes, and wait until they have."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()
    until(lambda: all(one.status() == psutil.STATUS_STOPPED for one in running(processes)), "they are frozen")


def await_ends(*processes: psutil.Process) -> None:
    """Wait until processes have ended, whoever reaps them."""
    until(lambda: not running(processes), "they have ended")


def running(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended."""
    found = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


# -- what must hold


class Sample(NamedTuple):
    """What a process holds while the job trains: open sockets, other descriptors, threads, and bytes of memory."""

    sockets: int
    files: int
    threads: int
    memory: int

    @classmethod
    def of(cls, pid: int) -> Sample:
        """Look at a process."""
        is_socket: Counter[bool] = Counter()
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                is_socket[str(descriptor.readlink()).startswith("socket:")] += 1
        process = psutil.Process(pid)
        return cls(is_socket[True], is_socket[False], process.num_threads(), process.memory_info().rss)


class Oracle:
    """Knows what must hold in a job after each strike, and at its end."""

    def __init__(self, job: SurvivingJob) -> None:
        self._job = job
        self.held = 0  # nodes whose workers were started anew, since gloo held or ended one
        self._samples: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)  # by pid and number of workers

    def await_training(self, nodes: Collection[str]) -> int:
        """Wait until these nodes have made two steps together from now on; returns the epoch of their round."""
        since = time.time()

        def trained() -> int:
            steps: defaultdict[int, Counter[int]] = defaultdict(Counter)
            for line in reversed(self._job.lines("step")):
                if line.time < since:
                    break
                steps[line.epoch][line.pid] += 1
            for epoch, made in steps.items():
                pids = self._job.pids(epoch)
                if pids.keys() == set(nodes) and all(made[pid] >= 2 for several in pids.values() for pid in several):
                    return epoch
            return 0

        return self._job.wait(f"{sorted(nodes)} train together", trained, 2 * LIMIT)

    def check(self, before: Mapping[str, set[int]], epoch: int, *, may_hold: bool) -> None:
        """The workers of these nodes have survived to this round, but for what gloo may do; no step is lost."""
        pids, nodes = self._job.pids(epoch), self._job.nodes
        anew = [name for name in before if pids[name] != before[name]]
        held = {name for name in anew if may_hold and any(text in nodes[name].stderr for text in HELD)}
        self.held += len(held)
        assert self.held <= MOST_HELD
        survivors = {name: before[name] for name in before.keys() - held}
        assert {name: pids[name] for name in survivors} == survivors
        for pid in set().union(*survivors.values()):
            self._samples[pid, sum(map(len, pids.values()))].append(Sample.of(pid))
        self.check_steps()

    def check_steps(self) -> None:
        """No worker has lost a step that it had committed, or made it twice; nobody made up a step."""
        next_step: dict[int, int] = {}  # of each process
        newest = 0
        of_round: dict[int, int] = {}  # the step that each round began with
        for line in self._job.lines():
            expected = next_step.get(line.pid, 0)
            if line.event == "start":
                assert expected <= line.step <= newest, f"the committed step is {expected} of {newest}: {line}"
                assert of_round.setdefault(line.epoch, line.step) == line.step, line
                next_step[line.pid] = line.step
            elif line.event == "step":
                assert line.step == expected, f"not step {expected}: {line}"
                next_step[line.pid] = line.step + 1
                newest = max(newest, line.step + 1)

    def check_each_step_once(self, pids: Collection[int], since: float) -> None:
        """These workers have not even begun a step twice since then, unless a pause has cost a node its lease."""
        if any(event.time >= since for event in self._job.events(Lost)):
            return
        begun: defaultdict[int, list[int]] = defaultdict(list)
        for line in self._job.lines("samples"):
            if line.pid in pids and line.time >= since:
                begun[line.pid].append(line.step)
        for steps in begun.values():
            assert steps == list(range(steps[0], steps[0] + len(steps))), steps

    def check_leaks(self) -> None:
        """No survivor holds more than after its first rounds of that size, but for the connections of two groups."""
        for several in self._samples.values():
            last = several[-1]
            assert last.sockets <= max(one.sockets for one in several[:2]) + 2 * MOST_NODES * MOST_WORKERS, several
            assert last.files <= max(one.files for one in several[:2]), several
            assert last.threads <= max(one.threads for one in several[:2]), several
            assert last.memory - several[0].memory < ROOM, several


@pytest.mark.fault(
    "random faults of workers, agents, nodes, their networks and Redis, at any moment, some together",
    "surviving workers keep their processes, and lose no step; the job ends as one in one process",
)
@pytest.mark.long
@pytest.mark.timeout(300 + 60 * FAULTS_PER_JOB)
@pytest.mark.parametrize("seed", range(SEED, SEED + -(-FAULTS // FAULTS_PER_JOB)))
def test_random_faults(own_server: RedisServer, tmp_path: Path, measured: Measured, seed: int) -> None:
    schedule = Draw(seed, min(FAULTS, FAULTS_PER_JOB)).schedule
    nodes = f"1:{MOST_NODES}"
    with SurvivingJob(own_server, tmp_path, nodes, nproc=schedule.workers, conf=CONF, fork=True) as job:
        job.note(f"{schedule}")
        campaign = Campaign(job, schedule, own_server)
        try:
            campaign.run()
            measured("nodes whose workers gloo held", campaign.held, "")
        except AssertionError:
            job.note(job.report())
            raise
        finally:
            campaign.close()
