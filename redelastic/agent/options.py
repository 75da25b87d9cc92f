"""The agent's options beyond torchrun's."""

from __future__ import annotations

import logging
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from redelastic.monitoring.events import EXCLUDED

log = logging.getLogger(__name__)

MAX_IDLE_RESTARTS: Final = 20  # after as many restarts in a row without progress, another one would bring none either
START_TIMEOUT: Final = 1800.0  # a large model may take this long to load and compile, in seconds
TORCH_HEALTH_PORT: Final = "TORCHELASTIC_HEALTH_CHECK_PORT"


@dataclass(frozen=True, kw_only=True)
class AgentOptions:
    """Options of :class:`redelastic.agent.RedisElasticAgent`; times in seconds, None means "no limit" or "off".

    Attributes:
        drain_timeout: how long the workers of the job may take to save before this node leaves.
        drain_file: this node drains as soon as this file exists; it may contain a Unix time as the deadline.
        hang_timeout: how long a worker that has reported progress may go without reporting more before all workers are
            restarted. Every rank must call :func:`redelastic.progress`; a worker that never has is not restarted.
        hang_start_timeout: the same from a worker's start to its first report; None: 30 minutes, or ``hang_timeout`` if
            that is longer. After that, a worker that reported in an earlier round of this agent counts as hanging; for
            one that never has, the agent logs a warning with its stacks.
        max_job_restarts: how often the workers of the whole job may be restarted after failures.
        max_idle_restarts: the job is stopped after this many consecutive restarts in which no worker has reported a
            higher step than before. A job whose workers report no steps is not.
        max_failed_rounds: this host is excluded after this many consecutive rounds in which its workers failed first.
        exclude: whether this host is excluded, too, when a preflight has found it to be an outlier.
        health_checks: names of the checks that this node must pass before it joins.
        health_command: a further check, a command for ``/bin/sh -c``.
        health_timeout: how long one check may take.
        health_port: port of the HTTP endpoint; 0: any free one, None: ``TORCHELASTIC_HEALTH_CHECK_PORT``.
        health_host: address that the HTTP endpoint listens on.
        share_gpus: whether several workers may share one GPU when there are more workers than GPUs.
        share_logs: whether people may see the ends of the workers' logs by Redis.
        survive: whether workers live on from one round to the next: their script calls :func:`redelastic.survive`.
        park_timeout: how long such a worker may take to leave a round before this node's workers are started anew.
        preload: modules for a template process to import, from which workers are forked; see ``workers/template.py``.

    Raises:
        ValueError: an option is out of range.
    """

    drain_timeout: float = 30.0
    drain_file: Path | None = None
    hang_timeout: float | None = None
    hang_start_timeout: float | None = None
    max_job_restarts: int | None = None
    max_idle_restarts: int | None = MAX_IDLE_RESTARTS
    max_failed_rounds: int | None = None
    exclude: bool = False
    health_checks: tuple[str, ...] = ("disk",)
    health_command: str | None = None
    health_timeout: float = 60.0
    health_port: int | None = None
    health_host: str = "127.0.0.1"
    share_gpus: bool = False
    share_logs: bool = False
    survive: bool = False
    park_timeout: float = 10.0
    preload: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lowest = {
            "drain_timeout": 0.0,
            "hang_timeout": 0.1,
            "hang_start_timeout": 0.1,
            "max_job_restarts": 0,
            "max_idle_restarts": 1,
            "max_failed_rounds": 1,
            "health_timeout": 0.1,
            "park_timeout": 0.1,
        }
        for name, low in lowest.items():
            value = getattr(self, name)
            if value is not None and not low <= value < math.inf:
                raise ValueError(f"{name}={value} is out of range: it must be {low:g} or more.")
        for name in self.preload:
            if not all(part.isidentifier() for part in name.split(".")):
                raise ValueError(f"preload={name!r} is not a module name.")
        if self.hang_start_timeout is not None and self.hang_timeout is None:
            raise ValueError("hang_start_timeout needs hang_timeout.")

    @property
    def start_timeout(self) -> float:
        """How long a worker may take to report its first progress, in seconds; infinite without hang detection."""
        if self.hang_timeout is None:
            return math.inf
        return max(START_TIMEOUT, self.hang_timeout) if self.hang_start_timeout is None else self.hang_start_timeout

    @property
    def port(self) -> int | None:
        """Port of the HTTP endpoint; None: no endpoint. A wrong port in torch's variable is a warning, as in torch."""
        named = os.environ.get(TORCH_HEALTH_PORT)
        if self.health_port is not None or named is None:
            return self.health_port
        if re.fullmatch("[0-9]{1,5}", named) and int(named) < 2**16:
            return int(named)
        log.warning("%s=%r is not a port: this node serves no health endpoint.", TORCH_HEALTH_PORT, named[:80])
        return None

    @property
    def failed_rounds_limit(self) -> int | None:
        """The count of failures from which on this host is excluded; None: it never is."""
        return EXCLUDED if self.max_failed_rounds is None and self.exclude else self.max_failed_rounds

    @property
    def limits(self) -> tuple[int, int, int]:
        """Restart limits, as :meth:`redelastic.rendezvous.node.Node.charge` takes them."""
        limits = (self.max_job_restarts, self.max_idle_restarts, self.failed_rounds_limit)
        restarts, idle_restarts, rounds = (-1 if limit is None else limit for limit in limits)
        return restarts, idle_restarts, rounds
