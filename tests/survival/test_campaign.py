"""Random faults on jobs whose workers survive: each job has to end as a run in one process does.

For hundreds: ``REDELASTIC_LONG=1 REDELASTIC_SURVIVAL_FAULTS=300 REDELASTIC_SURVIVAL_SEED=7 pytest -s`` and this file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import psutil
import pytest

from redelastic.redis.server import RedisServer
from tests.support.agent_job import DRAINED
from tests.support.surviving_job import SurvivingJob
from tests.support.torchrun_job import LIMIT, Node
from tests.support.waiting import Within

SEED: Final = int(os.environ.get("REDELASTIC_SURVIVAL_SEED", "7"))
FAULTS: Final = int(os.environ.get("REDELASTIC_SURVIVAL_FAULTS", "15"))
FAULTS_PER_JOB: Final = 12
FEWEST_NODES: Final = 2
MOST_NODES: Final = 4
CONF: Final = {"last_call_timeout": 1.0, "keep_alive_interval": 0.4, "keep_alive_max_attempt": 3}
LONGEST_OUTAGE: Final = 2.5  # of Redis, in seconds: longer than a lease
MAKING: Final = 0.1  # what a round needs for its group, its state and DDP, in seconds
ROOM: Final = 30e6  # that a survivor may grow by in a job, in bytes: caches of torch and of the allocator

until = Within(LIMIT)


class Sample(NamedTuple):
    """What a worker holds while it trains: open descriptors, by what they are; threads; and bytes of memory."""

    descriptors: Counter[str]
    threads: int
    memory: int


def descriptors_of(pid: int) -> Counter[str]:
    """The open descriptors of a process, by the file or the kind of what they are."""
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found[str(descriptor.readlink()).partition(":")[0]] += 1
    return found


class Campaign:
    """One job, and what is done to it. A fault returns the nodes whose workers it ends; the others' have to stay."""

    def __init__(self, job: SurvivingJob, dice: Random, server: RedisServer) -> None:
        self.job, self._dice, self._server = job, dice, server
        self._names = iter(f"n{i}" for i in range(1000))
        self._options = ("--preload=torch.nn.parallel,torch.distributed.nn.functional",) if dice.random() < 0.7 else ()
        self.nodes: set[str] = set()
        self._samples: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)  # by pid and number of nodes
        self.begin(*(next(self._names) for _ in range(dice.randint(FEWEST_NODES, MOST_NODES))))
        self.epoch = self._wait_trained(time.time())

    def begin(self, *names: str) -> None:
        self.nodes |= set(names)
        self.job.begin(*names, options=self._options, max_restarts=1000)

    def strike(self) -> tuple[str, float | None]:
        """Do something to the job, and wait until all train.

        Returns its kind, and after how many seconds all survivors had made a step; None if no round ended. A change
        that is planned counts from the last step before it.
        """
        kinds = [kind for kind, (_, fewest, most) in KINDS.items() if fewest <= len(self.nodes) <= most]
        kind = self._dice.choice(kinds)
        before, epoch = self.job.pids(self.epoch), self.epoch
        struck = self.job.note(f"{kind}, {len(self.nodes)} nodes of {self.job.nproc}")
        lost = KINDS[kind][0](self)
        self.epoch = self._wait_trained(time.time())
        after = self.job.pids(self.epoch)
        kept = before.keys() & self.nodes - lost
        for name in kept:
            assert after[name] == before[name], f"{kind}: {name} survives in its processes" + self.job.report()
        self._sample(kept)
        if kind in PLANNED:
            self._check_each_step_once({pid for name in kept for pid in after[name]}, struck)
            struck = max(line.time for line in self.job.lines("step") if line.epoch == epoch)
        return kind, self._recovered(kept, epoch, struck)

    def _wait_trained(self, since: float) -> int:
        """Wait until all nodes have made two steps together since then; returns the epoch of their round."""

        def trained() -> int:
            steps: defaultdict[int, list[tuple[str, int]]] = defaultdict(list)
            for line in reversed(self.job.lines("step")):
                if line.time < since:
                    break
                steps[line.epoch].append((line.node, line.pid))
            for epoch, made in steps.items():
                pids = self.job.pids(epoch)
                if pids.keys() == self.nodes and all(
                    made.count((name, pid)) >= 2 for name, several in pids.items() for pid in several
                ):
                    return epoch
            return 0

        return self.job.wait(f"{sorted(self.nodes)} train together", trained, 2 * LIMIT)

    def _recovered(self, kept: set[str], epoch: int, struck: float) -> float | None:
        """How long after a fault all workers that survived it had made a step in a later round."""
        pids = {pid for name in kept for pid in self.job.pids(self.epoch)[name]}
        first: defaultdict[int, dict[int, float]] = defaultdict(dict)
        for line in self.job.lines("step"):
            if line.epoch > epoch and line.pid in pids:
                first[line.epoch].setdefault(line.pid, line.time)
        whole = [max(times.values()) for times in first.values() if times.keys() == pids]
        return min(whole) - struck if whole else None

    def _sample(self, kept: set[str]) -> None:
        for name in kept:
            for pid in self.job.pids(self.epoch)[name]:
                process = psutil.Process(pid)
                sample = Sample(descriptors_of(pid), process.num_threads(), process.memory_info().rss)
                self._samples[pid, len(self.nodes)].append(sample)

    def end(self) -> None:
        """Let the job finish, and judge it."""
        self.job.end(*self.nodes)
        self._check_steps()
        self.job.check_rounds()
        for several in self._samples.values():
            last = several[-1]
            assert last.descriptors.total() <= max(one.descriptors.total() for one in several[:2]), several
            assert last.threads <= max(one.threads for one in several[:2]), several
            assert last.memory - several[0].memory < ROOM, several

    def _check_steps(self) -> None:
        """No worker has lost a step that it had committed, or made it twice; nobody made up a step."""
        next_step: dict[int, int] = {}  # of each process
        newest = 0
        of_round: dict[int, int] = {}  # the step that each round began with
        for line in self.job.lines():
            expected = next_step.get(line.pid, 0)
            if line.event == "start":
                assert expected <= line.step <= newest, f"the committed step is {expected} of {newest}: {line}"
                assert of_round.setdefault(line.epoch, line.step) == line.step, line
                next_step[line.pid] = line.step
            elif line.event == "step":
                assert line.step == expected, f"not step {expected}: {line}"
                next_step[line.pid] = line.step + 1
                newest = max(newest, line.step + 1)

    def _check_each_step_once(self, pids: set[int], since: float) -> None:
        """These workers have not even begun a step twice since then."""
        begun: defaultdict[int, list[int]] = defaultdict(list)
        for line in self.job.lines("samples"):
            if line.pid in pids and line.time >= since:
                begun[line.pid].append(line.step)
        for steps in begun.values():
            assert steps == list(range(steps[0], steps[0] + len(steps))), steps

    # -- faults

    def _choose(self, number: int) -> list[str]:
        return self._dice.sample(sorted(self.nodes), number)

    def _kill_worker(self, name: str) -> None:
        with contextlib.suppress(ProcessLookupError):  # a fault before has ended it
            os.kill(self._dice.choice(sorted(self.job.pids(self.epoch)[name])), signal.SIGKILL)

    def kill_worker(self) -> set[str]:
        [name] = self._choose(1)
        self._kill_worker(name)
        return {name}

    def kill_agent(self) -> set[str]:
        return self._replace(Node.kill_agent_alone)

    def kill_node(self) -> set[str]:
        return self._replace(Node.kill)

    def _replace(self, kill: Callable[[Node], object]) -> set[str]:
        [name] = self._choose(1)
        kill(self.job.nodes[name])
        self.begin(name)
        return {name}

    def freeze(self) -> set[str]:
        [name] = self._choose(1)
        self.job.nodes[name].freeze()
        self.job.wait_round(self.nodes - {name}, self.epoch)
        self.job.nodes[name].thaw()
        return set()

    def cut_connections(self) -> set[str]:
        with self._server.get_client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        return set()

    def join(self) -> set[str]:
        self.begin(next(self._names))
        return set()

    def drain(self) -> set[str]:
        [name] = self._choose(1)
        self.job.nodes[name].terminate()
        assert self.job.wait_end(name) == DRAINED, self.job.report()
        self.nodes.discard(name)
        return {name}

    def two_at_once(self) -> set[str]:
        return self._kill_two(lambda: threading.Event().wait(self._dice.uniform(0, 0.3)))

    def while_the_group_is_made(self) -> set[str]:
        def be_amid_it() -> None:
            until(lambda: int(self.job.redis("run")["epoch"]) > self.epoch)
            threading.Event().wait(self._dice.uniform(0, MAKING))

        return self._kill_two(be_amid_it)

    def between_parked_and_join(self) -> set[str]:
        return self._kill_two(lambda: until(self._is_broken))

    def redis_away_while_parked(self) -> set[str]:
        lost = self.kill_worker()
        until(self._is_broken)
        self._take_redis_away()
        return lost

    def kill_node_without_redis(self) -> set[str]:
        return self._replace(lambda node: self._take_redis_away(node.kill))

    def _take_redis_away(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        assert self._server.pid is not None
        os.kill(self._server.pid, signal.SIGSTOP)
        meanwhile()
        threading.Event().wait(self._dice.uniform(0.2, LONGEST_OUTAGE))
        os.kill(self._server.pid, signal.SIGCONT)

    def _kill_two(self, between: Callable[[], object]) -> set[str]:
        first, second = self._choose(2)
        self._kill_worker(first)
        between()
        if self._dice.random() < 0.5:
            self._kill_worker(second)
        else:
            self.job.nodes[second].kill()
            self.begin(second)
        return {first, second}

    def _is_broken(self) -> bool:
        """Whether Redis knows that the round has ended."""
        wake_ups = [change for _, change in self.job.redis("wake") or ()]
        return any(change["event"] == "broken" and int(change["epoch"]) >= self.epoch for change in wake_ups)


KINDS: Final[dict[str, tuple[Callable[[Campaign], set[str]], int, int]]] = {  # with the number of nodes that it needs
    "a worker is killed": (Campaign.kill_worker, FEWEST_NODES, MOST_NODES),
    "an agent is killed": (Campaign.kill_agent, FEWEST_NODES, MOST_NODES),
    "a node is killed": (Campaign.kill_node, FEWEST_NODES, MOST_NODES),
    "a node is frozen": (Campaign.freeze, FEWEST_NODES, MOST_NODES),
    "connections are cut": (Campaign.cut_connections, FEWEST_NODES, MOST_NODES),
    "a node joins": (Campaign.join, FEWEST_NODES, MOST_NODES - 1),
    "a node is drained": (Campaign.drain, FEWEST_NODES + 1, MOST_NODES),
    "two at once": (Campaign.two_at_once, 3, MOST_NODES),
    "one more while the group is made": (Campaign.while_the_group_is_made, 3, MOST_NODES),
    "one more between parked and join": (Campaign.between_parked_and_join, 3, MOST_NODES),
    "a node is killed while Redis is away": (Campaign.kill_node_without_redis, FEWEST_NODES, MOST_NODES),
    "Redis away while parked": (Campaign.redis_away_while_parked, FEWEST_NODES, MOST_NODES),
}
PLANNED: Final = ("a node joins", "a node is drained")


@pytest.mark.fault(
    "random faults, one after the other, of workers, agents, nodes, connections and Redis; some at once",
    "surviving workers keep their processes, and lose no step; the job ends as one in one process",
)
@pytest.mark.long
@pytest.mark.timeout(300 + 60 * FAULTS)
def test_random_faults(own_server: RedisServer, tmp_path: Path) -> None:
    dice = Random(SEED)
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    struck: defaultdict[str, int] = defaultdict(int)
    while (done := sum(struck.values())) < FAULTS:
        nodes, nproc = f"1:{MOST_NODES}", dice.choice((1, 2))
        with SurvivingJob(own_server, tmp_path / f"after-{done}", nodes, nproc=nproc, conf=CONF) as job:
            campaign = Campaign(job, dice, own_server)
            for _ in range(min(FAULTS_PER_JOB, FAULTS - done)):
                kind, recovered = campaign.strike()
                struck[kind] += 1
                seconds[kind] += [] if recovered is None else [recovered]
            campaign.end()
        for kind, number in struck.items():
            known = seconds[kind]
            job.note(f"{number:4} {kind}: {statistics.median(known):.2f} s" if known else f"{number:4} {kind}")
