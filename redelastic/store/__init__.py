"""The store: torch's key-value store in Redis."""

from .redis_store import RedisStore
from .requests import RoundBrokenError

__all__ = ["RedisStore", "RoundBrokenError"]
