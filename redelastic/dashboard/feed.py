"""The stream that a browser receives: a document, then its changes, as JSON merge patches (RFC 7396)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

Document = dict[str, Any]

HEARTBEAT: Final = 15.0  # in seconds: a comment that tells proxies and browsers that the stream is alive


class Topic:
    """One document that changes, and its followers; for one event loop.

    A browser that is too slow for the patches gets the whole document again: nothing is queued for it.
    """

    def __init__(self) -> None:
        self.document: Document | None = None
        self.followers = 0  # each follower counts itself
        self._version = 0
        self._patch = ""
        self._changed = asyncio.Event()

    def publish(self, document: Document) -> None:
        """Replace the document, and send the change to all followers."""
        if self.document is None:
            self._patch = _event("document", document)
        elif patch := merge_patch(self.document, document):
            self._patch = _event("patch", patch)
        else:
            return
        self.document = document
        self._version += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def follow(self) -> AsyncIterator[str]:
        """Yield server-sent events: the document, then each change."""
        seen = -1
        while True:
            changed = self._changed
            if self.document is None or seen == self._version:
                try:
                    await asyncio.wait_for(changed.wait(), HEARTBEAT)
                except asyncio.TimeoutError:
                    yield ": still here\n\n"
                continue
            is_next = seen == self._version - 1
            seen = self._version
            yield self._patch if is_next else _event("document", self.document)


def merge_patch(old: Document, new: Document) -> Document:
    """The JSON merge patch that makes ``new`` of ``old``, neither of which holds a null; empty if they are equal."""
    patch: Document = dict.fromkeys(old.keys() - new.keys())
    for name, value in new.items():
        if name not in old:
            patch[name] = value
        elif value != (before := old[name]):
            both = isinstance(value, dict) and isinstance(before, dict)
            patch[name] = merge_patch(before, value) if both else value
    return patch


def _event(kind: str, document: Document) -> str:
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))  # ASCII, on one line
    return f"event: {kind}\ndata: {text}\n\n"
