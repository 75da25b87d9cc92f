"""Where a job's time went, compared with the times that its script records."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from redelastic.agent.training_time import TrainingTime
from redelastic.monitoring.event_log import EventLog
from redelastic.monitoring.events import Failed, Progressed, Started
from redelastic.monitoring.history import History
from redelastic.redis.server import RedisServer
from tests.support.agent_job import AgentJob
from tests.support.torchrun_job import LONG_LEASES

STEPS: Final = Path(__file__).parents[1] / "support" / "workers" / "steps.py"
FAILS_AFTER, HANGS_AFTER, LAST = 39, 69, 89  # steps of that script
EXACT: Final = 0.01  # in seconds: times are rounded to milliseconds
SLACK: Final = 4.0  # in seconds: how late the agent's report may reach Redis; the script's pauses are longer

pytestmark = pytest.mark.timeout(400)


class SteppingJob(AgentJob):
    """Nodes whose workers run `workers/steps.py`."""

    def run(self, *names: str) -> None:
        self.start(*names, script=STEPS, options=("--hang-timeout=12", "--monitor-interval=0.1"))

    def let_go(self, epoch: int, step: int) -> Progressed:
        """Wait until the run's events show a round at a step, and let it go on."""
        [event] = self.wait(
            f"round {epoch} is reported at step {step}",
            lambda: [e for e in self.events(Progressed) if (e.epoch, e.step) == (epoch, step)],
        )
        self.tell(f"go-{epoch}-{step}")
        return event

    def history(self) -> History:
        event_log = EventLog(self.control)
        event_log.read()
        found = event_log.history(self.control.state())
        assert found is not None
        return found

    def at(self, epoch: int, step: int, what: str = "reports") -> float:
        """The time at which a worker of a round was about to report a step, or had reported it."""
        return min(line.time for line in self.lines(what) if (line.epoch, line.step) == (epoch, step))


def test_the_time_of_a_job_that_fails_and_hangs(server: RedisServer, tmp_path: Path) -> None:
    with SteppingJob(server, tmp_path, "1:1") as job:
        for name in ("faults", "begin-2", "begin-3"):
            job.tell(name)
        job.run("a")
        job.let_go(1, 0)
        assert job.let_go(2, 30).redone
        assert not job.let_go(2, FAILS_AFTER + 1).redone
        assert not job.let_go(3, 70).redone
        assert job.wait_end("a") == 0
        history = job.history()

        assert [event.exit_code for event in job.events(Failed)] == [3, None], "a failure, then a hang"
        [node] = history.nodes
        assert [(span.state, span.epoch) for span in node.spans if span.state != "waiting"] == [
            ("starting", 1),
            ("training", 1),
            ("regrouping", 1),
            ("starting", 2),
            ("redone", 2),
            ("training", 2),
            ("regrouping", 2),
            ("starting", 3),
            ("training", 3),
        ]
        begins: dict[tuple[str, int], float] = {(span.state, span.epoch): span.start for span in node.spans}
        truth = {  # no span may begin earlier
            ("training", 1): job.at(1, 0),
            ("regrouping", 1): job.at(1, FAILS_AFTER),
            ("redone", 2): job.at(2, 30),
            ("training", 2): job.at(2, FAILS_AFTER + 1),
            ("regrouping", 2): job.at(2, HANGS_AFTER),
            ("training", 3): job.at(3, 70),
        }
        for place, at in truth.items():
            assert begins[place] >= at - EXACT, place
        for place, step in ((("regrouping", 1), FAILS_AFTER), (("regrouping", 2), HANGS_AFTER)):
            assert begins[place] <= job.at(place[1], step, "step") + SLACK, place
        trained = sum(span.end - span.start for span in node.spans if span.state == "training")
        assert history.seconds["training"] == pytest.approx(trained)
        assert history.ettr == pytest.approx(trained / (history.end - history.start), abs=0.01)
        assert max(line.step for line in job.lines("step")) == LAST


def test_a_new_rank_0_reports_which_steps_are_redone(server: RedisServer, tmp_path: Path) -> None:
    with SteppingJob(server, tmp_path, "2:2", conf=LONG_LEASES) as job:
        job.run("a", "b")
        job.let_go(1, 0)
        job.wait("there are steps to lose", lambda: [line for line in job.lines("step") if line.step >= 35])
        job.run("c")
        job.wait("node c is a spare", lambda: job.control.state().spares)
        killed, stays = job.by_rank(1)
        killed.kill()
        names = {stays.name, "c"}
        job.wait("both have started", lambda: {e.node[0] for e in job.events(Started) if e.epoch == 2} == names)
        last = max(line.step for line in job.lines("step") if line.node == stays.name)
        job.tell("begin-2")
        first = job.let_go(2, 30)
        assert (first.node[0], first.last_step, first.redone) == ("c", last, True)
        job.tell(f"go-2-{FAILS_AFTER + 1}")
        [new] = job.wait("there are new steps", lambda: [e for e in job.events(Progressed)[1:] if not e.redone])
        assert new.step is not None
        assert new.step > last
        for name in names:
            assert job.wait_end(name) == 0
        history = job.history()
        for node in history.nodes:
            if node.name != killed.name:
                assert [span.state for span in node.spans if span.epoch == 2] == ["starting", "redone", "training"]
        [spans] = [[s for s in node.spans if s.epoch == 1] for node in history.nodes if node.name == stays.name]
        assert [span.state for span in spans] == ["starting", "training", "regrouping"]
        assert spans[1].end >= max(line.time for line in job.lines("reports") if line.epoch == 1) - EXACT - SLACK


def test_it_looks_often_until_the_first_new_step() -> None:
    view: Any = SimpleNamespace(round=object(), broken=None)
    node: Any = SimpleNamespace(id="a", view=view)
    workers: Any = SimpleNamespace(progress_calls=0, highest_step=-1, progress_at=None)
    noted: list[Progressed] = []
    control: Any = SimpleNamespace(last_step=lambda: 7, note=noted.append)
    reports: list[Callable[[], object]] = []
    times = TrainingTime(node, control, reports.append)
    times.begin_round(workers, 0)
    for step in (6, 7, 8, 9):
        workers.progress_calls, workers.highest_step, workers.progress_at = step, step, time.monotonic()
        times.await_step(0)
        while reports:
            reports.pop()()
    assert [(event.step, event.redone) for event in noted] == [(6, True), (8, False)]
    assert times.last_step == 9, "it is asked for, and looked at then"


@pytest.mark.parametrize("is_over", [False, True])
def test_a_round_that_is_over_is_not_reported(is_over: bool) -> None:
    """By then the steps that are known may be of the round after it, so that these would seem to be redone."""
    view: Any = SimpleNamespace(round=object(), broken=None)
    node: Any = SimpleNamespace(id="a", view=view)
    workers: Any = SimpleNamespace(progress_calls=0, highest_step=-1, progress_at=None)
    noted: list[Progressed] = []
    control: Any = SimpleNamespace(last_step=lambda: None, note=noted.append)
    reports: list[Callable[[], object]] = []
    times = TrainingTime(node, control, reports.append)
    times.begin_round(workers, 0)
    workers.progress_calls, workers.highest_step, workers.progress_at = 1, 7, time.monotonic()
    times.look()
    if is_over:
        view.round = object()
    for report in reports:
        report()
    assert [event.step for event in noted] == ([] if is_over else [7])
