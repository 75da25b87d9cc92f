"""A worker's last words: the exception that ended it, and whether that was because of a peer."""

from __future__ import annotations

import re
from typing import Final

# How gloo, NCCL, torch's stores and its process groups report that another process is gone or silent.
_PEER: Final = re.compile(
    r"connection (?:was )?(?:closed|aborted) by (?:remote )?peer|connection (?:reset|refused)|broken pipe|"
    r"remote process exited|ncclRemoteError|timed out (?:waiting|after)|gloo/transport|DistNetworkError|"
    r"DistStoreError|ConnectionError|watchdog caught collective operation timeout|RoundBrokenError",
    re.IGNORECASE,
)
# What Python prints last, perhaps after torch's "[rank1]: "; and what C++ does.
_EXCEPTION: Final = re.compile(
    r"^(?:\[rank\d+\]: ?)?((?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout)\b.*)$|"
    r"^ *(what\(\):.*)$",
    re.MULTILINE,
)


def names_a_peer(words: str) -> bool:
    """Whether an exception, as its class and message, says that a peer is gone: then the cause lies with that one."""
    return _PEER.search(words) is not None


def last_exception(log: str) -> str:
    """The last line of a log that names an exception, from Python or C++; empty if none does."""
    found = _EXCEPTION.findall(log)
    return "".join(found[-1]) if found else ""
