"""The type of the fixture that makes nodes."""

from __future__ import annotations

from collections.abc import Callable

from redelastic.rendezvous.handler import RedisRendezvousHandler

NodeFactory = Callable[..., RedisRendezvousHandler]
