"""A run's history as a picture, drawn with matplotlib (the extra ``timeline``)."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import chain
from typing import TYPE_CHECKING, Any, Final
from xml.etree import ElementTree as ET

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from redelastic.run.history import History, NodeHistory, Span
from redelastic.run.wording import clean, duration

from .summary import ANNOTATED, INK, LOOKS, MARKS, OUTAGE, draw_summary, edge, hatch, marked
from .summary import WIDTH as SIDE_WIDTH

if TYPE_CHECKING:
    from redelastic.run.records import Event

FORMATS: Final = ("png", "svg", "pdf")
_SVG: Final = "http://www.w3.org/2000/svg"

_WIDTH, _TOP, _BOTTOM = 14.0, 0.95, 0.62  # inches
LOOK: Final[list[Any]] = [
    "default",  # regardless of the user's own settings
    {
        "text.parse_math": False,  # a "$" in a name is a "$"
        "svg.fonttype": "none",  # so that names can be searched for
        "font.size": 8.5,
        "hatch.linewidth": 0.5,
        "hatch.color": "#7A3B00",
        "text.color": INK,
    },
]
_UNITS: Final = ((120, 1, "seconds"), (7200, 60, "minutes"), (172800, 3600, "hours"))  # below, seconds to one, name


@dataclass
class _Row:
    """A row of the picture: the nodes of one host, if one follows the other."""

    name: str
    nodes: list[NodeHistory] = field(default_factory=list)
    taken_until: float = float("-inf")


def render(history: History, title: str, kind: str) -> bytes:
    """Draw a history.

    Args:
        history: what to show.
        title: the run's name.
        kind: one of ``FORMATS``.

    Returns:
        The contents of a file of that kind. An SVG names what is under the mouse, and loads nothing.
    """
    with style.context(LOOK), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # a name in a script missing from the font
        figure, tooltips = _draw(history, title)
        written = io.BytesIO()
        figure.savefig(written, format=kind, dpi=150, metadata={"Date": None} if kind == "svg" else None)
    return _with_tooltips(written.getvalue(), tooltips) if kind == "svg" else written.getvalue()


def shown(text: str, limit: int) -> str:
    """Text from Redis, escaped and cut to ``limit`` characters."""
    harmless = clean(text[: limit + 1])
    return harmless if len(harmless) <= limit else harmless[: limit - 1] + "…"


def _shortened(name: str) -> str:
    """A host's name, shortened in the middle: names differ at the beginning or the end."""
    whole = shown(name, 300)
    return whole if len(whole) <= 28 else f"{whole[:15]}…{whole[-12:]}"


def _rows(history: History) -> list[_Row]:
    first: dict[str, float] = {}
    for event in history.events:
        for one in event.each():
            first.setdefault(one.node, one.time)
    rows: list[_Row] = []
    by_name: dict[str, list[_Row]] = {}
    for node in history.nodes:
        since = min([first.get(node.id, history.end), *(span.start for span in node.spans)])
        same = by_name.setdefault(node.name, [])
        row = next((row for row in same if row.taken_until <= since), None)
        if row is None:
            row = _Row(_shortened(node.name) + (f" #{len(same) + 1}" if same else ""))
            same.append(row)
            rows.append(row)
        row.nodes.append(node)
        row.taken_until = history.end if node.gone_at is None and node.spans else node.gone_at or since
    return rows


def _draw(history: History, title: str) -> tuple[Figure, dict[str, list[str]]]:
    """The figure, and by SVG id of each group of shapes the meaning of each shape."""
    rows = _rows(history)
    height = min(11.0, max(1.2, len(rows) * min(0.42, max(0.17, 8 / max(1, len(rows))))))
    left = 0.45 + 0.068 * max([6, *(len(row.name) for row in rows)])
    figure = Figure(dpi=150, facecolor="white")
    side = figure.add_axes(((_WIDTH - SIDE_WIDTH + 0.25) / _WIDTH, 0, (SIDE_WIDTH - 0.3) / _WIDTH, 1), gid="summary")
    total = max(_TOP + height + _BOTTOM, draw_summary(side, history))
    side.set_ylim(total, 0)
    figure.set_size_inches(_WIDTH, total)
    canvas = FigureCanvasAgg(figure)
    width = _WIDTH - left - SIDE_WIDTH
    axes = figure.add_axes(
        (left / _WIDTH, (total - _TOP - height) / total, width / _WIDTH, height / total), gid="timeline"
    )
    row_height = height / max(1, len(rows))  # inches
    dense = row_height < 0.12
    tooltips = _draw_spans(axes, history, rows, dense=dense)
    _draw_axes(axes, history, rows, row_height)
    _draw_rounds(axes, history, width)
    tooltips |= _draw_marks(axes, history, rows, min(7.5, max(5.0, 72 * row_height * 0.5)), canvas, dense=dense)
    _draw_titles(figure, history, title, left, total)
    return figure, tooltips


def _scale(history: History) -> tuple[float, str]:
    """Seconds per unit of the time axis, and the unit's name."""
    length = history.end - history.start
    return next(((float(size), name) for below, size, name in _UNITS if length < below), (86400.0, "days"))


def _draw_spans(axes: Axes, history: History, rows: Sequence[_Row], *, dense: bool) -> dict[str, list[str]]:
    unit, _ = _scale(history)
    spans = [(y, node, span) for y, row in enumerate(rows) for node in row.nodes for span in node.spans]
    tooltips = {}
    for state, (odd, even, thickness, name) in LOOKS.items():
        found = [(y, node, span) for y, node, span in spans if span.state == state]
        half = 0.5 if dense and thickness > 0.5 else thickness / 2
        boxes = [
            (y - half, y + half, (span.start - history.start) / unit, (span.end - history.start) / unit)
            for y, _, span in found
        ]
        gid = f"spans-{state}"
        axes.add_collection(
            PolyCollection(
                [((x0, y0), (x0, y1), (x1, y1), (x1, y0)) for y0, y1, x0, x1 in boxes],
                facecolors=[odd if span.epoch % 2 else even for _, _, span in found],
                linewidths=0,
                antialiased=not dense,
                hatch=None if dense else hatch(state),
                gid=gid,
            )
        )
        tooltips[gid] = [_about(node, span, name) for _, node, span in found]
    return tooltips


def _about(node: NodeHistory, span: Span, name: str) -> str:
    where = f", round {span.epoch}" if span.epoch else ""
    rank = "" if span.rank is None else f", rank {span.rank}"
    return shown(f"{node.id}: {name} for {duration(span.end - span.start)}{where}{rank}", 300)


def _draw_axes(axes: Axes, history: History, rows: Sequence[_Row], row_height: float) -> None:
    unit, name = _scale(history)
    length = max((history.end - history.start) / unit, 1 / unit)
    axes.set_xlim(-0.004 * length, 1.012 * length)  # so that a mark at the very end is not cut
    axes.set_ylim(max(len(rows), 2) - 0.5, -0.5)
    each = max(1, -int(-0.13 // row_height))
    ticks = range(0, len(rows), each)
    size = 8.5 if row_height > 0.16 else 7
    axes.set_yticks([*ticks], [rows[i].name for i in ticks], fontsize=size)
    axes.set_xlabel(f"{name} since then")
    axes.tick_params(axis="y", length=0 if each == 1 else 2)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for start, end in history.outages:
        axes.axvspan((start - history.start) / unit, (end - history.start) / unit, linewidth=0, **OUTAGE)


def _draw_rounds(axes: Axes, history: History, width: float) -> None:
    """A line where a round was completed, its epoch above if there is room."""
    unit, _ = _scale(history)
    length = axes.get_xlim()[1] - axes.get_xlim()[0]
    above = axes.get_xaxis_transform()
    axes.text(-0.006, 1.012, "round", transform=axes.transAxes, ha="right", va="bottom", fontsize=8)
    free_from = float("-inf")
    for this in history.rounds:
        x = (max(this.completed_at or 0, history.start) - history.start) / unit
        if this.completed_at is not None and this.completed_at >= history.start:
            axes.axvline(x, color=INK, lw=0.7, alpha=0.75)
        if x >= free_from:
            axes.text(x, 1.012, str(this.epoch), transform=above, ha="center", va="bottom", fontsize=8)
            free_from = x + length / width * (0.12 + 0.07 * len(str(this.epoch)))


def _draw_marks(
    axes: Axes, history: History, rows: Sequence[_Row], size: float, canvas: FigureCanvasAgg, *, dense: bool
) -> dict[str, list[str]]:
    unit, _ = _scale(history)
    events = marked(history)
    row_of = {node.id: y for y, row in enumerate(rows) for node in row.nodes}
    tooltips = {}
    drawn: list[Event] = []
    for kind, (shape, colour, _) in reversed(MARKS.items()):
        at = [event for event in events if event.event == kind and event.node in row_of]
        if at and not (dense and kind in {"joined", "left"}):  # with many nodes, only what went wrong
            axes.plot(
                [(event.time - history.start) / unit for event in at],
                [row_of[event.node] for event in at],
                linestyle="none",
                marker=shape,
                markersize=size * (0.75 if kind == "left" else 1),
                markerfacecolor=colour,
                markeredgecolor=edge(colour),
                markeredgewidth=0.6,
                zorder=4,
                clip_on=False,
                gid=f"marks-{kind}",
            )
            drawn += at
            tooltips[f"marks-{kind}"] = [shown(f"{e.node}: {kind}, {e.reason}", 300) for e in at]
    drawn.sort(key=lambda event: [*MARKS].index(event.event))  # the worst get room first
    at_pixels = [axes.transData.transform(((e.time - history.start) / unit, row_of[e.node])) for e in drawn]
    _annotate(axes, list(zip(drawn, at_pixels, strict=True)), size, canvas)
    return tooltips


def _annotate(axes: Axes, marks: Sequence[tuple[Event, Any]], size: float, canvas: FigureCanvasAgg) -> None:
    """Write reasons beside marks where they hide no mark or other reason; of many, only few fit."""
    renderer = canvas.get_renderer()
    dots = axes.figure.dpi / 72
    inside = axes.get_window_extent(renderer)
    reach = size / 2 * dots
    taken = [Bbox([[x - reach, y - reach], [x + reach, y + reach]]) for _, (x, y) in marks]
    for event, (x, y) in chain(*([m for m in marks if m[0].event == kind][:40] for kind in ANNOTATED)):
        near = [other for other in taken if abs(other.y0 + other.y1 - 2 * y) < 4 * reach + 20 * dots]
        for limit, side, align in ((80, 1, "left"), (80, -1, "right"), (40, 1, "left"), (40, -1, "right")):
            text = axes.annotate(
                shown(event.reason or event.event, limit),
                tuple(axes.transData.inverted().transform((x, y))),
                xytext=(side * (size / 2 + 3), 0),
                textcoords="offset points",
                ha=align,
                va="center",
                fontsize=7,
                zorder=5,
                annotation_clip=False,
                bbox={"boxstyle": "square,pad=0.12", "facecolor": "white", "alpha": 0.85, "linewidth": 0},
            )
            box = text.get_window_extent(renderer)
            fits = inside.x0 <= box.x0 and box.x1 <= inside.x1
            if fits and not any(box.overlaps(other) for other in near):
                taken.append(box)
                break
            text.remove()


def _draw_titles(figure: Figure, history: History, title: str, left: float, total: float) -> None:
    x = (left - 0.1) / _WIDTH
    length = duration(history.end - history.start)
    figure.text(x, 1 - 0.2 / total, shown(f"Run {title}", 100), fontsize=13, weight="bold", va="top")
    known = "" if history.complete else "known "
    parts = [f"{known}from {date(history.start)}, {length}", "" if history.complete else "beginning unknown"]
    parts.append(f"closed: {history.closed}" if history.closed else "open")
    text = shown(" · ".join(part for part in parts if part), int((_WIDTH - SIDE_WIDTH - left) / 0.076))
    figure.text(x, 1 - 0.46 / total, text, fontsize=9, va="top")


def date(seconds: float) -> str:
    """A time in Unix seconds, for people."""
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # an id that is not from Redis
        return f"{seconds:.0f} s"


def _with_tooltips(svg: bytes, tooltips: dict[str, list[str]]) -> bytes:
    """Give the shapes of our picture a <title>, which browsers show under the mouse."""
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ET.fromstring(svg)  # noqa: S314 - matplotlib wrote it
    shapes = {f"{{{_SVG}}}path", f"{{{_SVG}}}use"}
    for group in root.iter(f"{{{_SVG}}}g"):
        texts = tooltips.get(group.get("id", ""), [])
        hidden = {shape for defs in group.iter(f"{{{_SVG}}}defs") for shape in defs.iter()}
        found = [shape for shape in group.iter() if shape.tag in shapes and shape not in hidden]
        for shape, text in zip(found, texts, strict=False):
            ET.SubElement(shape, f"{{{_SVG}}}title").text = text
    written: bytes = ET.tostring(root, encoding="utf-8")
    return written
