"""The names of all keys that a run has in Redis, which are built only here.

All keys of one run carry its id as their hash tag, ``<prefix>:{<run_id>}:…``: one run is one Cluster slot, and one
ACL pattern (``~<prefix>:{<run_id>}:*``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Final

DEFAULT_PREFIX: Final = "redelastic"
DEFAULT_TTL: Final = 86400.0  # in seconds since the run's last activity: a night's job can be read in the morning
MAX_KEY_PART: Final = 200
_ROUND: Final = "round:"  # begins the name of a round's store
# In a round's store, by rank: the last request to save that was fulfilled, by its id.
SAVED: Final = "redelastic/saved/{}"
# The same: the last request for which the node's workers have left the round after the common step.
PAUSED: Final = "redelastic/paused/{}"
# By the time at which the round was completed, and by rank: a node's proof that it has the join secret; rank 0's
# attestation that it has verified all. After a failover there may be another round of the same epoch.
PROVED: Final = "redelastic/proved/{}/{}"
ATTESTED: Final = "redelastic/attested/{}"

# Braces would move the hash tag, glob characters would widen an ACL pattern, white space breaks tools that split on it.
_FORBIDDEN: Final = re.compile(r"[\s{}*?\[\]\\^\x00-\x1f\x7f]")


def check_key_part(what: str, value: object) -> str:
    r"""Return ``value`` if it can be part of a key's name.

    Args:
        what: what the value is, for the message.
        value: a run id, key prefix, store name or topology label.

    Raises:
        ValueError: it is empty, longer than 200 bytes in UTF-8, or contains white space, control characters or one of
            ``{ } * ? [ ] \ ^``.
        TypeError: it is not a string.
    """
    if not isinstance(value, str):
        raise TypeError(f"The {what} must be a string, not {type(value).__name__}.")
    if not value:
        raise ValueError(f"The {what} is empty; give it a name of 1 to {MAX_KEY_PART} bytes.")
    try:
        size = len(value.encode())
    except UnicodeEncodeError as e:
        raise ValueError(f"The {what} {value[:40]!r} is not valid Unicode text.") from e
    if size > MAX_KEY_PART:
        raise ValueError(f"The {what} {value[:40]!r}… has {size} bytes; at most {MAX_KEY_PART} are allowed.")
    if found := _FORBIDDEN.search(value):
        raise ValueError(
            f"The {what} {value!r} contains {found.group()!r}; "
            "it must not contain white space, control characters, or any of { } * ? [ ] \\ ^."
        )
    return value


@dataclass(frozen=True)
class StoreKeys:
    """Keys of one store; ``lua/store.lua`` describes them."""

    base: str

    @cached_property
    def data(self) -> str:
        """Hash of the store's keys and values."""
        return self.base

    @cached_property
    def waits(self) -> str:
        """Sorted set of the keys that callers wait for."""
        return f"{self.base}:waits"

    @cached_property
    def streams(self) -> bytes:
        """Prefix of the names of all wake-up streams."""
        return f"{self.base}:wake:".encode()

    @cached_property
    def queues(self) -> bytes:
        """Prefix of the names of all queues."""
        return f"{self.base}:queue:".encode()

    def dedup(self, sender: bytes) -> bytes:
        """Name of the string that holds the last effect of ``sender``."""
        return self._dedups + sender

    def reply(self, sender: bytes) -> bytes:
        """Name of the string that holds the last item that ``sender`` has popped, if that is long."""
        return f"{self.base}:reply:".encode() + sender

    @cached_property
    def _dedups(self) -> bytes:
        return f"{self.base}:dedup:".encode()

    def type_of(self, key: bytes) -> str:
        """The Redis type of a key of this store."""
        kinds = {
            self._dedups: "string",
            f"{self.base}:reply:".encode(): "string",
            self.queues: "list",
            self._poppers: "zset",
        }
        fixed = {self.data.encode(): "hash", self.waits.encode(): "zset"}
        return fixed.get(key) or next((kind for start, kind in kinds.items() if key.startswith(start)), "stream")

    def poppers(self, key: bytes) -> bytes:
        """Name of the sorted set of clients that wait for an item of the queue ``key``."""
        return self._poppers + key

    def popper(self, sender: bytes) -> bytes:
        """Name of the stream that wakes ``sender`` when there is an item for it."""
        return f"{self.base}:popper:".encode() + sender

    @cached_property
    def _poppers(self) -> bytes:
        return f"{self.base}:poppers:".encode()

    def stream(self, key: bytes) -> bytes:
        """Name of the stream that wakes the callers blocked on ``key``."""
        return self.streams + key

    def queue(self, key: bytes) -> bytes:
        """Name of the list that holds the queue ``key``."""
        return self.queues + key


@dataclass(frozen=True)
class RunKeys:
    """Keys of one run; ``lua/run.lua`` describes them."""

    run_id: str
    prefix: str = DEFAULT_PREFIX

    def __post_init__(self) -> None:
        check_key_part("run id", self.run_id)
        check_key_part("key prefix", self.prefix)

    def _key(self, name: str) -> str:
        return f"{self.prefix}:{{{self.run_id}}}:{name}"

    @cached_property
    def run(self) -> str:
        """Hash of the run's record and settings."""
        return self._key("run")

    @cached_property
    def ranks(self) -> str:
        """Sorted set of the last round's nodes, by rank."""
        return self._key("ranks")

    @cached_property
    def members(self) -> str:
        """Set of the nodes that hold the last round."""
        return self._key("members")

    @cached_property
    def candidates(self) -> str:
        """Sorted set of the nodes that wait for a round."""
        return self._key("candidates")

    @cached_property
    def leases(self) -> str:
        """Sorted set of nodes by the time at which their leases run out."""
        return self._key("leases")

    @cached_property
    def wake(self) -> str:
        """Stream that wakes the run's nodes."""
        return self._key("wake")

    @cached_property
    def events(self) -> str:
        """Stream of what happened in the run, for people and tools."""
        return self._key("events")

    @cached_property
    def failures(self) -> str:
        """Hash of the hosts whose workers failed in their last rounds."""
        return self._key("failures")

    @cached_property
    def state(self) -> str:
        """State of a backend under torch's own handler: ``lua/set_state.lua``."""
        return self._key("state")

    @cached_property
    def types(self) -> dict[str, str]:
        """Redis type of each key, in the order in which ``lua/run.lua`` takes them."""
        return {
            self.run: "hash",
            self.ranks: "zset",
            self.members: "set",
            self.candidates: "zset",
            self.leases: "zset",
            self._key("endpoints"): "hash",
            self._key("labels"): "hash",
            self.wake: "stream",
            self.events: "stream",
            self.failures: "hash",
        }

    def status(self, node: str) -> str:
        """Name of the string that holds the status of ``node``."""
        return self._key(f"node:{node}")

    @cached_property
    def curves(self) -> str:
        """Hash of what the nodes measured, by minute: ``lua/curve.lua``."""
        return self._key("curves")

    def live_log(self, node: str) -> tuple[str, str]:
        """Names of the strings that say of which worker of ``node`` somebody wants to see the log, and hold its end."""
        return self._key(f"log:{node}:asked"), self._key(f"log:{node}")

    def of_store(self, store: StoreKeys) -> list[str]:
        """The keys that every script of a store takes: 1 to 4 of ``lua/store.lua``."""
        return [store.data, store.waits, self.run, self.members]

    def store(self, name: str | int) -> StoreKeys:
        """Keys of a store: of a round's, by its epoch, or of another, by its name.

        Raises:
            ValueError: the name cannot be part of a key, or is a round's.
        """
        if isinstance(name, int):
            return StoreKeys(self._key(f"store:{_ROUND}{name}"))
        text = check_key_part("store name", name)
        if text.startswith(_ROUND):
            raise ValueError(f"The store name {text!r} begins with {_ROUND!r}, as only a round's does; use another.")
        if ":" in text:
            raise ValueError(
                f"The store name {text!r} contains ':', which separates the parts of a key; use another character."
            )
        return StoreKeys(self._key(f"store:{text}"))
