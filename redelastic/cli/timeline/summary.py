"""What the shapes and colours of a run's picture mean, and the panel beside it: where the time went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from redelastic.run.history import History
from redelastic.run.wording import duration

if TYPE_CHECKING:
    from redelastic.run.records import Event

INK: Final = "#222222"
# Colours differ for the colour-blind too, and in grey by lightness, thickness or hatching.
# By state: face of odd and even rounds, thickness as part of a row, name.
LOOKS: Final[dict[str, tuple[str, str, float, str]]] = {
    "training": ("#2F6690", "#5B93BF", 0.74, "training"),
    "starting": ("#F4D35E", "#F4D35E", 0.74, "starting workers"),
    "regrouping": ("#EE964B", "#EE964B", 0.74, "fault to next round"),
    "waiting": ("#BDBDBD", "#BDBDBD", 0.30, "waiting, spare"),
    "unknown": ("#8D8D8D", "#8D8D8D", 0.12, "state unknown"),
}
# By event: shape, colour, name. Those before "stopped" are annotated where there is room.
MARKS: Final[dict[str, tuple[str, str, str]]] = {
    "lost": ("X", "#C1121F", "lost"),
    "hung": ("s", "#7B2CBF", "hung"),
    "failed": ("v", "#000000", "workers failed"),
    "drain": ("D", "#FFFFFF", "asked to drain"),
    "refused": ("P", "#FFFFFF", "refused by a check"),
    "barred": ("P", "#000000", "barred"),
    "stopped": (">", "#C1121F", "stopped the run"),
    "closed": (">", "#000000", "closed the run"),
    "left": ("o", "#FFFFFF", "left"),
    "joined": ("|", "#FFFFFF", "joined"),
}
ANNOTATED: Final = [*MARKS][: [*MARKS].index("stopped")]
OUTAGE: Final[dict[str, Any]] = {"facecolor": "#000000", "alpha": 0.18}
WIDTH: Final = 3.1  # of the panel, with its margin, in inches


def hatch(state: str) -> str | None:
    """The hatching that tells a state from the others in grey."""
    return "////" if state == "regrouping" else None


def edge(colour: str) -> str:
    """The outline of a mark of that colour, so that it stands out."""
    return INK if colour == "#FFFFFF" else "#FFFFFF"


def marked(history: History) -> list[Event]:
    """Events shown as marks of nodes, if they are among ``MARKS``."""
    events = (one for event in history.events for one in event.each())
    return [event for event in events if event.node and event.reason != "regroups"]


class _Side:
    """The panel on the right: lines from the top down, in inches."""

    def __init__(self, axes: Axes) -> None:
        self.axes, self.y, self.width = axes, 0.36, WIDTH - 0.35
        axes.set_xlim(0, WIDTH - 0.3)
        axes.axis("off")

    def heading(self, text: str) -> None:
        self.axes.text(0, self.y, text, weight="bold", fontsize=9.5, va="center")
        self.y += 0.25

    def line(self, name: str, *values: str, indent: float = 0.28) -> None:
        self.axes.text(indent, self.y, name, va="center")
        for x, value in zip((1.88, self.width), values, strict=False):
            self.axes.text(x, self.y, value, ha="right", va="center")
        self.y += 0.2

    def box(self, x: float, width: float, height: float, **looks: Any) -> None:
        self.axes.add_patch(Rectangle((x, self.y - height / 2), width, height, linewidth=0, **looks))


def draw_summary(axes: Axes, history: History) -> float:
    """Where the time went, what the marks mean, and what the faults cost; returns the height in inches."""
    side = _Side(axes)
    side.heading("Where the time went")
    shares = {state: spent for state, spent in history.seconds.items() if spent}
    whole, x = sum(shares.values()), 0.0
    for state, spent in shares.items():
        width = side.width * spent / whole
        side.box(x, width, 0.16, facecolor=LOOKS[state][0], hatch=hatch(state))
        x += width
    side.y += 0.23 if shares else 0
    for state, spent in shares.items():
        odd, even, thickness, name = LOOKS[state]
        for i, face in enumerate((odd, even)):
            side.box(0.1 * i, 0.1, 0.17 * thickness, facecolor=face, hatch=hatch(state))
        hours = spent / 3600
        digits = 0 if hours >= 100 else 1 if hours >= 1 else 3
        side.line(name, f"{100 * spent / whole:.1f} %", f"{hours:,.{digits}f} node-h")
    _say_effective(side, history.ettr)
    side.y += 0.16
    side.heading("Rounds")
    for text, value in _about_rounds(history):
        side.line(text, "", value, indent=0)
    counts = Counter(event.event for event in marked(history))
    side.y += 0.16
    if history.outages or any(kind in counts for kind in MARKS):
        side.heading("Events")
    for kind, (shape, colour, name) in MARKS.items():
        if counts[kind]:
            axes.plot(
                0.1,
                side.y,
                marker=shape,
                markersize=7,
                markerfacecolor=colour,
                markeredgecolor=edge(colour),
                markeredgewidth=0.6,
            )
            side.line(name, f"{counts[kind]:,}")
    if history.outages:
        side.box(0.02, 0.17, 0.14, **OUTAGE)
        side.line("Redis was away", duration(sum(b - a for a, b in history.outages)))
    return side.y


def _say_effective(side: _Side, ettr: float | None) -> None:
    if ettr is None:
        side.line("no node was present", indent=0)
    else:
        side.line("effective training time", "", f"{100 * ettr:.1f} %", indent=0)


def _about_rounds(history: History) -> Iterator[tuple[str, str]]:
    down = [this.down for this in history.rounds if this.down is not None]
    restart = [this.restart for this in history.rounds if this.restart is not None]
    yield "completed", f"{len(history.rounds):,}"
    yield "most nodes in a round", f"{max((this.size for this in history.rounds), default=0):,}"
    yield "broken", f"{len(down):,}"
    if down:
        yield "fault to next round, total", duration(sum(down))
    if restart:
        yield "fault to workers running, total", duration(sum(restart))
