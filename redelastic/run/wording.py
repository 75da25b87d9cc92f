"""Words and figures for people, about what Redis holds, which anyone may have written."""

from __future__ import annotations

import math
import re
import unicodedata
from typing import Any, Final

LARGEST: Final = 10**18  # a number beyond this is none of ours
NODE_ID: Final = re.compile(r"(\S+-\d+)-[0-9a-f]{12}\b")  # host's name and process; identity


def clean(text: str) -> str:
    """``text`` on one line, with anything that a terminal would obey rather than show turned into an escape."""
    return "".join(sign if _is_shown(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_shown(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def number(told: Any) -> float | None:
    """A number from Redis; None if it is not one, or not one that we would have written."""
    if isinstance(told, bool) or not isinstance(told, int | float):
        return None
    return told if abs(told) < LARGEST and math.isfinite(told) else None


def whole(told: Any) -> int | None:
    """As :func:`number`, for counts."""
    value = number(told)
    return None if value is None else int(value)


def duration(seconds: float) -> str:
    """A time for people: ``0.8 s``, ``42 s``, ``12 min``, ``3.5 h``, ``2.1 d``."""
    seconds = max(0.0, seconds)
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    if seconds < 5970:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} d"


def size(bytes_: float) -> str:
    """A size for people, in binary units: ``71.2G``."""
    for unit in ("B", "K", "M", "G", "T"):
        if abs(bytes_) < 999.5:
            return f"{bytes_:.0f}{unit}" if unit == "B" or bytes_ >= 99.95 else f"{bytes_:.1f}{unit}"
        bytes_ /= 1024
    return f"{bytes_:.0f}P"


def count(n: int, thing: str) -> str:
    """``1 node``, ``2 nodes``."""
    return f"{n} {thing}" + ("" if n == 1 else "s")


def short(text: str) -> str:
    """``text`` for people: each node id without the part that only sets it apart from its earlier incarnations."""
    return NODE_ID.sub(r"\1", text)
