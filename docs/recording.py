"""Makes the pictures of `demo` and `timeline`: `python docs/recording.py`, on an idle machine with chromium."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
import time
from html import escape
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from redelastic.cli.demo.play import Job

PICTURES: Final = Path(__file__).parent / "pictures"
COLUMNS: Final = 108
LINE: Final = 18.0  # height of a line, in pixels
SIGN: Final = 8.0  # width of a character, in pixels
PAUSE: Final = 2.5  # what is longer is cut to that, in seconds
HOLD: Final = 6.0  # how long the last line is shown before it begins again, in seconds
COLOURS: Final = {1: "#ff6b6b", 2: "#5fd38d", 3: "#ffd166", 6: "#4cc9f0"}  # by ANSI's numbers
NBSP: Final = "\N{NO-BREAK SPACE}"  # one of several that an image keeps
INK: Final = "#d7dde5"
BROWSER: Final = (
    *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
SIZE: Final = (1010, 508)  # of the timeline's picture, in pixels of the page: to the end of the legend


def record() -> list[tuple[float, Text]]:
    """The lines of a demo, and when each came."""
    began, rest, lines = time.monotonic(), "", []
    os.environ |= {"COLUMNS": str(COLUMNS), "TERM": "xterm-256color"}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "redelastic", "demo"])  # noqa: S606
    while True:
        try:
            rest += os.read(terminal, 1 << 16).decode(errors="replace")
        except OSError:  # how a pseudo-terminal says that its other side is closed
            break
        *whole, rest = rest.split("\n")
        lines += [(time.monotonic() - began, Text.from_ansi(line.rstrip("\r"))) for line in whole]
    _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"The demo ended with {os.waitstatus_to_exitcode(status)}.")
    return lines


def drawn(lines: list[tuple[float, Text]]) -> str:
    """An SVG in which each line appears when it came."""
    console = Console(width=COLUMNS)
    shown_at = list(accumulate(min(PAUSE, b - a) for a, b in pairwise([lines[0][0], *(at for at, _ in lines)])))
    total = shown_at[-1] + HOLD
    width, height = COLUMNS * SIGN + 40, len(lines) * LINE + 40
    parts, styles = [], []
    for i, (at, (_, line)) in enumerate(zip(shown_at, lines, strict=True)):
        spans, column = [], 0
        for segment in line.render(console):
            style, text = segment.style, segment.text.rstrip("\n")
            colour = COLOURS.get(style.color.number or 0, INK) if style and style.color else INK
            weight = ' font-weight="bold"' if style and style.bold else ""
            faint = ' opacity="0.65"' if style and style.dim else ""
            if words := text.strip():
                x = 20 + (column + text.index(words[0])) * SIGN
                place = f'x="{x:g}" textLength="{len(words) * SIGN:g}" fill="{colour}"'
                spans.append(f"<tspan {place}{weight}{faint}>{escape(words.replace(' ', NBSP))}</tspan>")
            column += len(text)
        if spans:
            parts.append(f'<text class="l l{i}" y="{36 + i * LINE:g}">{"".join(spans)}</text>')
            share = 100 * at / total
            styles.append(f"@keyframes k{i}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}")
            styles.append(f".l{i}{{animation-name:k{i}}}")
    moving = f".l{{animation-duration:{total:.1f}s;animation-iteration-count:infinite}}" + "".join(styles)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-size="13.3" '
        'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace">\n'
        "<title>redelastic demo: the node of rank 0 is killed, and the training goes on</title>\n"
        f"<style>@media (prefers-reduced-motion: no-preference) {{{moving}}}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#161b22"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def photograph(picture: Path) -> None:
    """Draw the timeline of a job that loses gamma, gets delta, drains beta, and gets it back."""
    with contextlib.ExitStack() as stack:
        job = Job(stack, "night", "2:3", "--steps=100000", "--pace=0.05")
        folder = job.folder

        def train(steps: int, size: int) -> None:
            job.until(lambda: job.trains(size))
            last = job.reports()[-1]["step"] + steps
            job.until(lambda: job.trains(size, last))

        def redelastic(*command: str) -> None:
            endpoint = f"--endpoint={job.server.url}"
            subprocess.run([sys.executable, "-m", "redelastic", *command, endpoint], check=True)

        for name in ("alpha", "beta", "gamma"):
            job.start(name)
        train(300, size=3)
        job.kill("gamma")
        train(50, size=2)
        job.start("delta")
        train(300, size=3)
        redelastic("drain", job.run_id, "beta", "--reason=host update")
        job.nodes.pop("beta").wait()
        train(50, size=2)
        job.start("beta")
        train(300, size=3)
        page = f"{folder}/page.html"
        redelastic("timeline", job.run_id, f"--out={page}")
        profile, size = f"--user-data-dir={folder}/profile", ",".join(map(str, SIZE))
        shot: list[Any] = [f"--window-size={size}", "--force-device-scale-factor=2", f"--screenshot={picture}"]
        subprocess.run([*BROWSER, profile, *shot, f"file://{page}"], check=True, env={**os.environ, "TZ": "UTC"})


if __name__ == "__main__":
    photograph(PICTURES / "timeline.png")
    (PICTURES / "demo.svg").write_text(drawn(record()))
