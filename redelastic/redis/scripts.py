"""The Lua scripts: loaded once from ``lua/``, sent by their digest."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from importlib.resources import files
from typing import Any, Final

from redis.exceptions import NoScriptError

from .client import WORD, fixed
from .connection import Connection, Timeout

Argument = str | bytes | int | float

_KEPT: Final = 64  # words: templates for more are made anew for each request
_KEPT_WHOLE: Final = 8  # likewise, of those with a whole script


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
        self.digest = hashlib.sha1(self.text.encode(), usedforsecurity=False).hexdigest()

    def __call__(
        self,
        connection: Connection,
        keys: Sequence[str | bytes],
        args: Sequence[Argument] | Callable[[], Sequence[Argument]],
        timeout: Timeout = None,
    ) -> Any:
        """Run the script; see :meth:`Connection.call` for ``timeout`` and errors.

        If ``args`` is a function, it is called before each attempt: its result may be valid only at that moment.
        """

        def run(client: Any) -> Any:
            rest = (str(len(keys)), *keys, *(args() if callable(args) else args))
            try:
                return client.execute_command("EVALSHA", self.digest, *rest)
            except NoScriptError:  # a new server, or one whose scripts were flushed
                return client.execute_command("EVAL", self.text, *rest)

        reply = connection.call(run, timeout)
        connection.served = True
        return reply


class Call:
    """A script as it is called again and again: what is the same in each request is packed once.

    Args:
        script: what to run.
        keys, args: those with which all requests begin.
    """

    def __init__(self, script: Script, keys: Sequence[str], args: Sequence[str]) -> None:
        self._script, self._keys, self._args = script, [*map(str.encode, keys)], [*map(str.encode, args)]
        self._templates: dict[tuple[int, int, bool], bytes] = {}  # by what :meth:`template` takes

    def packed(self, keys: Sequence[bytes], args: Sequence[bytes], *, whole: bool = False) -> bytes:
        """A request as it is sent: with the whole script, or its digest, for a server that has it."""
        template = self._templates.get((len(keys), len(args), whole))
        words: list[int | bytes] = []  # as by `counted`, without a call
        for word in (*keys, *args):
            words.append(len(word))
            words.append(word)
        return (template or self.template(len(keys), len(args), whole=whole)) % tuple(words)

    def template(self, keys: int, args: int, *, whole: bool) -> bytes:
        """A request with so many keys and arguments, each a :data:`WORD`."""
        call = ["EVAL", self._script.text] if whole else ["EVALSHA", self._script.digest]
        first = [*map(str.encode, call), b"%d" % (len(self._keys) + keys), *self._keys]
        count = len(first) + keys + len(self._args) + args
        template = b"*%d\r\n" % count + fixed(first) + WORD * keys + fixed(self._args) + WORD * args
        if keys + args <= (_KEPT_WHOLE if whole else _KEPT):
            self._templates[keys, args, whole] = template
        return template


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
