"""What REDELASTIC_LONG=1 adds to tests beside those with the marker ``long``: parameters, and examples."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, Final

import pytest

LONG: Final = os.environ.get("REDELASTIC_LONG") == "1"


def quick_first(values: Iterable[Any], quick: int = 1) -> list[Any]:
    """Values of one parameter; all but the first few are long."""
    return [value if i < quick else pytest.param(value, marks=pytest.mark.long) for i, value in enumerate(values)]


def quick_rows(rows: Iterable[tuple[Any, ...]], quick: int = 1) -> list[Any]:
    """Like :func:`quick_first`, for rows of several parameters."""
    return [row if i < quick else pytest.param(*row, marks=pytest.mark.long) for i, row in enumerate(rows)]


def examples(most: int) -> int:
    """How many examples of a property to try: ``most`` in long runs, else two fifths of them."""
    return most if LONG else 2 * most // 5
