"""The store: torch's key-value store in Redis."""

from .redis_store import RedisStore, RoundBrokenError

__all__ = ["RedisStore", "RoundBrokenError"]
