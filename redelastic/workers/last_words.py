"""A worker's last words: the exception that ended it, when it was raised, and whether that was because of a peer."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

# How gloo, NCCL, torch's stores and its process groups report that another process is gone or silent.
_PEER: Final = re.compile(
    r"connection (?:was )?(?:closed|aborted) by (?:remote )?peer|connection (?:reset|refused)|broken pipe|"
    r"remote process exited|ncclRemoteError|timed out (?:waiting|after)|gloo/transport|DistNetworkError|"
    r"DistStoreError|ConnectionError|watchdog caught collective operation timeout|RoundBrokenError",
    re.IGNORECASE,
)
# What Python prints last, perhaps after torch's "[rank1]: "; and what C++ does.
_EXCEPTION: Final = re.compile(
    r"^(?:\[rank(\d+)\]: ?)?((?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Timeout)\b.*)$|"
    r"^ *(what\(\):.*)$",
    re.MULTILINE,
)


def names_a_peer(words: str) -> bool:
    """Whether an exception, as its class and message, says that a peer is gone: then the cause lies with that one."""
    return _PEER.search(words) is not None


def last_exception(log: str, rank: int | None = None) -> str:
    """The last line of a log that names an exception, from Python or C++; empty if none does.

    Args:
        log: its text.
        rank: of the worker; lines of other ranks, which torch begins with theirs, are passed over.
    """
    for of_rank, python, cpp in reversed(_EXCEPTION.findall(log)):
        if rank is None or of_rank in {"", str(rank)}:
            return str(python or cpp)
    return ""


class Error(NamedTuple):
    """What a worker has written to the file that torch names it for that.

    Attributes:
        message: the exception's class and message.
        at: when it was raised, in seconds since 1970 on the worker's host.
    """

    message: str
    at: float


def error_in(path: str) -> Error | None:
    """Read an error file; None if there is none, or it is not whole: torch could not read it either."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            changed, content = os.fstat(file.fileno()).st_mtime, json.load(file)
        message: Any = content["message"]
        if isinstance(message, str):
            second = int(content.get("timestamp", changed))
        else:
            second, message = int(message["extraInfo"]["timestamp"]), message.get("message", "")
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    # The file has full seconds only. It is written at once, unless the disk is slow or has a clock of its own.
    return Error(str(message), changed if second <= changed < second + 1 else second + 1)
