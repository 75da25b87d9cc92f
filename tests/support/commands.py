"""Commands of `redelastic`, run in this process or in one of their own."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import redelastic.cli
from tests.support.waiting import Within

if TYPE_CHECKING:  # unneeded imports of a command only show if this module does not make them
    from redelastic.rendezvous.handler import RedisRendezvousHandler
    from redelastic.rendezvous.node import Node
until = Within(60)


@dataclass
class CommandResult:
    """The exit code of a command and what it printed."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Cli = Callable[..., CommandResult]  # type of the fixture `cli` in `cli_fixtures.py`


def run_command(*argv: str) -> CommandResult:
    """Run a command in this process; its output is no terminal."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = redelastic.cli.main(argv)
        except SystemExit as e:
            code = int(e.code or 0)
    return CommandResult(code, out.getvalue(), err.getvalue())


class RunningCommand:
    """A command that runs in its own process, and its output so far.

    Args:
        argv: the command's name and arguments.
        columns: width of its terminal; None: its output goes into a pipe.
    """

    def __init__(self, *argv: str, columns: int | None = None) -> None:
        environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}}
        if columns is None:
            read, write = os.pipe()
        else:
            read, write = pty.openpty()
            fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self._error_end, error_end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "redelastic", *argv],
            stdin=subprocess.DEVNULL,
            stdout=write,
            stderr=error_end,
            env=environment | {"TERM": "xterm-256color"},
        )
        os.close(write)
        os.close(error_end)
        self._texts = {read: "", self._error_end: ""}
        self._out_end = read
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        open_ends = set(self._texts)
        # Incremental, since a read may end within a character.
        decoders = {end: codecs.getincrementaldecoder("utf-8")("replace") for end in open_ends}
        while open_ends:
            for end in select.select(list(open_ends), [], [])[0]:
                try:
                    data = os.read(end, 65536)
                except OSError:  # a terminal whose other end is closed
                    data = b""
                self._texts[end] += decoders[end].decode(data)
                if not data:
                    open_ends.discard(end)
                    os.close(end)

    @property
    def out(self) -> str:
        return self._texts[self._out_end]

    @property
    def err(self) -> str:
        return self._texts[self._error_end]

    def until(self, text: str, *, err: bool = False, after: int = 0) -> None:
        """Wait until ``text`` is in its stdout, or in its stderr, from the character ``after`` on."""
        until(lambda: text in (self.err if err else self.out)[after:] or self.process.poll() is not None, text)
        if text not in (self.err if err else self.out)[after:]:
            self._reader.join(60)  # it has ended, and the rest of its output may still be in the pipe
        assert text in (self.err if err else self.out)[after:], f"it ended, with {self.out}\n{self.err}"

    def interrupt(self) -> int:
        """Send SIGINT, as Ctrl-C does; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        code = self.process.wait(60)
        self._reader.join(60)
        return code


@contextlib.contextmanager
def running_command(*argv: str, columns: int | None = None) -> Iterator[RunningCommand]:
    """Start a command, and kill it at the end if it has not ended."""
    process = RunningCommand(*argv, columns=columns)
    try:
        yield process
    finally:
        process.process.kill()
        process.process.wait()


def with_agent(node: RedisRendezvousHandler) -> RedisRendezvousHandler:
    """Have the node's status say that it runs our agent, which drains need."""
    node.node.describe = lambda base: json.dumps(base | {"agent": "redelastic"})
    return node


def rank_of(node: Node) -> int:
    """The node's rank in its round."""
    entered = node.view.round
    assert entered is not None
    return entered.rank
