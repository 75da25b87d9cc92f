"""The sentinels of a master: named by the user, or known to the named ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import redis
from redis.sentinel import MasterNotFoundError, Sentinel

from .sockets import make_client

_SHORTEST_SHARE: Final = 1.0  # of an attempt, for one of several sentinels, in seconds


class Sentinels(Sentinel):
    """Finds a master by the sentinels that the user named; if none answers, by the sentinels that they last knew.

    Takes the arguments of :class:`redis.sentinel.Sentinel`.
    """

    def __init__(self, sentinels: Sequence[tuple[str, int]], **options: Any) -> None:
        super().__init__((), **options)
        self.sentinels = self._make_clients(sentinels)
        self._known: Sentinel | None = None
        self._known_places: list[tuple[str, int]] = []

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """See redis-py."""
        asked: Sentinel = self
        try:
            found: tuple[str, int] = super().discover_master(service_name)
        except MasterNotFoundError:
            if self._known is None:
                raise
            asked = self._known
            found = asked.discover_master(service_name)
        with suppress(redis.RedisError):  # a user of the sentinels may lack this right
            self._learn(asked.sentinels[0], service_name)  # redis-py puts the one that answered first
        return found

    def _learn(self, sentinel: redis.Redis, service_name: str) -> None:
        own = sentinel.get_connection_kwargs()
        reply: Any = sentinel.sentinel_sentinels(service_name)
        others = [(other["ip"], other["port"]) for other in reply]
        places = sorted([*others, (own["host"], own["port"])])
        if self._known_places != places:
            known = Sentinel((), sentinel_kwargs=self.sentinel_kwargs)
            known.sentinels = self._make_clients(places)
            self._known, self._known_places = known, places

    def _make_clients(self, places: Sequence[tuple[str, int]]) -> list[redis.Redis]:
        """Clients of sentinels, which are asked in turn: all silent ones together take an attempt, not each of them."""
        given = self.sentinel_kwargs
        share = max(_SHORTEST_SHARE, given["socket_timeout"] / len(places))
        options = given | {name: min(share, given[name]) for name in ("socket_timeout", "socket_connect_timeout")}
        return [make_client({**options, "host": host, "port": port}) for host, port in places]
