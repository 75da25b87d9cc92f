"""How a job ends: nothing is called finished that is not, and what has finished does not leave the others alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

from redelastic.agent import AgentOptions, RedisElasticAgent, regrouping
from redelastic.agent.regrouping import RegroupingAgent
from redelastic.monitoring.control import RunControl
from redelastic.monitoring.events import Closed, Completed, Left
from redelastic.redis.connection import Connection
from redelastic.redis.keys import RunKeys
from redelastic.rendezvous.handler import RedisRendezvousHandler
from redelastic.rendezvous.node import DrainedError
from tests.support.commands import until
from tests.support.nodes import NodeFactory

# Each worker leaves a file that names its rank and round, and then does what the test's own lines say.
BEGINS = 'cd "$0"; : > "rank-$RANK-$REDELASTIC_EPOCH"; '


class Site:
    """Nodes in this process, whose workers are shell scripts."""

    def __init__(self, folder: Path, new_node: NodeFactory, control: RunControl, pool: ThreadPoolExecutor) -> None:
        self.folder, self.control = folder, control
        self._new_node, self._pool = new_node, pool
        self.nodes: list[RedisRendezvousHandler] = []

    def start(
        self,
        script: str,
        sizes: tuple[int, int],
        kind: type[RegroupingAgent],
        *,
        max_restarts: int = 3,
        last_call: float = 60,
        **more: Any,
    ) -> Future[RunResult]:
        node = self._new_node(*sizes, keep_alive_interval=0.4, last_call_timeout=last_call)
        self.nodes.append(node)
        spec = WorkerSpec(
            "test", 1, node, entrypoint="sh", args=("-c", BEGINS + script, str(self.folder)), max_restarts=max_restarts
        )
        spec.monitor_interval = 0.05
        agent = kind(spec, DefaultLogsSpecs(str(self.folder / f"logs-{len(self.nodes)}")), **more)
        return self._pool.submit(agent.run)

    def ran(self, rank: int, epoch: int) -> bool:
        return (self.folder / f"rank-{rank}-{epoch}").exists()

    def tell(self, name: str) -> None:
        (self.folder / name).touch()

    def closings(self) -> list[Closed]:
        return [event for event in self.control.events() if isinstance(event, Closed)]


@pytest.fixture
def site(tmp_path: Path, new_node: NodeFactory, connection: Connection, keys: RunKeys) -> Iterator[Site]:
    control = RunControl(connection, keys)
    with ThreadPoolExecutor(4) as pool:
        made = Site(tmp_path, new_node, control, pool)
        yield made
        made.tell("over")  # the agents of a test that has failed may wait for workers, or for nodes
        control.close("by the test", stop=True)


def await_file(name: str) -> str:
    return f"until test -e {name} || test -e over; do sleep 0.02; done; "


@pytest.mark.fault(
    "a worker fails after those of the other nodes have finished", "all run again; none of them is called finished"
)
@pytest.mark.parametrize("kind", [RegroupingAgent, RedisElasticAgent])
def test_what_has_finished_runs_again_with_what_fails_last(site: Site, kind: type[RegroupingAgent]) -> None:
    fails_once = 'test "$RANK" = 0 && exit 0; test -e failed && exit 0; ' + await_file("fail") + ": > failed; exit 3"
    ends = [site.start(fails_once, (2, 2), kind) for _ in range(2)]
    until(lambda: site.ran(0, 1) and site.ran(1, 1), "both run")
    until(lambda: site.control.state().phase == "running", "the round stands")
    site.tell("fail")
    assert [end.result(60).state for end in ends] == [WorkerState.SUCCEEDED] * 2
    assert site.ran(0, 2), "the one that had finished ran again"
    assert site.closings() == []
    for node in site.nodes:
        node.shutdown()
    [closed] = site.closings()
    assert closed.cause == "finished"
    assert closed.epoch == 2


@pytest.mark.fault(
    "a worker fails for good after those of the other nodes have finished", "no node reports success, and none waits"
)
@pytest.mark.parametrize("kind", [RegroupingAgent, RedisElasticAgent])
def test_what_has_finished_fails_with_what_fails_for_good(site: Site, kind: type[RegroupingAgent]) -> None:
    fails = 'test "$RANK" = 0 && exit 0; ' + await_file("fail") + "exit 3"
    ends = [site.start(fails, (2, 2), kind, max_restarts=0) for _ in range(2)]
    until(lambda: site.ran(0, 1) and site.ran(1, 1), "both run")
    until(lambda: site.control.state().phase == "running", "the round stands")
    last = next(i for i, node in enumerate(site.nodes) if node.node.view.round and node.node.view.round.rank == 1)
    site.tell("fail")
    assert ends[last].result(60).state == WorkerState.FAILED
    site.nodes[last].shutdown()  # as torch's launcher does
    with pytest.raises(RendezvousClosedError, match="failed"):
        ends[1 - last].result(60)


@pytest.mark.fault(
    "a drain, at which all ranks save and exit with 0", "the other node is not finished: it goes on in a new round"
)
def test_an_exit_after_a_drain_is_no_finish(site: Site) -> None:
    """As Megatron's exit at SIGTERM: the rank that is asked tells all, and all exit with 0."""
    together = "trap ': > stop; exit 0' TERM; test $REDELASTIC_EPOCH = 1 || exit 0; " + await_file("stop") + "exit 0"
    options = AgentOptions(drain_timeout=0.2)
    ends = [site.start(together, (1, 2), RedisElasticAgent, options=options, shutdown_timeout=5.0) for _ in range(2)]
    until(lambda: site.ran(0, 1) and site.ran(1, 1), "both run")
    leaving, staying = site.nodes
    assert site.control.drain(leaving.node.id, "scancel", 0.2)
    with pytest.raises(DrainedError):
        ends[0].result(60)
    leaving.ending = Left(cause="drained"), "goes on"
    leaving.shutdown()
    assert ends[1].result(60).state == WorkerState.SUCCEEDED
    sizes = [event.size for event in site.control.events() if isinstance(event, Completed)]
    assert sizes == [2, 1], "it went on alone"
    staying.shutdown()


@pytest.mark.fault(
    "a node finishes long before the others", "it waits for as long as they live, or fails at a limit that someone set"
)
@pytest.mark.parametrize(
    ("kind", "variable", "arguments"),
    [
        pytest.param(RegroupingAgent, "0.3", {}, id="torchs agent"),
        pytest.param(RedisElasticAgent, "0.3", {}, id="variable"),
        pytest.param(RedisElasticAgent, "600", {"exit_barrier_timeout": 0.3}, id="argument"),
    ],
)
def test_a_limit_of_the_wait_is_a_failure_that_closes_nothing(
    site: Site,
    kind: type[RegroupingAgent],
    variable: str,
    arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", variable)
    works_on = 'test "$RANK" = 0 && test $REDELASTIC_EPOCH = 1 && exit 0; ' + await_file("finish") + "exit 0"
    ends = [site.start(works_on, (1, 2), kind, **arguments) for _ in range(2)]
    until(lambda: site.ran(0, 1) and site.ran(1, 1), "both run")
    first = next(i for i, node in enumerate(site.nodes) if node.node.view.round and node.node.view.round.rank == 0)
    with pytest.raises(RendezvousTimeoutError, match="stays open for them"):
        ends[first].result(60)
    site.nodes[first].shutdown()
    assert site.closings() == []
    until(lambda: site.ran(0, 2), "the other one goes on alone")
    site.tell("finish")
    assert ends[1 - first].result(60).state == WorkerState.SUCCEEDED


@pytest.mark.parametrize("kind", [RegroupingAgent, RedisElasticAgent])
def test_without_a_limit_a_finished_node_waits_for_days(
    site: Site, kind: type[RegroupingAgent], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", raising=False)
    finished: list[float] = []

    def monotonic() -> float:
        """The first call is that of the node that finishes first: it did so days ago."""
        finished.append(time.monotonic() - (0 if finished else 1e6))
        return finished[-1]

    monkeypatch.setattr(regrouping, "time", SimpleNamespace(monotonic=monotonic))
    works_on = 'test "$RANK" = 0 && exit 0; ' + await_file("finish") + "exit 0"
    ends = [site.start(works_on, (2, 2), kind) for _ in range(2)]
    until(lambda: finished, "rank 0 has finished")
    site.tell("finish")
    assert [end.result(60).state for end in ends] == [WorkerState.SUCCEEDED] * 2
    for node in site.nodes:
        node.shutdown()
    assert [closed.cause for closed in site.closings()] == ["finished"]


def test_a_limit_that_is_no_number_is_refused_before_the_job(
    site: Site, new_node: NodeFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT", "soon")
    spec = WorkerSpec("test", 1, new_node(1, 1), entrypoint="true")
    with pytest.raises(ValueError, match="exit_barrier_timeout must be a number of seconds, 0 or more, not 'soon'"):
        RegroupingAgent(spec, DefaultLogsSpecs(str(site.folder / "logs")))


@pytest.mark.fault("torchrun: one host cannot start its workers", "it leaves; the others' run is not closed")
def test_an_error_of_one_host_closes_nothing(site: Site, tmp_path: Path) -> None:
    going_on = site.start(await_file("finish") + "exit 0", (1, 2), RegroupingAgent, last_call=0)
    until(lambda: site.ran(0, 1), "the first one runs")
    node = site._new_node(1, 2)
    spec = WorkerSpec("test", 1, node, entrypoint=str(tmp_path / "missing"), args=(), max_restarts=3)
    broken = RegroupingAgent(spec, DefaultLogsSpecs(str(tmp_path / "logs-b")))
    with pytest.raises(FileNotFoundError):
        broken.run()
    node.shutdown()  # as torch's launcher does
    assert site.closings() == []
    site.tell("finish")
    assert going_on.result(60).state == WorkerState.SUCCEEDED
