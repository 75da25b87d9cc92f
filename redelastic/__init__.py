"""redelastic: a Redis-backed elastic runtime for PyTorch. See README.md and PROTOCOL.md."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .agent import AgentOptions, RedisElasticAgent
    from .monitoring.operator import Run
    from .redis.server import RedisServer
    from .rendezvous.backend import RedisRendezvousBackend, create_backend
    from .rendezvous.handler import RedisRendezvousHandler, create_handler, handler_from_url
    from .rendezvous.init_method import register_init_method
    from .store import RedisStore, RoundBrokenError
    from .survival.loop import Round, survive
    from .survival.state import State
    from .worker import Save, begin_save, phase, progress, should_checkpoint

__all__ = [
    # a rendezvous
    "RedisRendezvousBackend",
    "RedisRendezvousHandler",
    "create_backend",
    "create_handler",
    "handler_from_url",
    # the store of a round, and init_process_group(init_method="redis://…")
    "RedisStore",
    "RoundBrokenError",
    "register_init_method",
    # an agent, and how a training script talks to it
    "RedisElasticAgent",
    "AgentOptions",
    "progress",
    "phase",
    "should_checkpoint",
    "begin_save",
    "Save",
    # a training script whose processes survive
    "survive",
    "State",
    "Round",
    # a run, for programs that operate it
    "Run",
    # a server for tests and single hosts
    "RedisServer",
]
__version__ = "0.1.0"

_NAMES = {
    "agent.agent": "RedisElasticAgent",
    "agent.options": "AgentOptions",
    "monitoring.operator": "Run",
    "redis.server": "RedisServer",
    "rendezvous.backend": "RedisRendezvousBackend create_backend",
    "rendezvous.handler": "RedisRendezvousHandler create_handler handler_from_url",
    "rendezvous.init_method": "register_init_method",
    "store": "RedisStore RoundBrokenError",
    "survival.loop": "Round survive",
    "survival.state": "State",
    "worker": "Save begin_save phase progress should_checkpoint",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

if "REDELASTIC_WORKER" in os.environ:  # set by an agent, which may ask a worker for its stacks before its first call
    import_module(".worker", __name__)


def __getattr__(name: str) -> Any:
    # torch is imported late: torchrun loads the plugin while it is importing torch's elastic package.
    if name in _HOMES:
        globals()[name] = found = getattr(import_module(f".{_HOMES[name]}", __name__), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
