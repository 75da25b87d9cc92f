"""The words of a recording of the demo (`docs/recording.py`)."""

from __future__ import annotations

import html
import re
from pathlib import Path

PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "demo.svg"


def words(line: str) -> str:
    """A line without what differs from run to run: numbers, node names and spaces."""
    line = re.sub(r"demo-\w+", "demo", line)
    return re.sub(r"[\d.:-]+|\b[A-Z]\b|\s", "", line)  # an image keeps other spaces


def lines() -> set[str]:
    """The lines of the picture, each as its words."""
    found = re.findall(r"<text [^>]*>(.*?)</text>", PICTURE.read_text())
    return {words(html.unescape(re.sub(r"<[^>]+>", "", line))) for line in found} - {""}
