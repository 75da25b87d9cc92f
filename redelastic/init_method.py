"""``init_process_group(init_method="redis://…")``: a process group whose store is in Redis, with no rank 0 to serve it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Final
from urllib.parse import parse_qsl, urlencode

from torch.distributed import Store
from torch.distributed.constants import default_pg_timeout
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from .handler import EPOCH_VARIABLE, RedisRendezvousHandler, handler_from_parameters
from .settings import Settings, parameters_from_url
from .store import RedisStore
from .connection import Connection

SCHEMES: Final = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")


def register_init_method() -> None:
    """Register the ``redis://`` schemes with ``torch.distributed``; doing so again changes nothing."""
    for scheme in SCHEMES:
        if scheme not in _rendezvous_handlers:
            register_rendezvous_handler(scheme, _handle)


def _handle(url: str, timeout: timedelta = default_pg_timeout, **_: Any) -> Iterator[tuple[Store, int, int]]:
    raise NotImplementedError
    yield
