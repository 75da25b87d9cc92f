"""Events and answers to requests as sentences, nowhere else; and events as JSON."""

from __future__ import annotations

import time
from dataclasses import asdict
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Final

from . import events
from .collectives import explain
from .wording import count, duration, few, known

if TYPE_CHECKING:
    from .operator import Closing, Drain, Saves

NAMES: Final = 4  # how many nodes of a merged event are named

_BECAUSE: Final = {
    "max_nodes": "max_nodes joined",
    "all_joined": "every live node joined",
    "last_call": "last_call_timeout passed",
    "replacement": "replacement_timeout passed",
}
# Of kinds whose fields say no more; a reason is the sentence of others.
_ALWAYS: Final = {
    "joined": "is new",
    "restored": "the server had forgotten this round",
}
_AS_CAUSES: Final = {"joined": "waits to join", "regrouped": "regroups"}
_CONFLICT: Final = "holds another round of the same epoch"
_NONE_TO_ASK: Final = "nothing: no worker could be asked to"
UNWATCHED: Final = "Not restarted: a script that does not report looks like one that hangs. Call it on every rank"
_DEPARTURES: Final = {
    "finished": "finished",
    "failed": "failed",
    "drained": "drained",
    "refused": "failed a health check",
    "barred": "is excluded",
    "closed": "the run is closed",
    "timeout": "gave up waiting",
    "replicas": "gave up waiting for replicas",
    "anew": "starts anew",
    "restarts": "starts its workers anew",
    "group": "makes another process group",
    "exited": "exited",
    "secret": "does not have the others' join secret",
}


@singledispatch
def sentence(event: events.Event) -> str:
    """What happened, worded to follow the name of the event's node; empty for a kind that is not known here."""
    return _ALWAYS.get(event.event) or str(getattr(event, "reason", ""))


@sentence.register
def _(event: events.Completed) -> str:
    return _BECAUSE.get(event.because, "")


@sentence.register
def _(event: events.Lost) -> str:
    silence = "" if event.silent_ms is None else _seconds(event.silent_ms)  # of a merged event only one is known
    if event.cause == "roll_call":
        return f"did not answer the roll call of {event.asked_by}" + (f" within {silence}" if silence else "")
    return _CONFLICT if event.cause == "conflict" else "lost its lease" + (f" after {silence}" if silence else "")


@sentence.register
def _(event: events.Left) -> str:
    if event.cause == "signal":
        return f"got {event.signal}"
    more = event.reason or (worker_failure(event) if event.cause == "failed" else "")
    return _DEPARTURES.get(event.cause, "left") + (f": {more}" if more else "")


@sentence.register
def _(event: events.Hung) -> str:
    others = (event.hung or 1) - 1
    also = f", and {others} of its other workers hang{'s' * (others == 1)}" if others else ""
    return worker_failure(event) + also


@sentence.register
def _(event: events.Collectives) -> str:
    return explain(event.last)


@sentence.register
def _(event: events.Closed) -> str:
    """Worded to follow the name of the node that finished or failed."""
    failure = f"{event.node}: {worker_failure(event)}"
    match event.cause:
        case "finished":
            return "finished"
        case "failed":
            return f"failed: {worker_failure(event)}"
        case "restarts":
            return f"the job has used up its {count(event.restarts or 0, 'restart')}: {failure}"
        case "progress":
            place = "no step was reported" if event.last_step is None else f"still at step {event.last_step}"
            return f"no progress in {count(event.restarts or 0, 'restart')}, {place}: {failure}"
        case _:
            return event.reason or (f"by {event.node}" if event.node else "")


@sentence.register
def _(event: events.RollCall) -> str:
    took = (event.took_ms or 0) / 1000
    return f"{count(event.answers or 0, 'node')} answered the roll call within {took:.3f} s: none is lost"


@sentence.register
def _(event: events.Outage) -> str:
    if event.back_ms is not None:
        return f"the server's clock went back by {_seconds(event.back_ms)}: every lease starts anew"
    return f"no heartbeat for {_seconds(event.away_ms)}: every lease starts anew"


@sentence.register
def _(event: events.Regrouped) -> str:
    return "parks its workers until the next round" if event.parked else "waits for the next round"


@sentence.register
def _(event: events.Missing) -> str:
    return f"{count(event.missing or 0, 'node')} of this round did not come back after the server forgot it"


@sentence.register
def _(event: events.Cleared) -> str:
    return f"the stream {event.stream or '?'} was full: something had written the largest id. Its entries are lost"


@sentence.register
def _(event: events.Started) -> str:
    if event.rank is None:
        return ""
    return f"rank {event.rank} of {event.size}{', in the same processes' if event.survived else ''}"


@sentence.register
def _(event: events.Launched) -> str:
    return f"{event.user}: {event.command}"


@sentence.register
def _(event: events.Progressed) -> str:
    if event.redone:
        return f"its workers make steps again: step {event.step}; an earlier round had come to step {event.last_step}"
    return f"its workers make new steps: step {known(event.step)}"


@sentence.register
def _(event: events.Save) -> str:
    if event.timeout_ms is None:
        return "waits to be let in until the workers have saved by themselves"
    waits = f"waits to be let in until the workers have saved, for up to {_seconds(event.timeout_ms)}"
    return waits if event.node else event.reason


@sentence.register
def _(event: events.Admitted) -> str:
    return "is let in: " + ("all workers have saved" if event.saved else "not all workers have saved")


@sentence.register
def _(event: events.Saved) -> str:
    if not event.drains:
        return _NONE_TO_ASK if event.asked == 0 else "not in time" if event.late else "in time"
    first, *others = event.drains
    draining = f"{first} and {len(others)} more, which drain" if others else f"{first}, which drains"
    if event.asked == 0:
        return f"{_NONE_TO_ASK}, for {draining}"
    return f"{'not in time ' if event.late else ''}for {draining}"


@sentence.register
def _(event: events.Unwatched) -> str:
    ranks = f"rank{'s' * (len(event.ranks) > 1)} {', '.join(event.ranks)}"
    since = f"in the {_seconds(event.waited_ms)} since the start"
    return f"never called redelastic.progress() {since}: {ranks}. {UNWATCHED}"


@sentence.register
def _(event: events.Log) -> str:
    if event.rank is None:
        return ""
    failed_at = "" if event.age_ms is None else f" failed at {_time_of_day(event.time - event.age_ms / 1000)};"
    return f"rank {event.rank}{failed_at or ','} its log: {event.path}"


@sentence.register
def _(event: events.Barred) -> str:
    return f"its host is excluded: {consecutive_failures(event.failures or 0)}"


@sentence.register
def _(event: events.Unreached) -> str:
    return (
        f"rank 0, node {event.master}, announced itself at {event.address}, but from {event.seen_from} it cannot be "
        f"reached: {event.reason}. If that is the wrong address, set its address or interface there with --local-addr; "
        "otherwise check for a firewall between the hosts"
    )


@sentence.register
def _(event: events.Preflight) -> str:
    outliers = event.outliers
    found = f"{count(len(outliers), 'outlier')}: {few(outliers, NAMES)}" if outliers else "no outlier"
    return f"{count(event.hosts or 0, 'host')}, {found}" + (", excluded until readmitted" if event.excluded else "")


@sentence.register
def _(event: events.Outlier) -> str:
    if event.value is None:
        return f"{event.measure}: {event.reason}"
    beside = "median" if event.required is None else "required"
    other = event.median if event.required is None else event.required
    return f"{event.measure} {event.value:.3g} {event.unit}, {beside} {'?' if other is None else f'{other:.3g}'}"


def cause(event: events.Event | None) -> str:
    """Why a round is broken or a run closed: what happened, and to which node."""
    if event is None:
        return ""
    words = _AS_CAUSES.get(event.event) or sentence(event)
    node = "" if isinstance(event, events.Closed) and event.cause not in {"finished", "failed"} else event.node
    return " ".join(part for part in (node, words) if part) or "no reason given"


@sentence.register(events.Failed)
def worker_failure(event: events.WorkerFailure) -> str:
    """What happened to the worker that failed first on a node."""
    worker = f"worker {known(event.local_rank)} (rank {known(event.rank)}, pid {known(event.pid)})"
    if event.idle_ms is not None:
        return f"{worker} {idleness(event)}"
    if event.oom_kills:
        return f"{worker} {out_of_memory(event)}"
    message = f": {event.message}" if event.message else ""
    if event.signal:
        return f"{worker} was ended by {event.signal}{message}"
    if event.exit_code is not None:
        return f"{worker} exited with {event.exit_code}{message}"
    return f"{worker} {event.message}" if event.local_rank is not None else event.message or "its workers failed"


def idleness(event: events.WorkerFailure) -> str:
    """How a worker hangs; worded to follow its name."""
    since = "since its start" if event.step is None else f"since step {event.step}"
    phase = f", in phase {event.phase!r}" if event.phase else ""
    return f"made no progress for {_seconds(event.idle_ms)}, {since}{phase}"


def out_of_memory(event: events.WorkerFailure) -> str:
    """How the kernel's OOM killer ended a worker; worded to follow its name."""
    seen = f"; it used {event.memory / 2**30:.1f} GiB when last seen" if event.memory else ""
    kills = f"{count(event.oom_kills or 0, 'kill')} since the start"
    return f"was killed for lack of memory, by the kernel's OOM killer ({kills}){seen}"


def consecutive_failures(failures: int) -> str:
    """Why a host is excluded."""
    if failures >= events.EXCLUDED:
        return "a preflight has found it to be an outlier"
    rounds = "1 round" if failures == 1 else f"{failures} consecutive rounds"
    return f"its workers failed first in {rounds}"


# -- what became of a request to a run


def drain_answer(asked: Drain) -> str:
    """What became of a request to a node to drain."""
    node = asked.node
    if not asked.can_drain:
        where = node.status["host"]
        return (
            f"Node {node.id} does not run under `redelastic run`, so it cannot drain: send SIGTERM to its torchrun"
            + (f", process {node.status.get('pid')} on {where}." if where else ".")
        )
    if not asked.asked:
        return f"Node {node.id} left before it could be asked."
    if node.draining:
        return f"Node {node.id} is already draining, {node.draining}: nothing changes."
    return f"Node {node.id} was asked to drain: workers have {asked.timeout:g} s to save."


def save_answer(saves: Saves) -> str:
    """What became of a request to save, without an end mark."""
    parts = [f"the workers of {count(saves.saved, 'node')} have saved"] if saves.saved else []
    if saves.unsaved:
        parts.append(f"those of rank {few(saves.unsaved, 8)} have not within {duration(saves.seconds)}")
    if saves.unasked:
        parts.append(f"on {count(saves.unasked, 'node')} no worker could be asked: none calls should_checkpoint()")
    return "; ".join(parts) or "no node trains that could be asked to save"


def close_answer(run_id: str, closing: Closing) -> str:
    """What became of a request to close a run."""
    said = f"was already closed ({cause(closing.why)})" if closing.before else "is closed"
    then = "its nodes end their workers." if closing.stopped else "no new round; running workers may finish."
    saved = f" Before, {save_answer(closing.saves)}." if closing.saves else ""
    return f"Run {run_id!r} {said}: {then}{saved}"


# -- for documents


def reason_of(event: events.Event) -> str:
    """Why an event happened; for many nodes also how many, and a few of their names."""
    others = [node for node in event.nodes if node != event.node]
    if not others:
        return sentence(event)
    return f"{sentence(event)} (and {count(len(others), 'more node')}: {few(others, NAMES)})"


def detail_of(event: events.Event) -> str:
    """What an event has beyond its sentence: stacks, the last lines of a log, where logs are; may have many lines."""
    match event:
        case events.Hung() | events.Unwatched():
            return event.stacks
        case events.Log():
            return event.lines
        case events.Started():
            return "\n".join(f"rank {rank}: {path}" for rank, path in sorted(event.logs.items()))
        case _:
            return ""


def event_document(event: events.Event) -> dict[str, Any]:
    """An event as JSON: its fields; ``fault``; ``text``, what happened in words; ``detail``, lines such as stacks."""
    return {**asdict(event), "fault": events.is_fault(event), "text": reason_of(event), "detail": detail_of(event)}


def cause_document(event: events.Event | None) -> dict[str, Any] | None:
    """Why a round is broken or a run closed, as JSON; None if it is not."""
    if event is None:
        return None
    fields = asdict(event)
    for name in ("id", "time", "epoch", "size", "nodes", "breaks"):
        del fields[name]
    return {**fields, "fault": events.is_fault(event), "text": cause(event)}


def _seconds(ms: int | None) -> str:
    return "an unknown time" if ms is None else f"{ms / 1000:.1f} s"


def _time_of_day(at: float) -> str:
    """A time on the server's clock, as it is read in any time zone."""
    ms = max(0, round(1000 * at))
    return f"{time.strftime('%H:%M:%S', time.gmtime(ms // 1000))}.{ms % 1000:03d} UTC"
