"""Curves: what a run's nodes measured in each of the last minutes, summed up in Redis as they tell it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final, Literal

from .events import decimal_in
from .wording import number

MINUTE: Final = 60.0  # in seconds
MINUTES: Final = 360  # how many are kept
# How the nodes' values become one: the greatest step and the longest idleness; of the others the mean.
MEASURES: Final[Mapping[str, Literal["sum", "max"]]] = {
    "step": "max",
    "idle": "max",
    "memory": "sum",
    "gpu": "sum",
    "gpu_memory": "sum",
}
MAX_POINT: Final = 512  # characters: more is not read


def measured(status: Mapping[str, Any]) -> dict[str, float]:
    """What a node adds to the curves.

    Args:
        status: as in its heartbeat.

    Returns:
        Those that are known of ``step`` and ``idle`` (in seconds) of its workers; ``memory`` of the host, ``gpu`` and
        ``gpu_memory`` that are used, in percent, on average over its GPUs.
    """
    workers, gpus = status.get("workers", ()), status.get("gpus", ())
    idle = (worker.get("idle") for worker in workers if worker.get("state") != "exited")
    total, available = number(status.get("memory_total")), number(status.get("memory_available"))
    shares = ((number(gpu.get("memory_used")), number(gpu.get("memory_total"))) for gpu in gpus)
    found = {
        "step": max(_known(worker.get("step") for worker in workers), default=None),
        "idle": max(_known(idle), default=None),
        "memory": 100 * (1 - available / total) if total and available is not None else None,
        "gpu": _mean(_known(gpu.get("utilization") for gpu in gpus)),
        "gpu_memory": _mean([100 * used / whole for used, whole in shares if whole and used is not None]),
    }
    return {name: value for name, value in found.items() if value is not None}


def _known(values: Iterable[Any]) -> list[float]:
    return [known for value in values if (known := number(value)) is not None]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


class Curves:
    """The curves of one run, read bit by bit.

    Attributes:
        points: by minute since 1970, without the current one: ``speed`` (steps a second since the minute before),
            ``idle``, ``memory``, ``gpu`` and ``gpu_memory``, those that are known.
    """

    def __init__(self) -> None:
        self.points: dict[int, dict[str, float]] = {}
        self._steps: dict[int, tuple[float, float]] = {}  # by minute: the highest step, and when it was reported, in ms
        self._read_until = 0

    def missing(self, now: float) -> range:
        """The minutes to read next.

        Args:
            now: on the server's clock, in seconds.
        """
        current = int(now // MINUTE)
        return range(max(current - MINUTES, self._read_until), current)

    def add(self, minutes: range, texts: Iterable[str]) -> None:
        """Add what Redis holds of these minutes, which :meth:`missing` has named."""
        for minute, text in zip(minutes, texts, strict=True):
            figures, point = _decoded(text), {}
            if step := figures.pop("step", None):
                self._steps[minute] = step
                point = self._speed(minute)
            for name, (value, more) in figures.items():
                if more > 0:
                    point[name] = value / more if MEASURES[name] == "sum" else value
            if point:
                self.points[minute] = point
        self._read_until = minutes.stop
        for known in (self.points, self._steps):
            for minute in [minute for minute in known if minute < minutes.stop - MINUTES]:
                del known[minute]

    def _speed(self, minute: int) -> dict[str, float]:
        if minute - 1 not in self._steps:
            return {}
        (before, then), (step, now) = self._steps[minute - 1], self._steps[minute]
        return {"speed": 1000 * (step - before) / (now - then)} if step >= before and now > then else {}


def _decoded(text: str) -> dict[str, tuple[float, float]]:
    """The figures of a minute: each measure's value, and of how many nodes, or when it was reported."""
    found = {}
    for figure in text[:MAX_POINT].split():
        name, _, words = figure.partition("=")
        value, more = map(decimal_in, words.partition("/")[::2])
        if name in MEASURES and value is not None and more is not None:
            found[name] = value, more
    return found
