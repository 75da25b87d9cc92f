"""Untrusted values from Redis, checked, and as words and figures for people."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections.abc import Sequence
from typing import Any, Final

LARGEST: Final = 10**18  # redelastic writes no number beyond this
# The end of a node's id: its process and identity. It begins with a fixed sign, so that a search takes linear time.
NODE_ID: Final = re.compile(r"(?<=\S)(-\d+)-[0-9a-f]{12}\b")


def clean(text: str) -> str:
    """``text`` on one line, with control characters as escapes, so that a terminal does not act on them."""
    return "".join(sign if _is_shown(sign) else sign.encode("unicode_escape").decode() for sign in text)


def _is_shown(sign: str) -> bool:
    return sign.isprintable() or unicodedata.category(sign) == "Zs"


def json_in(text: str | bytes) -> Any:
    """The value of a JSON text; None if the text is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def number(value: Any) -> float | None:
    """A number from Redis; None if it is not one, or not one that redelastic would write."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < LARGEST and math.isfinite(value) else None


def whole(value: Any) -> int | None:
    """As :func:`number`, for counts."""
    known = number(value)
    return None if known is None else int(known)


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


def known(number: int | None) -> str:
    """A count, or ``?``."""
    return "?" if number is None else str(number)


def few(names: Sequence[object], most: int) -> str:
    """``a, b, c``; ``a, b, …`` if there are more than ``most``."""
    return ", ".join(map(str, names[:most])) + (", …" if len(names) > most else "")


def short(text: str) -> str:
    """``text`` with each node id cut to host and process, without its random part."""
    return NODE_ID.sub(r"\1", text)
