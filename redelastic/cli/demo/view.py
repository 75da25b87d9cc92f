"""What the demo shows: lines as things happen, a live status in a terminal, and a table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from typing_extensions import Self

WIDTH: Final = 100  # lines longer than this are hard to read
LOG_EVERY: Final = 100  # steps, where there is no terminal to show a bar in
NOTE_ON_TABLE: Final = (
    " Nodes are listed by rank; times count from the cause. Each round starts new\n"
    " workers, as forks of a process that has imported torch; a node that joins\n"
    " imports it first."
)


@dataclass
class Round:
    """A round of the run, as the demo saw it. Times are on the monotonic clock, in seconds.

    Attributes:
        epoch: its epoch.
        members: its nodes in the order of their ranks.
        cause: what caused it.
        since: when that happened.
        formed: when the round was complete.
        resumed_at: step of the checkpoint that it resumed from.
        first_step: when its first step was done; None if none was yet.
        last_step: number of the last step that was done; that of the checkpoint if none was.
    """

    epoch: int
    members: tuple[str, ...]
    cause: str
    since: float
    formed: float
    resumed_at: int = 0
    first_step: float | None = None
    last_step: int = 0


class View:
    """Writes to stdout: rich output in a terminal, plain lines elsewhere.

    As a context manager, it shows the live status.

    Args:
        steps: steps of the whole training run.
    """

    def __init__(self, steps: int) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # an encoding without "·" is no reason to fail
        self._console = Console(highlight=False)
        self._live_wanted = self._console.is_terminal and not self._console.is_dumb_terminal
        self._console.width = min(self._console.width, WIDTH)
        self._started = time.monotonic()
        self._nodes = Text()
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, complete_style="cyan", finished_style="green"),
            MofNCompleteColumn(),
            TextColumn("[dim]{task.fields[loss]}"),
            console=self._console,
            expand=True,
        )
        self._task = self._progress.add_task("starting", total=steps, loss="")
        self._logged = 0
        self._live = Live(console=self._console, get_renderable=self._status, transient=True, refresh_per_second=10)

    def __enter__(self) -> Self:
        if self._live_wanted:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def _status(self) -> Group:
        return Group("", Padding(self._nodes, (0, 1)), self._progress)

    def introduce(self, title: str, lines: Sequence[str]) -> None:
        """Say what is going to happen."""
        if self._live_wanted:
            self._console.print(Panel("\n".join(lines), title=f"[bold]{title}", title_align="left", border_style="dim"))
        else:
            for line in (title, *lines):
                self._console.print(line, soft_wrap=True)

    def note(self, text: str, style: str = "") -> None:
        """Write a line about what has just happened; ``text`` may contain rich markup."""
        seconds = f"{time.monotonic() - self._started:5.1f} s"
        if not self._live_wanted:
            self._console.print(f"{seconds}  {text}", style=style, soft_wrap=True)
            return
        line = Table.grid(padding=(0, 2))
        line.add_column(style="dim", no_wrap=True)
        line.add_column(style=style)
        line.add_row(seconds, text)
        self._console.print(line)

    def show_nodes(self, states: Mapping[str, str]) -> None:
        """Show the state of each node."""
        self._nodes = Text("   ").join(
            Text.assemble((f"● {name}", f"bold {_style(state)}"), f" {state}") for name, state in states.items()
        )

    def show_step(self, step: int, loss: float) -> None:
        """Show how far training has come."""
        self._progress.update(self._task, description="training", completed=step, loss=f"loss {loss:.3f}")
        if not self._live_wanted and step // LOG_EVERY > self._logged:
            self._logged = step // LOG_EVERY
            self.note(f"step {step}, loss {loss:.3f}")

    def show_activity(self, what: str) -> None:
        """Say beside the bar what is going on."""
        self._progress.update(self._task, description=what)

    def tabulate(self, rounds: Sequence[Round]) -> None:
        """Show the rounds."""
        table = Table(box=box.SIMPLE_HEAD, header_style="bold")
        table.add_column("round", justify="right")
        table.add_column("nodes")
        table.add_column("cause")
        table.add_column("formed", justify="right")
        table.add_column("first step", justify="right")
        table.add_column("steps", justify="right")
        for one in rounds:
            table.add_row(
                str(one.epoch),
                " ".join(one.members),
                one.cause,
                f"{one.formed - one.since:.2f} s",
                "-" if one.first_step is None else f"{one.first_step - one.since:.1f} s",
                f"{one.resumed_at + 1}-{one.last_step}" if one.last_step > one.resumed_at else "-",
            )
        self._console.print(table)
        self._console.print(NOTE_ON_TABLE, style="dim", soft_wrap=not self._live_wanted)
        self._console.print()

    def list_facts(self, facts: Mapping[str, str]) -> None:
        """Show names and values."""
        for name, value in facts.items():
            self._console.print(f" [bold]{name:10}[/bold]{value}", soft_wrap=not self._live_wanted)

    def conclude(self, text: str, style: str) -> None:
        """Write the last line."""
        self._console.print()
        self._console.print(text, style=style, soft_wrap=not self._live_wanted)

    def quote(self, text: str) -> None:
        """Show text written by others, as it is."""
        self._console.print(text, style="dim", markup=False, soft_wrap=True)


def _style(state: str) -> str:
    return {"starting": "yellow", "killed": "red"}.get(state, "green")
