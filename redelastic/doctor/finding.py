"""The findings of an examination: one fact each, its level, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Group = Literal["server", "trial", "host"]
Level = Literal["ok", "note", "warning", "problem"]

LEVELS: Final[tuple[Level, ...]] = ("ok", "note", "warning", "problem")  # from good to bad


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        group: what it is about: the Redis ``server``, the ``trial`` of the protocol on it, or this ``host``.
        name: stable, for programs.
        level: ``ok``; ``note``: worth knowing; ``warning``: works, but may fail one day; ``problem``: does not work.
        found: in words.
        advice: what to do, in words; empty if nothing has to be done.
        numbers: what was measured; each name ends in its unit where it has one.
    """

    group: Group
    name: str
    level: Level
    found: str
    advice: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)


def finding(group: Group, name: str, level: Level, found: str, advice: str = "", **numbers: float) -> Finding:
    """A finding whose advice only holds if its level is not ``ok``."""
    return Finding(group, name, level, found, "" if level == "ok" else advice, numbers)
