"""The type of the fixture `new_node`, which makes nodes."""

from __future__ import annotations

from collections.abc import Callable

from redelastic.rendezvous.handler import RedisRendezvousHandler

NodeFactory = Callable[..., RedisRendezvousHandler]
