"""The Lua scripts: loaded once from ``lua/``, sent by their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Final

from redis.exceptions import NoScriptError

from .connection import Connection, Timeout
from .sockets import Word, encoded
from .wire import Wire

_LONG: Final = 2**16  # bytes of keys and arguments, beside which a script's text of some 2 kB does not matter


class Script:
    """A Lua script, which Redis runs atomically.

    Args:
        parts: names of the files in ``lua/`` that make up the script.
    """

    def __init__(self, *parts: str) -> None:
        self.name, self.parts = parts[-1], parts
        folder = files("redelastic") / "lua"
        lines = "".join((folder / f"{part}.lua").read_text(encoding="utf-8") for part in parts).splitlines(
            keepends=True
        )
        # Without comments the text, which is sent to each new server, is a third as long.
        self.text = "".join(line for line in lines if line.strip() and not line.lstrip().startswith("--"))
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def __call__(
        self,
        connection: Connection,
        keys: Sequence[str | bytes],
        args: Sequence[Word] | Callable[[], Sequence[Word]],
        timeout: Timeout = None,
    ) -> Any:
        """Run the script; see :meth:`Connection.attempt` for ``timeout`` and errors.

        A function as ``args`` is called before each attempt: its result may be valid only at that moment.
        """
        count = b"%d" % len(keys)

        def run(wire: Wire) -> Any:
            words = encoded((*keys, *(args() if callable(args) else args)))
            if sum(map(len, words)) > _LONG:  # not twice, should the server not know the script
                return wire.exchange((b"EVAL", self.text.encode(), count, *words))[0]
            try:
                return wire.exchange((b"EVALSHA", self.digest.encode(), count, *words))[0]
            except NoScriptError:  # a new server, or one whose scripts were flushed
                pass
            return wire.exchange((b"EVAL", self.text.encode(), count, *words))[0]

        reply = connection.attempt(run, timeout)
        connection.served = True
        return reply


JOIN: Final = Script("run", "events", "changes", "roll", "complete", "restore", "admission", "join")
BEAT: Final = Script("run", "events", "changes", "roll", "complete", "restore", "beat")
ROLL_CALL: Final = Script("run", "events", "changes", "roll", "complete", "roll_call")
LEAVE: Final = Script("run", "events", "changes", "roll", "complete", "restore", "leave")
CLOSE: Final = Script("run", "events", "changes", "close")
DRAIN: Final = Script("run", "events", "changes", "drain")
SAVE: Final = Script("run", "events", "changes", "save")
ADMIT: Final = Script("run", "events", "changes", "admission", "admit")
CHARGE: Final = Script("run", "events", "changes", "charge")
INSPECT: Final = Script("run", "inspect")
NOTE: Final = Script("run", "events", "note")
CURVE: Final = Script("curve")
READMIT: Final = Script("run", "events", "changes", "readmit")

SET_STATE: Final = Script("set_state")

STORE_SET: Final = Script("store", "store_write", "store_set")
STORE_ADD: Final = Script("store", "store_write", "store_add")
STORE_APPEND: Final = Script("store", "store_write", "store_append")
STORE_COMPARE_SET: Final = Script("store", "store_write", "store_compare_set")
STORE_DELETE: Final = Script("store", "store_write", "store_delete")
STORE_BARRIER: Final = Script("store", "store_write", "store_block", "store_barrier")
STORE_WAIT: Final = Script("store", "store_block", "store_wait")
QUEUE_PUSH: Final = Script("store", "store_write", "queue_push")
QUEUE_POP: Final = Script("store", "store_write", "store_block", "queue_pop")
