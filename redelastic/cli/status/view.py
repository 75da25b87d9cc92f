"""The picture of ``redelastic status``: its document, laid out for a terminal of any width, or for a pipe."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from redelastic.cli.output import event_table, moment, phase_style, styled
from redelastic.monitoring.wording import clean, count, duration, known, short, size

Document = Mapping[str, Any]

WIDE: Final = 110  # columns from which there is room for everything
PROBLEMS: Final = 10  # lines

_TO_THE_LEFT: Final = frozenset({"node", "host", "state", "gpu"})  # columns; the others are numbers
STATE_STYLES: Final = {"running": "green", "silent": "red", "hung": "red", "barred": "red", "refused": "red"}


class Screen:
    """Shows a run's status on a console.

    Args:
        console: to write to.
        rows: how many nodes to show at most; None for all.
        workers: whether to show each node's workers.
    """

    def __init__(self, console: Console, *, rows: int | None, workers: bool) -> None:
        self._console = console
        self._rows = rows
        self._workers = workers
        self._live: Live | None = None
        self._seen_at = time.time()
        self._shown: tuple[Document, str] | None = None

    def print(self, document: Document) -> None:
        """Show it once."""
        self._console.print(self._picture(document, self._rows, PROBLEMS))

    @contextlib.contextmanager
    def live(self, *, shown: bool) -> Iterator[None]:
        """Fill the terminal with what :meth:`update` gets; the last picture stays at the end."""
        if not shown or not self._console.is_terminal or self._console.is_dumb_terminal:
            yield
            return
        try:
            with Live(console=self._console, screen=True, get_renderable=self._fitting, refresh_per_second=2) as live:
                self._live = live
                yield
        finally:
            self._live = None
            if self._shown is not None:
                self._console.print(self._fitting())

    def update(self, document: Document, trouble: str) -> None:
        """Show what is known now.

        Args:
            document: the latest one.
            trouble: why there is no newer one; empty if it is current.
        """
        if not trouble:
            self._seen_at = time.time()
        self._shown = (document, trouble)
        if self._live is not None:
            self._live.refresh()
        else:
            self._console.print(self._fitting(), "")

    def _fitting(self) -> RenderableType:
        """The picture with as many rows as fit the terminal."""
        if self._shown is None:
            return Text()
        document, trouble = self._shown
        above: list[RenderableType] = []
        if trouble:
            since = f"Out of date: this is the state {duration(time.time() - self._seen_at)} ago."
            above = [Text(since, "bold red"), Text(clean(trouble), "red"), Text()]
        if not self._console.is_terminal:
            return Group(*above, self._picture(document, self._rows, PROBLEMS))
        height, nodes = self._console.height - 1, document["nodes"]
        lines_each = 1 + max((len(node["workers"]) for node in nodes if self._workers), default=0)
        rows = min(len(nodes), max(1, height // lines_each))
        while True:
            picture = Group(*above, self._picture(document, rows, max(2, height // 5)))
            excess = len(self._console.render_lines(picture, pad=False)) - height
            if excess <= 0 or rows <= 1:
                return picture
            rows = max(1, rows - max(1, excess // lines_each))

    def _picture(self, document: Document, rows: int | None, problems: int) -> Group:
        wrong = _problem_lines(document, problems)
        phase, failed = document["phase"], bool(document["closed"] and document["closed"]["fault"])
        style = "yellow" if wrong and phase == "running" else phase_style(phase, failed=failed)
        parts: list[RenderableType] = [
            styled((document["verdict"], f"bold {style}".rstrip())),
            _facts(document),
        ]
        if document["waits_for"] and document["phase"] not in {"dead", "empty"}:
            parts.append(styled(("not complete: " + document["waits_for"], "yellow")))
        if document["failure"]:
            parts += _failure_card(document["failure"])
        parts += wrong
        parts += [Text(line, "dim") for line in _hidden_gpus(document["nodes"])]
        if document["nodes"]:
            parts += [Text(), *self._nodes(document, rows)]
        if document["events"]:
            parts += [Text(), event_table(document["events"])]
        return Group(*parts)

    def _nodes(self, document: Document, rows: int | None) -> Iterator[RenderableType]:
        nodes: Sequence[Document] = document["nodes"]
        shown = _chosen(nodes, rows)
        names = _names(nodes)
        wide = self._console.width >= WIDE
        lines = []
        for node in shown:
            lines.append(_row(names[node["id"]], node, node["problems"], wide=wide))
            lines += [_row(_worker_name(worker), worker, (), wide=wide) for worker in node["workers"] if self._workers]
        yield _table(lines, wide=wide)
        if hidden := len(nodes) - len(shown):
            wrong = sum(1 for node in nodes if node["problems"]) - sum(1 for node in shown if node["problems"])
            also = f", {wrong} of them with problems" if wrong else ""
            yield Text(f"and {count(hidden, 'more node')}{also} (--all)", "dim")


def _failure_card(failure: Document) -> Iterator[RenderableType]:
    """Why a round failed, one row for each fact."""
    at = moment(failure["time"], full=False)
    yield styled(("! ", "bold red"), (f"round {failure['epoch']} failed at {at}", "bold"))
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in failure["lines"]:
        table.add_row(styled((f"  {name:<6}", "dim")), styled(line))
    yield table


def _facts(document: Document) -> Text:
    low, high = document["min_nodes"], document["max_nodes"]
    standings = Counter(node["standing"] for node in document["nodes"])
    here = count(standings["member"], "member")
    if low is not None:
        here += f" of {low}" + ("" if low == high else f" to {high}")
    facts = [f"run {document['run']}", f"epoch {document['epoch']}", here]
    facts += [f"{standings['candidate']} waiting"] if standings["candidate"] else []
    facts += [count(standings["spare"], "spare")] if standings["spare"] else []
    if document["restarts"]:
        facts.append(count(document["restarts"], "restart"))
    facts.append(f"lease {document['lease']:g} s")
    if document["ettr"] is not None:
        redone = f" ({100 * document['redone']:.1f}% redone)" if document["redone"] else ""
        facts.append(f"effective training time {100 * document['ettr']:.1f}%{redone}")
    elif document["epoch"]:
        facts.append("effective training time not known: no worker has called redelastic.progress()")
    return Text(clean(" · ".join(facts)), "dim")


def _hidden_gpus(nodes: Sequence[Document]) -> Iterator[str]:
    """Lines that say why GPUs are not shown."""
    for why, n in Counter(node["gpus_hidden"] for node in nodes if node["gpus_hidden"]).items():
        yield f"GPUs of {count(n, 'node')} are not shown: {clean(why)}"


def _problem_lines(document: Document, limit: int) -> list[Text]:
    names = _names(document["nodes"])
    found = [styled(("! ", "bold red"), problem) for problem in document["problems"]]
    for node in document["nodes"]:
        name, rank = (names[node["id"]], "bold"), "" if node["rank"] is None else f" (rank {node['rank']})"
        found += [styled(("! ", "bold red"), name, f"{rank} {text}") for text in node["problems"]]
    for node in document["nodes"]:
        if node["draining"]:
            found.append(styled(("- ", "yellow"), (names[node["id"]], "bold"), f" is draining, {node['draining']}"))
    if len(found) > limit:
        found[limit - 1 :] = [Text(f"  and {len(found) - limit + 1} more (--json has all)", "dim")]
    return found


def _chosen(nodes: Sequence[Document], rows: int | None) -> list[Document]:
    """Nodes with something wrong, then others to fill the rows; in the original order."""
    if rows is None or len(nodes) <= rows:
        return list(nodes)
    places = sorted(range(len(nodes)), key=lambda i: (not (nodes[i]["problems"] or nodes[i]["draining"]), i))
    return [nodes[i] for i in sorted(places[:rows])]


def _names(nodes: Sequence[Document]) -> dict[str, str]:
    """The label of each node, by id: its name if unique, else more of its id."""
    called = Counter(node["name"] for node in nodes)
    return {node["id"]: short(node["id"]) if called[node["name"]] > 1 else node["name"] for node in nodes}


def _worker_name(worker: Document) -> str:
    parts = [f"{name} {worker[name]}" for name in ("rank", "pid") if worker[name] is not None]
    return f"  {known(worker['local_rank'])}: {', '.join(parts)}"


# -- the table


def _table(rows: Sequence[Mapping[str, Text]], *, wide: bool) -> Table:
    """Rows of cells by column, without empty columns."""
    table = Table(box=None, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0), header_style="bold")
    names = [name for name in rows[0] if any(row[name].plain for row in rows)]
    for name in names:
        side: Literal["left", "right"] = "left" if name in _TO_THE_LEFT else "right"
        table.add_column(name, justify=side, no_wrap=name != "node", overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _row(label: str, fields: Document, problems: Sequence[str], *, wide: bool) -> dict[str, Text]:
    """The cells of a node, or of one of its workers, which has fewer fields."""

    def shown(name: str, show: Callable[[Any], str] = str) -> Text:
        return Text("" if (value := fields.get(name)) is None else show(value))

    name, host, state = (clean(text or "") for text in (label, fields.get("host"), fields.get("state")))
    total = f"/{size(total)}" if wide and (total := fields.get("memory_total")) else ""
    return {
        "rank": shown("rank") if "standing" in fields else Text(),
        "node": Text(name, "red" if problems else ""),
        "host": Text(host if wide and host != name else ""),
        "state": Text(state, STATE_STYLES.get(state, "yellow")),
        "heard": shown("heard", lambda time: duration(time) + (" ago" if wide else "")),
        "step": shown("step"),
        "idle": shown("idle", duration),
        "restarts": shown("restarts") if wide else Text(),
        "cpu": shown("cpu", "{:.0f}%".format),
        "memory": shown("memory", lambda used: size(used) + total),
        "gpu": _gpus(fields.get("gpus") or (), wide=wide),
    }


def _gpus(gpus: Sequence[Document], *, wide: bool) -> Text:
    """Lowest and highest utilisation, fullest memory, the highest temperature; "!" if one has a problem."""
    parts = [f"{len(gpus)}:"] if len(gpus) > (0 if wide else 1) else []
    used, heat = ([gpu[name] for gpu in gpus if gpu[name] is not None] for name in ("utilization", "temperature"))
    if used:
        low, high = min(used), max(used)
        parts.append(f"{low:.0f}%" if low == high else f"{low:.0f}-{high:.0f}%")
    memory = [(gpu["memory_used"], gpu["memory_total"]) for gpu in gpus]
    if wide and (known := [figures for figures in memory if None not in figures]):
        parts.append("/".join(map(size, max(known))))
    if heat:
        parts.append(f"{max(heat):.0f}°C")
    bad = any(gpu["lost"] or gpu["ecc"] or gpu["xid"] for gpu in gpus)
    return Text(" ".join(parts) + (" !" if bad else ""), "red" if bad else "")
