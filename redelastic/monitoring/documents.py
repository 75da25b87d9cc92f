"""The types of the JSON documents: what `--json` prints and :class:`redelastic.Run` returns. None means unknown."""

from __future__ import annotations

from typing import TypedDict


class Cause(TypedDict):
    """Why a round is broken or a run closed; with the fields of the event's kind."""

    event: str
    node: str
    fault: bool
    text: str


class Worker(TypedDict):
    """A worker: times in seconds, memory in bytes, CPU in percent of a core."""

    local_rank: int | None
    rank: int | None
    pid: int | None
    state: str | None
    step: int | None
    idle: float | None
    step_time: float | None
    own_time: float | None
    cpu: float | None
    memory: float | None


class Gpu(TypedDict):
    """A GPU: memory in bytes, utilization in percent, temperature in degrees Celsius."""

    index: int | None
    uuid: str | None
    name: str | None
    memory_used: float | None
    memory_total: float | None
    utilization: float | None
    temperature: float | None
    ecc: int | None
    xid: int | None
    xids: dict[str, int]
    lost: bool


class Node(TypedDict):
    """A node; ``standing`` is ``member``, ``candidate`` or ``spare``."""

    id: str
    name: str
    host: str
    pid: int | None
    rank: int | None
    standing: str
    state: str
    draining: str
    heard: float
    lease: float
    agent: str | None
    restarts: int | None
    cpu: float | None
    memory: float | None
    memory_available: float | None
    memory_total: float | None
    step: int | None
    idle: float | None
    shares_logs: bool
    workers: list[Worker]
    gpus: list[Gpu]
    gpus_hidden: str | None
    problems: list[str]


class Other(TypedDict):
    """Another node whose workers failed; ``follows``: they say that a peer is gone, or hang and may wait for one."""

    node: str
    follows: bool
    text: str


class Failure(TypedDict):
    """Why a round failed: see ``redelastic status --help``. The worker's fields are None if none is the cause."""

    epoch: int
    time: float
    cause: str | None
    node: str | None
    local_rank: int | None
    rank: int | None
    pid: int | None
    exit_code: int | None
    signal: str | None
    idle_ms: int | None
    step: int | None
    phase: str | None
    oom_kills: int | None
    memory: int | None
    message: str | None
    log: str
    waits: str
    others: list[Other]
    survived: int
    stopped: int | None
    charged: bool | None
    excluded: bool
    next_epoch: int | None
    down: float | None
    ended: Cause | None
    lines: list[list[str]]


class Event(TypedDict):
    """An event, with the fields of its kind; ``nodes`` are all that it covers, if several."""

    id: str
    time: float
    event: str
    node: str
    epoch: int
    size: int
    nodes: list[str]
    breaks: bool
    fault: bool
    text: str
    detail: str


class Status(TypedDict):
    """A run as it is now.

    ``phase`` is ``running``, ``forming``, ``regrouping``, ``closed``, ``stopped``, ``empty`` or ``dead``.
    """

    run: str
    time: float
    verdict: str
    phase: str
    epoch: int
    size: int
    min_nodes: int | None
    max_nodes: int | None
    age: float | None
    broken: Cause | None
    closed: Cause | None
    stopped: bool
    deadline: float | None
    lease: float
    waits_for: str
    restarts: int
    restarts_without_progress: int
    step: int | None
    idle: float | None
    ettr: float | None
    redone: float | None
    failures: dict[str, int]
    barred: list[str]
    failure: Failure | None
    problems: list[str]
    nodes: list[Node]
    events: list[Event]


class Place(TypedDict):
    """Where a worker writes its log."""

    rank: int
    node: str
    epoch: int
    path: str


class FailedWorker(Place):
    """The worker that failed first; ``tail`` are the last lines of its log."""

    time: float
    tail: str


class Logs(TypedDict):
    """Where the workers of the last round write, and what failed."""

    run: str
    logs: list[Place]
    failed: FailedWorker | None
    failure: Failure | None
