"""A run as the page shows it: JSON without nulls, in which unknown fields are missing.

Times are seconds on the server's clock, as moments rather than ages, so that a page counts on by itself
without news, and a patch holds what happened, not the time.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, Final

from redelastic.monitoring.curves import Curves
from redelastic.monitoring.event_log import without_regrouped
from redelastic.monitoring.events import FAULTS, Closed, Completed, Drain, Event, Failed, Launched, is_fault
from redelastic.monitoring.failure import SILENT, last_fault
from redelastic.monitoring.history import STATES, History, NodeHistory
from redelastic.monitoring.records import Node, Run
from redelastic.monitoring.report import has_failed
from redelastic.monitoring.sentences import cause, detail_of, sentence
from redelastic.monitoring.wording import clean, short

Document = dict[str, Any]

EVENTS: Final = 250  # lines
MARKS: Final = 1_000  # faults and the like on the timeline, one per node
SPANS: Final = 20_000  # on the timeline, or four per node if that is more: what a round may need for each
ROUNDS: Final = 500  # on the timeline
MARKED: Final = (*FAULTS, Drain, Closed)  # kinds
FOLDED: Final = frozenset({"joined", "started", "left", "saved"})  # events that every node has: shared lines
OVER: Final = frozenset({"dead", "closed", "stopped", "empty"})  # phases
WINDOW: Final = 60.0  # over which steps per second are averaged, in seconds
GIB: Final = 2**30


class Speed:
    """Steps per second over the last minute, from the steps that the run's nodes report."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()
        self._epoch = 0

    def update(self, run: Run, step: int | None) -> float | None:
        """Add the highest step of the run as it is now; returns the speed, or None if it is not known yet."""
        seen = self._seen
        if step is None or run.epoch != self._epoch or (seen and step < seen[-1][1]):
            seen.clear()  # workers that resume redo steps
            self._epoch = run.epoch
        if step is not None and (not seen or step > seen[-1][1]):
            seen.append((run.time, step))
        while len(seen) > 2 and seen[1][0] < run.time - WINDOW:
            seen.popleft()
        if len(seen) < 2:
            return None
        return (seen[-1][1] - seen[0][1]) / max(0.001, run.time - seen[0][0])


def overview(run: Run, report: Mapping[str, Any], history: History | None, speed: float | None) -> Document:
    """A run as a row of the list of runs."""
    about = next((event for event in history.events if isinstance(event, Launched)), None) if history else None
    return _known(
        run=run.run_id,
        phase=report["phase"],
        failed=has_failed(run) or None,
        why=_why(run, report),
        user=clean(short(about.user)) or None if about else None,
        command=clean(short(about.command)) or None if about else None,
        round=run.epoch or None,
        round_at=_moment(run.time - run.age) if run.age is not None else None,
        members=len(run.members),
        waiting=len(run.candidates) or None,
        spares=len(run.spares) or None,
        min=run.min_nodes,
        max=run.max_nodes,
        step=report["step"],
        speed=_figures(speed),
        ettr=_share(report["ettr"]),
        redone=_share(report["redone"]) or None,
        since=_moment(history.start) if history else None,
        until=_moment(history.end) if history and _has_ended(run, report) else None,
        partial=True if history and not history.complete else None,
        fault=_last_fault(run, history),
        restarts=run.restarts or None,
    )


def details(run: Run, report: Mapping[str, Any], history: History | None, origin: float) -> Document:
    """The part of a run's own page that its overview lacks.

    Args:
        run: as it is now.
        report: what ``redelastic status --json`` prints for it.
        history: its history until now.
        origin: what the timeline's times count from.
    """
    return {
        "lease": run.lease,
        **({"heard": _moment(history.end)} if history else {}),
        "problems": [clean(short(problem)) for problem in report["problems"]],
        "waits_for": clean(short(report["waits_for"])),
        **({"failure": _failure(report["failure"])} if report["failure"] else {}),
        "nodes": {
            node.id: _node(node, fields, run, place)
            for place, (node, fields) in enumerate(zip(run.nodes, report["nodes"], strict=True))
        },
        "timeline": _timeline(history, origin, report["phase"] not in OVER, len(run.nodes)) if history else {},
        "events": fold(without_regrouped(history.events)) if history else {},
    }


def curves(known: Curves) -> Document:
    """The figures of :attr:`Curves.points`, by minute since 1970."""
    points = sorted(known.points.items())
    return {str(minute): {name: _figures(value) for name, value in point.items()} for minute, point in points}


def _failure(failure: Mapping[str, Any]) -> Document:
    lines = [[name, clean(short(line))] for name, line in failure["lines"]]
    return {"round": failure["epoch"], "time": _moment(failure["time"]), "lines": lines}


def saved(run_id: str, history: History) -> Document:
    """The document in ``redelastic timeline``'s file: all that is known of a run, as it was at the history's end."""
    broken = [this for this in history.rounds if this.down is not None]
    return _known(
        run=clean(run_id),
        start=_moment(history.start),
        end=_moment(history.end),
        partial=None if history.complete else True,
        closed=clean(short(cause(history.closed))) or None,
        failed=is_fault(history.closed) or None,
        rounds=len(history.rounds),
        largest=max((this.size for this in history.rounds), default=0),
        broken=len(broken),
        faults=sum(is_fault(this.broken_by) for this in broken),
        ettr=_share(history.ettr),
        redone=_share(history.redone) or None,
        down=sum(this.down or 0 for this in broken) if broken else None,
        restart=sum(restarts) if (restarts := [this.restart for this in broken if this.restart is not None]) else None,
        away=sum(end - start for start, end in history.outages),
        timeline=_timeline(history, history.start),
        events=fold(without_regrouped(history.events), None),
        texts={
            event.id: "\n".join(clean(line) for line in detail_of(event).splitlines() or event.nodes)
            for event in history.events
            if event.nodes or detail_of(event)
        },
    )


def _has_ended(run: Run, report: Mapping[str, Any]) -> bool:
    """Whether no node makes steps any more: a closed run's nodes may finish."""
    return report["phase"] in OVER and not run.is_alive


def _last_fault(run: Run, history: History | None) -> Document | None:
    fault = last_fault(history.events) if history else None
    if run.died_at is not None and (fault is None or fault.epoch < run.epoch):
        return {"time": _moment(run.died_at), "event": "dead", "fault": True, "node": "", "reason": SILENT}
    return _event(fault) if fault else None


def _why(run: Run, report: Mapping[str, Any]) -> str:
    """The verdict, without its first word and the figures shown elsewhere."""
    if report["phase"] == "running":
        of_nodes = (f"{node['name']} {problem}" for node in report["nodes"] for problem in node["problems"])
        wrong = [*report["problems"], *of_nodes]
        return clean(short(wrong[0])) + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "") if wrong else ""
    _, _, rest = report["verdict"].partition(": ")
    return clean(short(rest or (report["waits_for"] if run.nodes else "")))


def _node(node: Node, fields: Mapping[str, Any], run: Run, place: int) -> Document:
    total = fields["memory_total"]
    return _known(
        place=place,
        name=clean(node.name),
        host=clean(fields["host"]) if fields["host"] not in {"", node.name} else None,
        rank=node.rank,
        state=clean(fields["state"]),
        until=_moment(run.time + node.lease),
        draining=clean(short(node.draining)) or None,
        step=fields["step"],
        idle=round(fields["idle"], 1) if fields["idle"] is not None else None,
        cpu=round(fields["cpu"]) if fields["cpu"] is not None else None,
        memory=round(fields["memory"] / GIB, 1) if fields["memory"] is not None else None,
        memory_total=round(total / GIB, 1) if total is not None else None,
        restarts=fields["restarts"] or None,
        problems=[clean(short(text)) for text in fields["problems"]] or None,
        gpus=[_gpu(gpu) for gpu in fields["gpus"]] or None,
        gpus_hidden=clean(fields["gpus_hidden"]) if fields["gpus_hidden"] else None,
    )


def _gpu(gpu: Mapping[str, Any]) -> list[float]:
    """Utilisation in percent, memory used and total in GiB, degrees, whether something is wrong; -1: not known."""

    def figure(name: str, unit: float = 1, digits: int | None = None) -> float:
        return -1 if gpu[name] is None else round(gpu[name] / unit, digits)

    wrong = gpu["lost"] or bool(gpu["ecc"]) or bool(gpu["xid"])
    memory = figure("memory_used", GIB, 1), figure("memory_total", GIB, 1)
    return [figure("utilization"), *memory, figure("temperature"), int(wrong)]


def _timeline(history: History, origin: float, live: bool = False, nodes: int | None = None) -> Document:
    """Lanes of spans, rounds and marks; ongoing spans of a live run have no end.

    Args:
        history: of the run.
        origin: what the times count from.
        live: whether the run goes on.
        nodes: how many the run has now, to limit what a page gets again and again to the last ones of each; None for
            all of them.
    """
    rounds, most_marks, cut = history.rounds, None, None
    if nodes is not None:
        rounds, most_marks, cut = history.rounds[-ROUNDS:], MARKS, _cut(history, max(SPANS, 4 * nodes))

    def at(time: float) -> float:
        return round(time - origin, 2)

    def spans(node: NodeHistory) -> Document:
        return {
            str(i): [
                STATES.index(span.state),
                at(span.start),
                -1 if live and node.gone is None and span.end >= history.end else at(span.end),
                span.epoch,
                -1 if span.rank is None else span.rank,
            ]
            for i, span in enumerate(node.spans)
            if cut is None or span.end > cut
        }

    # A hang is marked as hung; that its worker has therefore failed is no second mark.
    newest_first = (
        event
        for event in reversed(history.events)
        if isinstance(event, MARKED) and not (isinstance(event, Failed) and event.idle_ms is not None)
    )
    marked = ((event, i, one) for event in newest_first for i, one in enumerate(event.each()))
    lanes = {node.id: {"name": clean(node.name), "spans": spans(node)} for node in history.nodes}
    return _known(
        origin=_moment(origin),
        start=at(history.start if cut is None else cut),
        cut=None if cut is None else True,
        end=None if live else at(history.end),
        lanes={node: lane for node, lane in lanes.items() if lane["spans"]},
        rounds={
            str(this.epoch): [at(this.completed_at), this.size] for this in rounds if this.completed_at is not None
        },
        outages=[[at(start), at(end)] for start, end in history.outages],
        marks={
            f"{event.id}.{i}": [at(one.time), one.event, one.node, clean(short(sentence(one))), is_fault(one)]
            for event, i, one in islice(marked, most_marks)
        },
    )


def _cut(history: History, most: int) -> float | None:
    """The time since which there are at most ``most`` spans; None if the whole run has no more."""
    ends = [span.end for node in history.nodes for span in node.spans]
    return None if len(ends) <= most else heapq.nlargest(most + 1, ends)[-1]


def fold(events: Sequence[Event], most: int | None = EVENTS) -> Document:
    """The last events by id; when many nodes do the same in a row, it is one event with a count.

    Args:
        events: oldest first.
        most: how many lines at most; None for all.
    """
    groups: list[list[Event]] = []  # each the newest first
    for event in reversed(events):
        group = groups[-1] if groups and event.event in FOLDED else None
        if group and (group[0].event, group[0].epoch) == (event.event, event.epoch):
            group.append(event)
        elif len(groups) == most:
            break
        else:
            groups.append([event])
    return {group[-1].id: _line(group) for group in reversed(groups)}


def _line(group: Sequence[Event]) -> Document:
    """The line of events that are alike, the newest first."""
    line = _event(group[-1])
    if len(group) > 1:
        line["count"] = sum(len(event.nodes) or 1 for event in group)
        line.pop("node")
    return line


def _event(event: Event) -> Document:
    return _known(
        time=event.time,
        event=clean(event.event) or "?",
        fault=is_fault(event) or None,
        round=event.epoch,
        size=event.size if isinstance(event, Completed) else None,
        node=clean(short(event.node)),
        count=len(event.nodes) or None,
        reason=clean(short(sentence(event))),
        detail=True if event.event not in FOLDED and (event.nodes or detail_of(event)) else None,
    )


def _known(**fields: Any) -> Document:
    return {name: value for name, value in fields.items() if value is not None}


def _moment(time: float) -> float:
    return round(time, 3)


def _figures(value: float | None) -> float | None:
    """A number, rounded to four digits."""
    return None if value is None else float(f"{value:.4g}")


def _share(value: float | None) -> float | None:
    """A share, with more digits than a page shows: what is rounded twice differs from what is rounded once."""
    return None if value is None else round(value, 6)
