"""The picture of a run and its events as a self-contained page."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Final

from redelastic.run.history import History
from redelastic.run.wording import reason_of

from .picture import date, shown

if TYPE_CHECKING:
    from redelastic.run.records import Event

_PAGE: Final = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
body {{ font: 14px system-ui, sans-serif; margin: 1em; color: #222; }}
svg {{ width: 100%; height: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ text-align: left; padding: 2px 10px; vertical-align: top; border-bottom: 1px solid #ddd; }}
td:first-child {{ text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }}
</style></head><body>
{picture}
<h2>Events</h2>
<table><thead><tr><th>after</th><th>time</th><th>event</th><th>round</th><th>node</th><th>why</th></tr></thead><tbody>
{events}
</tbody></table></body></html>
"""


def page(history: History, title: str, picture: str) -> str:
    """Put a picture and a table of the events on a page of its own; nothing from Redis becomes markup.

    Args:
        history: what the picture shows.
        title: the run's name.
        picture: an SVG.
    """

    def row(event: Event) -> str:
        cells = [f"{event.time - history.start:.1f} s", date(event.time), event.event, str(event.epoch)]
        cells += [event.node, reason_of(event)]
        first = "".join(f"<td>{html.escape(shown(cell, 1000))}</td>" for cell in cells[:-1])
        detail = "\n".join(shown(line, 1000) for line in event.detail.splitlines())
        more = f"<details><summary>more</summary><pre>{html.escape(detail)}</pre></details>" if detail else ""
        return f"<tr>{first}<td>{html.escape(shown(cells[-1], 1000))}{more}</td></tr>"

    return _PAGE.format(
        title=html.escape(shown(f"Run {title}", 100)), picture=picture, events="\n".join(map(row, history.events))
    )
