"""The state of runs as documents, which `redelastic status --json` and `list --json` print and the dashboard serves."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from statistics import median_low
from typing import TYPE_CHECKING, Any, Final

from .event_log import without_regrouped
from .events import is_fault, last_step
from .failure import document as failure_document
from .failure import why_failed
from .records import APPLICATION_XIDS
from .sentences import cause, cause_document, consecutive_failures, event_document
from .wording import count, duration, number, whole

if TYPE_CHECKING:
    from .events import Event
    from .history import History
    from .records import Node, Run

EVENTS: Final = 5  # how many of the last events are listed
MISSED: Final = 2 / 3  # of a lease: with the defaults, a node silent for longer has missed a heartbeat
SLOW: Final = 1.3  # times the median: a slow worker's own time of a step
SLOW_SHARE: Final = 0.1  # of the step: by at least so much does it exceed the median
USAGE: Final = ("cpu", "memory", "memory_available", "memory_total")


def phase_of(run: Run) -> str:
    """The run's phase; ``dead`` if all its nodes have been silent for longer than their leases."""
    return run.phase if run.died_at is None else "dead"


def has_failed(run: Run) -> bool:
    """Whether a fault closed it, or all its nodes fell silent."""
    return is_fault(run.closed) or run.died_at is not None


def unread(run_id: str, phase: str) -> dict[str, Any]:
    """The entry in a list of runs for one that cannot be read."""
    unknown = ("failed", "epoch", "size", "members", "candidates", "spares", "age")
    return {"run": run_id, "phase": phase} | dict.fromkeys(unknown)


def summary(run: Run) -> dict[str, Any]:
    """The entry for a run in a list of runs."""
    groups = {name: len(getattr(run, name)) for name in ("members", "candidates", "spares")}
    state = {"phase": phase_of(run), "failed": has_failed(run)}
    return {"run": run.run_id, **state, "epoch": run.epoch, "size": run.size, **groups, "age": run.age}


def describe(run: Run, events: Sequence[Event], now: float, history: History | None = None) -> dict[str, Any]:
    """The document.

    Args:
        run: as it is now.
        events: of the run, oldest first.
        now: in seconds since 1970.
        history: of the run; None if it has no events.
    """
    nodes = [_node(node, run) for node in run.nodes]
    _add_stragglers(nodes)
    workers = [worker for node in nodes for worker in node["workers"]]
    step = max((worker["step"] for worker in workers if worker["step"] is not None), default=None)
    shown = step if run.is_alive else _highest_step(run, step, events)
    idle = min((worker["idle"] for worker in workers if worker["idle"] is not None), default=None)
    useless = run.idle if step is None or step < run.progress else 0
    return {
        "run": run.run_id,
        "time": now,
        "verdict": _verdict(run, shown, idle),
        "phase": phase_of(run),
        **{name: getattr(run, name) for name in ("epoch", "size", "min_nodes", "max_nodes", "age")},
        "broken": cause_document(run.broken),
        "closed": cause_document(run.closed),
        **{name: getattr(run, name) for name in ("stopped", "deadline", "lease", "waits_for", "restarts")},
        "restarts_without_progress": useless,
        "step": shown,
        "idle": idle,
        "ettr": history.ettr if history else None,
        "redone": history.redone if history else None,
        "failures": dict(run.failures),
        "barred": list(run.barred),
        # Of the last round, or the one before: a failure that later rounds have outlived is history.
        "failure": failure_document(why_failed(run, events, run.epoch - 1)),
        "problems": _problems(run, useless),
        "nodes": nodes,
        "events": [event_document(event) for event in without_regrouped(events)[-EVENTS:]],
    }


def _highest_step(run: Run, reported: int | None, events: Sequence[Event]) -> int | None:
    """The highest step known of a run, whose nodes' statuses may have expired.

    Args:
        run: its record knows of the rounds before the last failure.
        reported: the highest step in the statuses that are left.
        events: of the run.
    """
    known = (reported, run.progress - 1 if run.progress else None, last_step(events))
    return max((step for step in known if step is not None), default=None)


def _verdict(run: Run, step: int | None, idle: float | None) -> str:
    phase = phase_of(run)
    here = f"{count(len(run.nodes), 'node')} {'is' if len(run.nodes) == 1 else 'are'} still there"
    if phase in {"closed", "stopped"}:
        return f"{phase}: {cause(run.closed)}" + (f"; {here}" if run.nodes else "")
    if phase == "dead":
        silence = duration(min(node.silence for node in run.nodes))
        return f"dead: no heartbeat for {silence}, longer than the lease of {run.lease:g} s"
    if phase == "running":
        words = [f"running: round {run.epoch}", count(run.size, "node")]
        if run.age is not None:
            words.append(f"up {duration(run.age)}")
        if step is not None:
            words.append(f"step {step}")
        if idle is not None:
            words.append(f"last progress {duration(idle)} ago")
        return ", ".join(words)
    if phase == "regrouping":
        return f"regrouping: round {run.epoch} is broken: {cause(run.broken)}"
    if phase == "forming":
        over = f": round {run.epoch} is over: {cause(run.broken)}" if run.broken else ""
        return f"forming round {run.epoch + 1}{over}"
    return f"empty: no nodes in the run; its last round was {run.epoch}"


def _problems(run: Run, idle: int) -> list[str]:
    """What is wrong with the run, beyond what its verdict says."""
    found = [
        f"host {name} is excluded: {consecutive_failures(run.failures[name])}; "
        f"`redelastic readmit {run.run_id} {name}` readmits it"
        for name in run.barred
    ]
    if idle and not run.closed:
        found.append(f"the last {'restart' if idle == 1 else f'{idle} restarts'} made no progress")
    return found


def _node(node: Node, run: Run) -> dict[str, Any]:
    status = node.status
    workers = [_worker(worker) for worker in node.workers]
    gpus = [_gpu(gpu) for gpu in node.gpus]
    steps = [worker["step"] for worker in workers if worker["step"] is not None]
    idle = [worker["idle"] for worker in workers if worker["idle"] is not None and worker["state"] != "exited"]
    agent = status.get("agent")
    return {
        "id": node.id,
        "name": node.name,
        "host": status["host"],
        "pid": whole(status.get("pid")),
        "rank": node.rank,
        "standing": node.standing,
        "state": _state(node),
        "draining": node.draining,
        "heard": max(0.0, node.silence),
        "lease": node.lease,
        "agent": agent if isinstance(agent, str) else None,
        "restarts": whole(status.get("restarts")),
        **{name: number(status.get(name)) for name in USAGE},
        "step": min(steps, default=None),
        "idle": max(idle, default=None),
        "shares_logs": status.get("shares_logs") is True,
        "workers": workers,
        "gpus": gpus,
        "gpus_hidden": hidden[:100] if isinstance(hidden := status.get("gpus_hidden"), str) else None,
        "problems": _node_problems(node, run, workers, gpus),
    }


def _state(node: Node) -> str:
    """The node's state, in one word."""
    if node.lease <= 0:
        return "silent"
    if node.draining:
        return "draining"
    reported = str(node.status["state"])
    if reported not in {"", "running", "waiting", "parked"}:
        return reported
    waiting = "parked" if reported == "parked" else "waiting"
    return {"member": "running", "spare": "spare"}.get(node.standing, waiting)  # the reported state may be outdated


def _worker(status: Mapping[str, Any]) -> dict[str, Any]:
    state = status.get("state")
    counts = {name: whole(status.get(name)) for name in ("local_rank", "rank", "pid")}
    measures = {name: number(status.get(name)) for name in ("idle", "step_time", "own_time", "cpu", "memory")}
    return counts | {"state": state if isinstance(state, str) else None, "step": whole(status.get("step"))} | measures


def _gpu(status: Mapping[str, Any]) -> dict[str, Any]:
    words = {name: word if isinstance(word := status.get(name), str) else None for name in ("uuid", "name")}
    measures = ("memory_used", "memory_total", "utilization", "temperature")
    return (
        {"index": whole(status.get("index"))}
        | words
        | {name: number(status.get(name)) for name in measures}
        | {name: whole(status.get(name)) for name in ("ecc", "xid")}
        | {"xids": _xids(status.get("xids"))}
        | {"lost": status.get("lost") is True}
    )


def _xids(counts: object) -> dict[str, int]:
    """How often each Xid error occurred, by number."""
    pairs = counts.items() if isinstance(counts, dict) else ()
    return {xid: n for xid, n in pairs if re.fullmatch("[0-9]{1,4}", str(xid)) and whole(n)}


def _node_problems(
    node: Node, run: Run, workers: Sequence[Mapping[str, Any]], gpus: Sequence[Mapping[str, Any]]
) -> list[str]:
    found = []
    if node.lease <= 0:
        found.append(f"silent for {duration(node.silence)}: its lease has expired, and no other node has noticed yet")
    elif node.silence > MISSED * run.lease > 0:
        found.append(f"silent for {duration(node.silence)}: its lease expires in {duration(node.lease)}")
    if hung := [worker for worker in workers if worker["state"] == "hung"]:
        first, *others = hung
        at = "" if first["step"] is None else f" at step {first['step']}"
        since = "" if first["idle"] is None else f" for {duration(first['idle'])}"
        more = f", and {count(len(others), 'more worker')}" if others else ""
        found.append(f"{_worker_name(first)} hangs{at}{since}{more}")
    for gpu in gpus:
        which = "a GPU" if gpu["index"] is None else f"GPU {gpu['index']}"
        if gpu["lost"]:
            found.append(f"{which} has fallen off the bus")
        errors = [count(gpu["ecc"], "ECC error")] if gpu["ecc"] else []
        if gpu["xid"]:
            numbers = ", ".join(xid for xid in gpu["xids"] if int(xid) not in APPLICATION_XIDS)
            errors.append(count(gpu["xid"], "Xid error") + (f" ({numbers})" if numbers else ""))
        if errors:
            found.append(f"{which} has {' and '.join(errors)}")
    if failures := run.failures.get(node.name, 0):
        found.append(consecutive_failures(failures))
    return found


def _add_stragglers(nodes: Sequence[Mapping[str, Any]]) -> None:
    """Name the workers whose own time of a step is well above that of the others."""
    known = [
        (node, worker) for node in nodes for worker in node["workers"] if worker["own_time"] and worker["step_time"]
    ]
    if len(known) < 2:
        return
    median = median_low(worker["own_time"] for _, worker in known)
    for node, worker in known:
        own, step = worker["own_time"], worker["step_time"]
        if own > SLOW * median and own - median > SLOW_SHARE * step:
            node["problems"].append(
                f"{_worker_name(worker)} is slow: of each step it spends {_ms(own)} outside collectives; the median is "
                f"{_ms(median)}"
            )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _worker_name(worker: Mapping[str, Any]) -> str:
    name = "a worker" if worker["local_rank"] is None else f"worker {worker['local_rank']}"
    return name + ("" if worker["rank"] is None else f" (rank {worker['rank']})")
