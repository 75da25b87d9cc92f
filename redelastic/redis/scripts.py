"""The Lua scripts: loaded once from ``lua/``, sent by their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any, Final

from redis.exceptions import NoScriptError

from .client import pack
from .connection import Command, Connection, Timeout

Argument = str | bytes | int | float


class Script:
    """One transition that Redis runs atomically.

    Args:
        parts: names of the files in ``lua/`` that make up the script.
    """

    def __init__(self, *parts: str) -> None:
        self.name, self.parts = parts[-1], parts
        folder = files("redelastic") / "lua"
        lines = "".join((folder / f"{part}.lua").read_text() for part in parts).splitlines(keepends=True)
        # Without comments it is a third as long when it has to be sent whole.
        self.text = "".join(line for line in lines if line.strip() and not line.lstrip().startswith("--"))
        self._digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def __call__(
        self,
        connection: Connection,
        keys: Sequence[str | bytes],
        args: Sequence[Argument] | Callable[[], Sequence[Argument]],
        timeout: Timeout = None,
        then: Callable[[], Command] | None = None,
    ) -> Any:
        """Run the script; see :meth:`Connection.call` for ``timeout`` and errors.

        If ``args`` is a function, it is called before each attempt: its result may be valid only at that moment. So is
        ``then``, which returns a command to send along, by a :class:`DirectClient`.

        Returns:
            The reply; with ``then``, both replies.
        """

        def run(client: Any) -> Any:
            rest = (str(len(keys)), *keys, *(args() if callable(args) else args))
            ask = client.execute_command if then is None else partial(_execute_both, client, then())
            if then is None or self in connection.known:  # what is sent along with it must not be refused
                try:
                    return ask("EVALSHA", self._digest, *rest)
                except NoScriptError:  # a new server, or one whose scripts were flushed
                    pass
            return ask("EVAL", self.text, *rest)

        reply = connection.call(run, timeout)
        connection.served = True
        if then is not None:
            connection.known.add(self)
        return reply

    def packed(self, keys: Sequence[str | bytes], args: Sequence[Argument], *, whole: bool) -> bytes:
        """A request to run the script, as it is sent: whole, or by its digest, for a server that has it."""
        call = ("EVAL", self.text) if whole else ("EVALSHA", self._digest)
        return pack((*call, str(len(keys)), *keys, *args))


def _execute_both(client: Any, second: Command, *first: Any) -> Any:
    return client.execute_both(first, second)


JOIN: Final = Script("run", "roll", "complete", "restore", "join")
BEAT: Final = Script("run", "roll", "complete", "restore", "beat")
ROLL_CALL: Final = Script("run", "roll", "complete", "roll_call")
LEAVE: Final = Script("run", "roll", "complete", "restore", "leave")
CLOSE: Final = Script("run", "close")
DRAIN: Final = Script("run", "drain")
CHARGE: Final = Script("run", "charge")
INSPECT: Final = Script("run", "inspect")
NOTE: Final = Script("run", "note")
READMIT: Final = Script("run", "readmit")

SET_STATE: Final = Script("set_state")

STORE_SET: Final = Script("store", "store_write", "store_set")
STORE_BEFORE: Final = Script("store", "store_before")
STORE_AFTER: Final = Script("store", "store_kept", "store_write", "store_after")
STORE_ADD: Final = Script("store", "store_write", "store_add")
STORE_APPEND: Final = Script("store", "store_write", "store_append")
STORE_COMPARE_SET: Final = Script("store", "store_write", "store_compare_set")
STORE_DELETE: Final = Script("store", "store_write", "store_delete")
STORE_BARRIER: Final = Script("store", "store_write", "store_block", "store_barrier")
STORE_WAIT: Final = Script("store", "store_block", "store_wait")
QUEUE_PUSH: Final = Script("store", "store_write", "queue_push")
QUEUE_POP: Final = Script("store", "store_write", "queue_pop")
