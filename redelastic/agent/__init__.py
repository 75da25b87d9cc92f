"""The elastic agent: torch's, plus what torch lacks."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import RedisElasticAgent
    from .limits import RefusedError
    from .options import AgentOptions

__all__ = ["AgentOptions", "RedisElasticAgent", "RefusedError"]

_HOMES = {"AgentOptions": "options", "RedisElasticAgent": "agent", "RefusedError": "limits"}


def __getattr__(name: str) -> Any:
    # torch is imported late: the command line reads the options' defaults where it is not installed.
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
