"""What a preflight measures, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple


class Measure(NamedTuple):
    """One measure.

    Attributes:
        unit: of its values.
        higher_is_better: whether a higher value is better.
        factor: by which an outlier is worse than the median.
        margin: by which it is worse at least, in units.
        what: is measured, in words.
    """

    unit: str
    higher_is_better: bool
    factor: float
    margin: float
    what: str


# Latency and disks differ more than other values between hosts in good order.
MEASURES: Final = {
    "compute": Measure("GFLOP/s", True, 1.5, 0.0, "matrix products, for a second"),
    "memory": Measure("GB/s", True, 1.5, 0.0, "a copy of 64 MiB in memory, again and again for half a second"),
    "write": Measure("MB/s", True, 3.0, 0.0, "64 MiB written to a file of the folder, and synced"),
    "send": Measure("Gbit/s", True, 2.0, 0.0, "sent to another host"),
    "receive": Measure("Gbit/s", True, 2.0, 0.0, "received from another host"),
    "latency": Measure("ms", False, 3.0, 0.5, "a round trip to another host, the fastest of 20"),
}
OF_LINKS: Final = ("send", "receive", "latency")


def measure_of(name: str) -> Measure:
    """The measure of that name; a folder may follow a colon, as in ``write:/checkpoints``.

    Raises:
        KeyError: there is none.
    """
    return MEASURES[name.partition(":")[0]]


def shown(name: str, value: float | None) -> str:
    """A value for people, with its unit."""
    return "?" if value is None else f"{value:.3g} {measure_of(name).unit}"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a preflight measures; all hosts need the same.

    Attributes:
        timeout: time limit of each measure, in seconds.
        folders: in which files are written.
        backend: of the links: ``gloo`` (CPU) or ``nccl`` (GPUs).
        size: of the tensor of the all-reduce, in bytes.
        required: the worst value allowed, by measure.
        exclude: whether outliers are kept out of the job until they are readmitted.
    """

    timeout: float = 30.0
    folders: tuple[str, ...] = ()
    backend: str = "gloo"
    size: int = 64 << 20
    required: Mapping[str, float] = field(default_factory=dict)
    exclude: bool = False
