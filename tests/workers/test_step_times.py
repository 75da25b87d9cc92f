"""How long a worker works for a step: from what it reported over a minute."""

from __future__ import annotations

from redelastic.workers.board import WINDOW, Progress, StepTimer, StepTimes


def progress(calls: int, looks: int, waits: int) -> Progress:
    return Progress(1, calls, calls, 0.0, False, False, 0, 0, None, "", looks, waits)


def timed(seconds: int, *, steps: float, waits: float) -> StepTimes | None:
    """The times after so many seconds, with steps and waits for a second each, at ten looks a second."""
    timer = StepTimer()
    for now in range(seconds + 1):
        timer.look(float(now), progress(int(steps * now), 10 * now, int(10 * waits * now)))
    return timer.times


def test_the_time_of_a_step_is_split_by_the_looks() -> None:
    assert timed(90, steps=2, waits=0.25) == StepTimes(0.5, 0.375)


def test_nothing_is_known_before_a_minute_or_without_steps_or_collectives() -> None:
    assert timed(int(WINDOW) - 1, steps=2, waits=0.5) is None
    assert timed(90, steps=0.01, waits=0.5) is None
    assert timed(90, steps=2, waits=0) is None


def test_only_the_last_minute_counts() -> None:
    timer = StepTimer()
    waits = 0
    for now in range(300):
        waits += 8 if now < 200 else 2
        timer.look(float(now), progress(now, 10 * now, waits))
    times = timer.times
    assert times is not None
    assert abs(times.own - 0.8) < 0.01
