"""How a preflight measures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
