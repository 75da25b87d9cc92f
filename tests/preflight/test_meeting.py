"""The exchange of a preflight: no host leads it, and a silent host costs the others one time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from redelastic.preflight.meeting import GRACE, Meeting
from redelastic.preflight.schedule import Step
from redelastic.redis.server import RedisServer
from redelastic.store import RedisStore

OWN = {"compute": 1.0}
LINK = {"send": 1.0, "latency": 1.0}
ALL = {"seconds": 1.0, "bandwidth": 1.0}
FOUND = {"own": OWN, "pairs": LINK, "group": ALL}


@pytest.fixture
def meet(server: RedisServer, run_id: str) -> Iterator[Callable[[int], list[Meeting]]]:
    with contextlib.ExitStack() as opened:

        def make(hosts: int) -> list[Meeting]:
            def store() -> RedisStore:
                return opened.enter_context(contextlib.closing(RedisStore(server.url, run_id, timeout=60)))

            return [Meeting(store(), host, f"vm-{host}", hosts) for host in range(hosts)]

        yield make


def later() -> float:
    return time.monotonic() + 60


def over() -> float:
    """A deadline that has passed, its grace too."""
    return time.monotonic() - GRACE


def go_through(meeting: Meeting, step: Step | None) -> list[Step]:
    steps = []
    while step is not None:
        steps.append(step)
        step = meeting.report(FOUND[step.kind], later())
    return steps


def concluded(steps: list[Step], names: list[str]) -> dict[str, Any]:
    return {"names": names, "reports": [sorted(step.reports) for step in steps]}


def test_all_go_through_the_same_steps_and_one_concludes(
    meet: Callable[[int], list[Meeting]], pool: ThreadPoolExecutor
) -> None:
    def whole(meeting: Meeting) -> tuple[list[Step], tuple[dict[str, Any], bool]]:
        steps = go_through(meeting, meeting.first())
        return steps, meeting.agree(concluded)

    ended = list(pool.map(whole, meet(5)))
    assert [step.kind for step in ended[0][0]] == ["own", "pairs", "pairs", "pairs", "group"]
    assert all(steps == ended[0][0] for steps, _ in ended)
    [document] = [document for _, (document, is_own) in ended if is_own]
    assert all(found == document for _, (found, _) in ended)
    assert document["names"] == [f"vm-{host}" for host in range(5)]
    assert document["reports"][0] == document["reports"][-1] == [0, 1, 2, 3, 4]


def test_a_silent_host_is_left_out_and_follows_when_it_comes_back(
    meet: Callable[[int], list[Meeting]], pool: ThreadPoolExecutor
) -> None:
    first, second, hung = meet(3)
    for meeting in (first, second, hung):
        meeting.first()
    waiting = pool.submit(first.report, OWN, later())
    while not any(step.reports for step in second.reported()):
        time.sleep(0.01)
    step = second.report(OWN, over())
    assert step == waiting.result(60)
    assert step is not None
    assert step.pairs == ((0, 1),)
    others = [pool.submit(go_through, meeting, step) for meeting in (first, second)]
    assert [[step.kind for step in one.result(60)] for one in others] == [["pairs", "group"]] * 2
    assert [step.kind for step in go_through(hung, hung.report(OWN, over()))] == ["pairs", "group"]
    assert hung.agree(concluded)[0] == first.agree(concluded)[0]


def test_a_host_that_decides_and_dies_is_replaced(meet: Callable[[int], list[Meeting]]) -> None:
    """The last to report may die before it publishes the next step, or the conclusion."""
    first, second = meet(2)
    first.first()
    second.first()
    assert first.report(OWN, over()) is None  # a host alone has no link and no group
    assert second.report(OWN, over()) is None
    document = {"names": ["vm-0", "vm-1"], "reports": [[0, 1]], "by": 1}
    assert second.agree(concluded) == (document, True)
    assert first.agree(concluded) == (document, False)
